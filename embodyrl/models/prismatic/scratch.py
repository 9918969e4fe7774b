"""The files of a model that starts from nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import is_discrete
from embodyrl.models.errors import PolicyError
from embodyrl.models.prismatic.architecture import THREE_LAYERS
from embodyrl.models.prismatic.files import PREPROCESSOR, STATISTICS, TOKENIZER, CheckpointFiles
from embodyrl.models.prismatic.options import ScratchConfig
from embodyrl.models.prismatic.prompts import PAD, word_tokenizer

BINS = 256


def scratch_files(config: ScratchConfig, simulator: SimulatorSpec) -> CheckpointFiles:
    """Files of a model that starts with random weights: the simulator's sentences are its vocabulary, the simulator's
    action range is its range.

    Raises:
        PolicyError: the simulator takes a choice among n instead of continuous numbers.
    """
    if is_discrete(simulator):
        raise PolicyError("this simulator takes one choice among n, the model needs continuous actions")
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
    """Statistics that map [-1, 1] to the simulator's action range, and take states as they are."""
    low, high = simulator.action_low.tolist(), simulator.action_high.tolist()
    ones = np.ones(simulator.proprio_dim)
    ends = {"min": low, "max": high, "q01": low, "q99": high, "mask": [True] * len(low)}
    states = {name: (sign * ones).tolist() for name, sign in (("min", -1), ("max", 1), ("q01", -1), ("q99", 1))}
    return {"action": ends, "proprio": states}
