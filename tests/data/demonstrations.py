"""Demonstrations made up for tests: the action is a known function of the state."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from embodyrl.data.layout import DatasetSpec, Episode
from embodyrl.data.writer import DatasetWriter

PENDULUM = {"action_names": ("torque",), "state_dim": 3, "fps": 20}


def write_numbered(
    folder: Path, lengths: list[int], perturbed: dict[int, list[int]] | None = None, **changes: object
) -> None:
    """Episodes whose state `[number, frame, 0]` and action `100 * number + frame` tell where they are from."""
    spec = DatasetSpec(**{**PENDULUM, "perturbed": perturbed is not None, **changes})
    with DatasetWriter(folder, spec) as writer:
        for number, length in enumerate(lengths):
            frame = np.arange(length)
            state = np.stack([np.full(length, number), frame, np.zeros(length)], 1).astype(np.float32)
            height, width = spec.image_size
            images = np.zeros((length, len(spec.cameras), height, width, 3), np.uint8)
            images[:] = (10 * number + frame)[:, None, None, None, None]
            if spec.cameras:
                images += np.arange(len(spec.cameras), dtype=np.uint8)[:, None, None, None] * 100
            writer.add(
                Episode(
                    task=f"do {number % 2}",
                    proprio=state[:, : spec.state_dim],
                    actions=np.repeat((100.0 * number + frame)[:, None], spec.action_dim, 1).astype(np.float32),
                    images=images if spec.cameras else None,
                    perturbed=None if perturbed is None else np.isin(frame, perturbed.get(number, [])),
                )
            )


def write_pendulum(folder: Path, episodes: int = 8, length: int = 20) -> None:
    """Random states, and a torque that depends on them."""
    rng = np.random.default_rng(0)
    with DatasetWriter(folder, DatasetSpec(**PENDULUM)) as writer:
        for _ in range(episodes):
            angle, speed = rng.uniform(-3, 3, length), rng.uniform(-8, 8, length)
            state = np.stack([np.cos(angle), np.sin(angle), speed], 1).astype(np.float32)
            torque = np.clip(-state[:, 1:2] - 0.2 * state[:, 2:], -2, 2)
            writer.add(Episode(task="swing up", proprio=state, actions=torque))
