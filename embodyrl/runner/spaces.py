"""Observations and actions of simulators as spaces of Gymnasium."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text
from gymnasium.vector.utils import batch_space

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.perturb.words import with_paraphrases

__all__ = ["action_space", "batch_space", "observation_space"]


def observation_space(spec: SimulatorSpec, *, paraphrases: bool = False) -> Space[Any]:
    """Return the space of an env's observation: a Box of the state if that is all there is, else a Dict of what there
    is.

    Args:
        spec: of the simulator.
        paraphrases: episodes may show paraphrases of their task description.
    """
    proprio = Box(-np.inf, np.inf, (spec.proprio_dim,), np.float32) if spec.proprio_dim else None
    if proprio is not None and not spec.cameras:
        return proprio
    spaces: dict[str, Space[Any]] = {}
    if spec.cameras:
        spaces["images"] = Box(0, 255, (spec.num_images, *spec.image_size, 3), np.uint8)
    if proprio is not None:
        spaces["proprio"] = proprio
    own = list(spec.tasks.values())
    texts = with_paraphrases(own) if paraphrases else own
    longest, letters = max(map(len, texts)), frozenset("".join(texts)) | frozenset(string.printable)
    spaces["task_description"] = Text(max(longest, 1), min_length=0, charset=letters)
    return Dict(spaces)


def action_space(spec: SimulatorSpec, chunk_size: int) -> Space[Any]:
    """Return the space of what an env executes in a step: `[D]`, or `[C, D]` with chunks of several actions."""
    low, high = spec.action_low, spec.action_high
    shape = low.shape if chunk_size == 1 else (chunk_size, *low.shape)
    if any(field.meaning != "discrete" for field in spec.actions):
        return Box(np.broadcast_to(low, shape), np.broadcast_to(high, shape), dtype=np.float32)
    first = low.astype(np.int64)
    count = high.astype(np.int64) - first + 1
    if shape == (1,):
        return Discrete(int(count[0]), start=int(first[0]))
    return MultiDiscrete(np.broadcast_to(count, shape), start=np.broadcast_to(first, shape))
