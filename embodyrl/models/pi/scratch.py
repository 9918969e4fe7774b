"""The files of a model that starts from nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from torch import nn

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import is_discrete, unit_range
from embodyrl.models.errors import PolicyError
from embodyrl.models.pi.files import OPENPI, TOKENIZERS, CheckpointFiles
from embodyrl.models.pi.layout import Layout
from embodyrl.models.pi.network import Pi
from embodyrl.models.pi.options import PiConfig, StateInput
from embodyrl.models.pi.prompts import Prompts, word_tokenizer
from embodyrl.models.pi.tokens import read_tokenizer


def scratch_files(config: PiConfig, simulator: SimulatorSpec, chunk_size: int) -> CheckpointFiles:
    """Files of a model whose vocabulary are the simulator's sentences, whose ranges are the simulator's unless
    statistics are given, and whose horizon is a chunk.

    Raises:
        PolicyError: the simulator takes a choice among n instead of continuous numbers, or there are no statistics
            where they are said to be.
    """
    if is_discrete(simulator):
        raise PolicyError("this simulator takes one choice among n, the model needs continuous actions")
    tokenizer = word_tokenizer(simulator.tasks.values())
    prompts = Prompts(*read_tokenizer(TOKENIZERS[0], tokenizer.to_str().encode()), length=0)
    state = np.zeros(simulator.proprio_dim) if config.state is StateInput.prompt else None
    sizes = config.scratch
    description = {
        "type": config.name,
        "max_action_dim": simulator.action_dim,
        "max_state_dim": max(1, simulator.proprio_dim),
        "chunk_size": chunk_size,
        "tokenizer_max_length": max(len(prompts.ids(task, state)) for task in simulator.tasks.values()),
        "image_resolution": [sizes.image_size] * 2,
        "input_features": {f"observation.images.{camera}": {"type": "VISUAL"} for camera in simulator.cameras},
        "vlm_config": {
            "text_config": _gemma(config, sizes.hidden_size) | {"vocab_size": tokenizer.get_vocab_size()},
            "vision_config": {
                "hidden_size": sizes.vision_size,
                "intermediate_size": int(sizes.vision_size * sizes.mlp_ratio),
                "num_hidden_layers": sizes.layers,
                "num_attention_heads": sizes.heads,
                "patch_size": sizes.patch_size,
            },
        },
        "dit_config": _gemma(config, sizes.expert_size),
    }
    ranges = (json.dumps({"norm_stats": _ranges(simulator)}, indent=2) + "\n").encode()
    companions = {OPENPI: ranges, TOKENIZERS[0]: tokenizer.to_str().encode()}
    files = CheckpointFiles(config=description, companions=companions, layout=Layout(expert_head=False))
    return files if config.statistics is None else files.with_statistics(config.statistics)


def _gemma(config: PiConfig, width: int) -> dict[str, int]:
    """Both experts have the heads of the wider one, whose keys they share."""
    sizes = config.scratch
    return {
        "hidden_size": width,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": int(width * sizes.mlp_ratio),
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": 1,
        "head_dim": max(sizes.hidden_size, sizes.expert_size) // sizes.heads // 2 * 2,
    }


def _ranges(simulator: SimulatorSpec) -> dict[str, Any]:
    """Statistics that map the simulator's action range to [-1, 1], and take states as they are."""
    centre, half_width = unit_range(simulator)
    zeros, ones = np.zeros(simulator.proprio_dim), np.ones(simulator.proprio_dim)
    numbers = {
        "actions": (centre, half_width, simulator.action_low, simulator.action_high),
        "state": (zeros, ones, -ones, ones),
    }
    names = ("mean", "std", "q01", "q99")
    return {
        key: {name: np.asarray(column).tolist() for name, column in zip(names, columns, strict=True)}
        for key, columns in numbers.items()
    }


def initialize(network: Pi) -> None:
    """Random weights for a small model: words as long as picture tokens, and gates of adaptive norms open."""
    nn.init.normal_(network.embed_tokens.weight, std=network.architecture.language.width**-0.5)
    nn.init.normal_(network.vision.embeddings.position_embedding.weight, std=0.1)
    for name, parameter in network.expert.named_parameters():
        if name.endswith("dense.weight"):
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("dense.bias"):
            nn.init.zeros_(parameter)
            nn.init.ones_(parameter[-network.architecture.expert.width :])
