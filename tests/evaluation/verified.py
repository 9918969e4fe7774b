"""A plug-in with a simulator whose states can be set, and the model of verified_model.py.

Each layer can be changed by an environment variable that is read when the layer works."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import EnvConfig, ModelConfig
from embodyrl.envs import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.envs.base import Slot, SlotSimulator, Transition
from embodyrl.registry import SIMULATORS, SupportedModel


def changed(layer: str) -> float:
    """Return how far a layer is from what it was."""
    return float(os.environ.get(f"CHANGED_{layer.upper()}", "0"))


class Plane(Slot):
    """A point with inertia that is pushed to the middle, and a grey image of it."""

    def __init__(self) -> None:
        self.state = np.zeros(4)

    def reset(self, episode: EpisodeSpec) -> None:
        self.state = np.concatenate([np.random.default_rng(episode.start_state).uniform(-1, 1, 2), np.zeros(2)])

    def step(self, action: NDArray[np.float32]) -> Transition:
        place, speed = self.state[:2], self.state[2:]
        speed = 0.8 * speed + (0.2 + changed("physics")) * action
        self.state = np.concatenate([place + 0.2 * speed, speed])
        distance = float(np.linalg.norm(self.state[:2]))
        return Transition(-distance, False, distance < 0.7)

    def observe(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        light = 200 + int(changed("rendering"))
        image = np.full((1, 16, 16, 3), 20, np.uint8)
        column, row = ((np.clip(self.state[:2], -1, 1) + 1) * 6).astype(int)
        image[0, row : row + 4, column : column + 4] = light
        return image, self.state.astype(np.float32)

    def snapshot(self) -> Mapping[str, NDArray[Any]]:
        return {"state": self.state.copy(), "speed": np.array(np.abs(self.state[2:]).sum())}

    def restore(self, episode: EpisodeSpec, snapshot: Mapping[str, NDArray[Any]]) -> None:
        self.state = snapshot["state"].copy()


class Planes(SlotSimulator):
    """Points in planes."""

    def __init__(self, config: EnvConfig, num_slots: int) -> None:
        push = ActionField(name="push", meaning="force", unit="N", low=(-1.0, -1.0), high=(1.0, 1.0))
        spec = SimulatorSpec(
            tasks={"middle": "push the point to the middle"},
            actions=(push,),
            proprio_dim=4,
            max_episode_steps=config.max_episode_steps,
            control_frequency=5.0,
            cameras=("top",),
            image_size=(16, 16),
        )
        super().__init__(spec, num_slots)

    def make_slot(self, task: str) -> Slot:
        return Plane()


SIMULATORS.register("planes", target=Planes, options=EnvConfig, summary="points in planes")
SupportedModel.register(
    "small", target="verified_model:Small", options=ModelConfig, critic=True, max_chunk=1, summary="a convolution"
)
