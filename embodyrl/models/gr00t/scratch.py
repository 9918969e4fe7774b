"""The files of a model that starts from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import is_discrete
from embodyrl.models.errors import PolicyError
from embodyrl.models.gr00t.architecture import Architecture, Transformer
from embodyrl.models.gr00t.files import TOKENIZER, CheckpointFiles, read_statistics
from embodyrl.models.gr00t.options import Gr00tConfig
from embodyrl.models.gr00t.prompts import word_tokenizer
from embodyrl.models.gr00t.tokens import PIECE, SPECIAL

ROBOT = "simulator"
"""The robot that such a model knows, if no statistics name another."""


def scratch_files(model: Gr00tConfig, simulator: SimulatorSpec, chunk_size: int) -> CheckpointFiles:
    """Files of a model that starts with random weights: the simulator's sentences are its vocabulary; the simulator's
    action range is its range, unless the config names statistics.

    Raises:
        PolicyError: the simulator takes a choice among n instead of continuous numbers, or the statistics cannot be
            read.
    """
    if is_discrete(simulator):
        raise PolicyError("this simulator takes one choice among n, the model needs continuous actions")
    metadata, origin = (
        (_statistics(simulator), "the simulator")
        if model.statistics is None
        else read_statistics(Path(model.statistics))
    )
    tokenizer = word_tokenizer(simulator.tasks.values())
    config = model.scratch
    heads, horizon = config.heads, config.action_horizon or chunk_size
    architecture = Architecture(
        vision={
            **Architecture().vision,
            "hidden_size": config.vision_size,
            "intermediate_size": 4 * config.vision_size,
            "num_hidden_layers": config.vision_layers,
            "num_attention_heads": heads,
            "image_size": config.image_size,
            "patch_size": config.patch_size,
        },
        text={
            **Architecture().text,
            "hidden_size": config.hidden_size,
            "intermediate_size": 3 * config.hidden_size,
            "num_hidden_layers": config.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": config.hidden_size // heads,
            "vocab_size": tokenizer.get_vocab_size(),
            "initializer_range": config.initializer_range,
        },
        text_layers=config.layers,
        image_token=SPECIAL.index(PIECE),
        vl_self_attention=Transformer(
            layers=config.self_attention_layers, heads=heads, head_dim=config.hidden_size // heads
        ),
        dit=Transformer(layers=config.action_layers, heads=heads, head_dim=config.action_size // heads),
        dit_outputs=config.action_size,
        hidden=config.action_size,
        max_state_dim=max(simulator.proprio_dim, 1),
        max_action_dim=simulator.action_dim,
        action_horizon=horizon,
        future_tokens=4,
        embodiments=1,
        max_positions=horizon,
    )
    return CheckpointFiles(
        config=architecture.to_config(),
        eagle=architecture.to_eagle_config(),
        metadata=metadata,
        origin=origin,
        tokenizer={TOKENIZER: tokenizer.to_str().encode()},
    )


def _statistics(simulator: SimulatorSpec) -> dict[str, Any]:
    """Metadata that map [-1, 1] to the simulator's action range, and take states as they are."""
    low, high = simulator.action_low, simulator.action_high
    centre, half = (0.5 * (low + high)).tolist(), (0.5 * (high - low)).tolist()
    count = simulator.proprio_dim
    action = {"min": low.tolist(), "max": high.tolist(), "mean": centre, "std": half}
    state = {"min": [-1.0] * count, "max": [1.0] * count, "mean": [0.0] * count, "std": [1.0] * count}
    numbers = {"state": {"state": state}, "action": {"action": action}}
    return {ROBOT: {"statistics": numbers, "modalities": {"video": {camera: {} for camera in simulator.cameras}}}}
