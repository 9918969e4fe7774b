"""Files of a SmolVLA checkpoint beside the weights, and names of weights. Also builds these files for models with
random weights, and for the published size.

Imports no torch, so that a config can be checked against its checkpoint before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import told_texts
from embodyrl.models.lerobot import (
    ACTION,
    BUFFERS,
    STATE,
    LerobotFiles,
    Robot,
    new_features,
    new_numbers,
    read_buffers,
    read_companions,
    refuse_scaled_images,
)
from embodyrl.models.saved import parse_json, weight_shapes
from embodyrl.models.smolvla.config import DEFAULTS, NAMES_500M, VLM, VLM_500M, Architecture, SmolVLAConfig
from embodyrl.models.smolvla.prompts import PAD, ended, new_tokenizer, read_tokenizer
from embodyrl.models.vla.config import StateInput
from embodyrl.models.vla.folder import CONFIG
from embodyrl.models.vla.prompts import TOKENIZER

# ----------------------------------------------------------------------------------------------------- names of weights

BOTH = "model.vlm_with_expert."
PARTS = {
    "vision.": f"{BOTH}vlm.model.vision_model.",
    "connector.": f"{BOTH}vlm.model.connector.modality_projection.proj.",
    "text.": f"{BOTH}vlm.model.text_model.",
    "lm_head.": f"{BOTH}vlm.lm_head.",
    "expert.": f"{BOTH}lm_expert.",
    "": "model.",
}
"""Prefixes of names in the network and in public files."""
HEAD = f"{BOTH}vlm.lm_head.weight"


def public_name(name: str) -> str:
    """Return the name in a file of a name in the network."""
    own = next(own for own in PARTS if name.startswith(own))
    return PARTS[own] + name.removeprefix(own)


def own_name(public: str) -> str | None:
    """Return the name in the network of a name in a file; None for a buffer of normalisation, which is none of its."""
    if public.startswith(BUFFERS):
        return None
    for own, beginning in PARTS.items():
        if public.startswith(beginning):
            return own + public.removeprefix(beginning)
    return public


# ---------------------------------------------------------------------------------------------------------------- files

VLM_FOLDER = "vlm"
VLM_FILES = (CONFIG, TOKENIZER, "tokenizer_config.json")
"""Files of the vision-language model that are read; the last one may be missing."""
MARKERS = ("<fake_token_around_image>", "<global-img>")


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles(LerobotFiles):
    """All files of a checkpoint except the weights."""

    DEFAULTS = DEFAULTS

    has_head: bool
    """Whether the weights include the language model's output layer, which nothing uses."""

    @classmethod
    def read(cls, config: SmolVLAConfig) -> CheckpointFiles:
        """See `CheckpointFolder.read`; the vision-language model's files are in the folder `config.vlm`, if it is
        given."""
        folder = Path(str(config.checkpoint))
        found = read_companions(folder, VLM_FOLDER)
        if config.vlm is not None:
            found = {name: content for name, content in found.items() if not name.startswith(f"{VLM_FOLDER}/")}
            found |= _read_vlm(Path(config.vlm))
        return cls(companions=found, buffers=read_buffers(folder), has_head=HEAD in weight_shapes(folder))

    @classmethod
    def scratch(cls, config: SmolVLAConfig, simulator: SimulatorSpec, chunk_size: int) -> CheckpointFiles:
        """See `CheckpointFolder.scratch`."""
        texts = told_texts(simulator.tasks.values(), config.indicator)
        tokenizer = new_tokenizer(texts)
        sizes, state, action = config.scratch, max(1, simulator.proprio_dim), simulator.action_dim
        description = _description(simulator.cameras, sizes.image_size, state, action) | {
            "max_action_dim": action,
            "max_state_dim": state,
            "chunk_size": config.horizon or chunk_size,
            "n_action_steps": chunk_size,
            "tokenizer_max_length": max(len(tokenizer.encode(ended(text)).ids) for text in texts),
            "num_vlm_layers": sizes.layers,
            "expert_width_multiplier": sizes.expert_width,
            "self_attn_every_n_layers": sizes.self_attention_every,
        }
        vlm = {
            "scale_factor": sizes.shuffle,
            "pad_token_id": tokenizer.token_to_id(PAD),
            "vision_config": {
                "hidden_size": sizes.vision_size,
                "intermediate_size": int(sizes.vision_size * sizes.mlp_ratio),
                "num_hidden_layers": sizes.vision_layers,
                "num_attention_heads": sizes.heads,
                "image_size": sizes.image_size,
                "patch_size": sizes.patch_size,
            },
            "text_config": {
                "hidden_size": sizes.hidden_size,
                "intermediate_size": int(sizes.hidden_size * sizes.mlp_ratio),
                "num_hidden_layers": sizes.layers,
                "num_attention_heads": sizes.heads,
                "num_key_value_heads": 1,
                "head_dim": sizes.hidden_size // sizes.heads // 2 * 2,
                "vocab_size": tokenizer.get_vocab_size(),
            },
        }
        numbers = new_numbers(state, action, simulator)
        return cls.new(description, numbers, _vlm_files(vlm, tokenizer), has_head=False)

    @classmethod
    def published(cls, config: SmolVLAConfig) -> CheckpointFiles:
        """See `CheckpointFolder.published`; for LIBERO's robot."""
        description = _description(("image", "image2"), 512, 8, 7)
        return cls.new(description, new_numbers(8, 7), _vlm_files(VLM_500M, new_tokenizer([])), has_head=True)

    def steps_between(self) -> Sequence[Mapping[str, Any]]:
        """See `LerobotFiles.steps_between`."""
        tokens = {
            "max_length": self.config["tokenizer_max_length"],
            "task_key": "task",
            "padding_side": "right",
            "padding": self.config["pad_language_to"],
            "truncation": True,
            "tokenizer_name": self.config["vlm_model_name"],
        }
        return [
            {"registry_name": "smolvla_new_line_processor", "config": {}},
            {"registry_name": "tokenizer_processor", "config": tokens},
            *super().steps_between(),
        ]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The language model's tokenizer.

        Raises:
            PolicyError: there is none, or it is damaged.
        """
        content = self.companions.get(f"{VLM_FOLDER}/{TOKENIZER}")
        if content is None:
            raise self._no_vlm(TOKENIZER)
        return read_tokenizer(content)

    @cached_property
    def architecture(self) -> Architecture:
        """Shapes and connections of the network.

        Raises:
            PolicyError: a file is missing or damaged, or asks for what is not implemented.
        """
        content = self.companions.get(f"{VLM_FOLDER}/{CONFIG}")
        if content is not None:
            config: Mapping[str, Any] = parse_json(content, f"{VLM_FOLDER}/{CONFIG}")
        elif str(self.config["vlm_model_name"]).endswith(NAMES_500M):
            config = VLM_500M
        else:
            raise self._no_vlm(CONFIG)
        markers = self._markers()
        if self.config["add_image_special_tokens"] and markers is None:
            raise PolicyError(f"{TOKENIZER} has no tokens {' and '.join(MARKERS)}, which mark images", "set model.vlm")
        vlm = VLM(config=config, markers=markers, pad_token=self._pad_token(config))
        return Architecture.from_config(self.config, vlm)

    def _markers(self) -> tuple[int, int] | None:
        """Return the ids of the tokens that mark images; None if the tokenizer lacks one."""
        first, second = (self.tokenizer.token_to_id(token) for token in MARKERS)
        return None if first is None or second is None else (first, second)

    def _pad_token(self, config: Mapping[str, Any]) -> int:
        """Return the id of the token that fills up task descriptions; what is there makes no difference."""
        content = self.companions.get(f"{VLM_FOLDER}/tokenizer_config.json", b"{}")
        token = parse_json(content, "tokenizer_config.json").get("pad_token", PAD)
        found = self.tokenizer.token_to_id(str(token.get("content", PAD) if isinstance(token, Mapping) else token))
        return int(config.get("pad_token_id") or 0) if found is None else int(found)

    def _no_vlm(self, file: str) -> PolicyError:
        name = self.config["vlm_model_name"]
        return PolicyError(
            f"the checkpoint has no {VLM_FOLDER}/{file}: set model.vlm to the folder of {name}, with {CONFIG} and "
            f"{TOKENIZER} (its weights are not needed)"
        )

    def robot(self, config: SmolVLAConfig) -> Robot:
        """Return the normalisation of states and actions.

        Raises:
            PolicyError: statistics are missing or damaged.
        """
        found = self.statistics
        refuse_scaled_images(found.ways)
        states = found.scale(STATE, "STATE") if config.state is StateInput.token else None
        return Robot(states=states, actions=found.scale(ACTION, "ACTION"))


def _read_vlm(folder: Path) -> dict[str, bytes]:
    """Return the files of a vision-language model that are needed."""
    lacking = [name for name in VLM_FILES[:2] if not (folder / name).is_file()]
    if lacking:
        raise PolicyError(
            f"model.vlm = {str(folder)!r} has no {' and no '.join(lacking)}", "give the folder of SmolVLM2"
        )
    return {f"{VLM_FOLDER}/{name}": (folder / name).read_bytes() for name in VLM_FILES if (folder / name).is_file()}


def _vlm_files(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of a new model's vision-language model."""
    return {
        f"{VLM_FOLDER}/{CONFIG}": json.dumps({"model_type": "smolvlm", **config}, indent=2).encode(),
        f"{VLM_FOLDER}/{TOKENIZER}": tokenizer.to_str().encode(),
    }


def files_before_simulator(
    cameras: Sequence[str], side: int, proprio: int | None, acting: int | None
) -> CheckpointFiles:
    """Return the files of a model with random weights as far as statistics depend on them; sizes that only the
    simulator knows are None."""
    description = _description(cameras, side, proprio or 1, acting or 1)
    return CheckpointFiles(companions={CONFIG: json.dumps(description).encode()}, buffers={}, has_head=False)


def _description(cameras: Sequence[str], side: int, state: int, action: int) -> dict[str, Any]:
    """Return the config.json of a new policy, with LeRobot's settings where they are not given."""
    return {
        **DEFAULTS,
        "n_obs_steps": 1,
        **new_features(dict.fromkeys(cameras, (3, side, side)), state=state, action=action),
        "resize_imgs_with_padding": [side, side],
        "pad_language_to": "max_length",
        "vlm_model_name": VLM_FOLDER,
        "load_vlm_weights": False,
    }
