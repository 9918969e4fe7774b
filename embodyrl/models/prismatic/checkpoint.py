"""Files of an OpenVLA or OpenVLA-OFT checkpoint beside the weights. Also builds these files for models with random
weights, and for the published size.

Imports no torch, so that a config can be checked against its checkpoint before anything starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.prismatic.config import THREE_LAYERS, ScratchConfig
from embodyrl.models.prismatic.prompts import PAD, word_tokenizer
from embodyrl.models.saved import parse_json, read_json
from embodyrl.models.vla.checkpoint import CONFIG, FilesBesideWeights, simulator_to_start_in

# ---------------------------------------------------------------------------------------------------------------- files

STATISTICS = "dataset_statistics.json"
PREPROCESSOR, TOKENIZER = "preprocessor_config.json", "tokenizer.json"
COMPANIONS = (
    PREPROCESSOR,
    TOKENIZER,
    "processor_config.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    STATISTICS,
)
"""Files that `save` writes unchanged."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles(FilesBesideWeights):
    """All files except the weights."""

    @classmethod
    def read(cls, folder: Path) -> CheckpointFiles:
        """Read a checkpoint's folder.

        Raises:
            PolicyError: it is not the folder of such a checkpoint.
        """
        for name in (CONFIG, PREPROCESSOR, TOKENIZER):
            if not (folder / name).is_file():
                raise PolicyError(
                    f"{folder} holds no {name}", "give the folder of an OpenVLA or OpenVLA-OFT checkpoint"
                )
        companions = {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}
        files = cls(config=read_json(folder / CONFIG), companions=companions)
        for name in (PREPROCESSOR, STATISTICS):
            files.parse(name)
        return files

    def parse(self, name: str) -> dict[str, Any]:
        """Return the contents of a JSON companion; empty if the file does not exist."""
        return parse_json(self.companions.get(name, b"{}"), name)

    @property
    def statistics(self) -> dict[str, Any]:
        """Return statistics of the training data by data set; fine-tuned models have them in a separate file."""
        return {**self.config.get("norm_stats", {}), **self.parse(STATISTICS)}

    @property
    def tokenizer(self) -> str:
        """Return the text of tokenizer.json."""
        return self.companions[TOKENIZER].decode()


def head_file(folder: Path, name: str) -> Path:
    """Return the file of a head.

    Raises:
        PolicyError: there is none, or there are several.
    """
    found = sorted(folder.glob(f"{name}--*_checkpoint.pt"))
    if not found:
        raise PolicyError(f"{folder} holds no {name}--*_checkpoint.pt, which the model's options ask for")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise PolicyError(f"{folder} holds several files of the {name} ({names}): leave the one to use")
    return found[0]


# ------------------------------------------------------------------------------------------------- without a checkpoint

SIDE = 224
ACTION_DIM, PROPRIO_DIM = 7, 8
PUBLISHED_CONFIG: dict[str, Any] = {
    "model_type": "openvla",
    "arch_specifier": f"no-align+{THREE_LAYERS}",
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "image_sizes": [SIDE, SIDE],
    "use_fused_vision_backbone": True,
    "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000},
    "pad_token_id": 32000,
    "pad_to_multiple_of": 64,
    "n_action_bins": 256,
    "norm_stats": {},
}
"""config.json of the published checkpoints. Missing sizes have LlamaConfig's defaults, which are those of Llama 2 7B
except for the longest sequence."""


def published_files(key: str | None) -> CheckpointFiles:
    """Build the files of a model of the published size, with statistics called `key`."""
    resize = {"size": [SIDE, SIDE], "interpolation": 3}
    preprocessor = {
        "image_resize_strategy": "resize-naive",
        "tvf_resize_params": [resize] * 2,
        "tvf_normalize_params": [{"mean": [0.5] * 3, "std": [0.5] * 3}] * 2,
    }
    mask = [True] * (ACTION_DIM - 1) + [False]
    statistics = {key or "published": {"action": _unit(ACTION_DIM) | {"mask": mask}, "proprio": _unit(PROPRIO_DIM)}}
    companions = {PREPROCESSOR: preprocessor, STATISTICS: statistics}
    written = {name: json.dumps(content).encode() for name, content in companions.items()}
    return CheckpointFiles(
        config=PUBLISHED_CONFIG, companions=written | {TOKENIZER: word_tokenizer([]).to_str().encode()}
    )


def _unit(size: int) -> dict[str, Any]:
    """Return statistics of the range -1 .. 1."""
    low, high = [-1.0] * size, [1.0] * size
    return {"min": low, "max": high, "q01": low, "q99": high}


BINS = 256


def scratch_files(config: ScratchConfig, simulator: SimulatorSpec | None) -> CheckpointFiles:
    """Build the files of a model with random weights. Its vocabulary is that of the simulator's task descriptions, its
    action range is the simulator's.

    Raises:
        PolicyError: there is no simulator (None), or its actions are discrete.
    """
    simulator = simulator_to_start_in(simulator)
    tokenizer = word_tokenizer(simulator.tasks.values())
    pad = tokenizer.token_to_id(PAD)
    towers = len(config.vision)
    text = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size() + BINS,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "initializer_range": config.initializer_range,
        "pad_token_id": pad,
    }
    description = {
        "model_type": "openvla",
        "arch_specifier": f"no-align+{THREE_LAYERS}",
        "timm_model_ids": list(config.vision),
        "timm_override_act_layers": [None] * towers,
        "image_sizes": [config.image_size] * towers,
        "use_fused_vision_backbone": towers == 2,
        "text_config": text,
        "pad_token_id": pad,
        "pad_to_multiple_of": 0,
        "n_action_bins": BINS,
        "norm_stats": {},
    }
    resize = {"size": [config.image_size] * 2, "interpolation": 3}
    preprocessor = {
        "image_resize_strategy": "resize-naive",
        "tvf_resize_params": [resize] * towers,
        "tvf_normalize_params": [{"mean": [0.5] * 3, "std": [0.5] * 3}] * towers,
    }
    companions = {PREPROCESSOR: preprocessor, STATISTICS: {"simulator": _ranges(simulator)}}
    written = {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in companions.items()}
    return CheckpointFiles(config=description, companions=written | {TOKENIZER: tokenizer.to_str().encode()})


def _ranges(simulator: SimulatorSpec) -> dict[str, Any]:
    """Return statistics that map [-1, 1] to the simulator's action range and leave states unchanged."""
    low, high = simulator.action_low.tolist(), simulator.action_high.tolist()
    ones = np.ones(simulator.proprio_dim)
    ends = {"min": low, "max": high, "q01": low, "q99": high, "mask": [True] * len(low)}
    states = {name: (sign * ones).tolist() for name, sign in (("min", -1), ("max", 1), ("q01", -1), ("q99", 1))}
    return {"action": ends, "proprio": states}
