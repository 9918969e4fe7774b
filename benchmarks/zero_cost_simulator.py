"""A plug-in for `transport.py`: simulators whose steps cost nothing, so that only the cost of data transfer is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import EnvConfig, setting
from embodyrl.envs.types import ActionField, ChunkResult, EpisodeSpec, Observation, SimulatorSpec
from embodyrl.registry import SIMULATORS

CAMERAS, SIZE, PROPRIO, ACTION = 2, 224, 8, 7
IMAGES = np.random.default_rng(0).integers(0, 256, (CAMERAS, SIZE, SIZE, 3), np.uint8)
STATE = np.zeros(PROPRIO, np.float32)


@dataclass(frozen=True, kw_only=True)
class ZeroCostConfig(EnvConfig):
    """The cameras are front and wrist, unless `cameras` names one alone."""

    name: str = "zero_cost"
    tasks: list[str] = setting(["nothing"])


class ZeroCost:
    """Returns the same images at every step, in the form that a real simulator returns."""

    def __init__(self, config: ZeroCostConfig, num_slots: int) -> None:
        """Build `num_slots` slots."""
        size = config.image_size[0], config.image_size[1]
        self.spec = SimulatorSpec(
            tasks={"nothing": "do nothing"},
            actions=(ActionField(name="all", meaning="native", unit="1", low=(-1.0,) * ACTION, high=(1.0,) * ACTION),),
            proprio_dim=PROPRIO,
            max_episode_steps=config.time_limit,
            control_frequency=20.0,
            cameras=tuple(config.cameras) or ("front", "wrist"),
            image_size=size,
        )
        drawn = np.random.default_rng(0).integers(0, 256, (len(self.spec.cameras), *size, 3), np.uint8)
        self._images = np.stack([drawn] * num_slots)
        self._state = np.stack([STATE] * num_slots)

    def reset(self, slots: Sequence[int], episodes: Sequence[EpisodeSpec]) -> Observation:
        """Nothing to reset."""
        return self.observe(slots)

    def step_chunk(self, slots: Sequence[int], actions: NDArray[np.float32]) -> ChunkResult:
        """Nothing happens."""
        batch, chunk = actions.shape[:2]
        return ChunkResult(
            observation=self.observe(slots),
            rewards=np.zeros((batch, chunk), np.float32),
            success=np.zeros((batch, chunk), np.bool_),
            terminated=np.zeros(batch, np.bool_),
            truncated=np.zeros(batch, np.bool_),
            steps=np.full(batch, chunk, np.int32),
        )

    def observe(self, slots: Sequence[int]) -> Observation:
        """Return the constant observation."""
        count = len(slots)
        return Observation(
            images=self._images[:count], proprio=self._state[:count], task_descriptions=["do nothing"] * count
        )

    def get_state(self, slots: Sequence[int]) -> list[bytes]:
        """There is none."""
        return [b""] * len(slots)

    def set_state(self, slots: Sequence[int], states: Sequence[bytes]) -> None:
        """There is none."""

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """The first camera."""
        return self._images[: len(slots), 0]

    def close(self) -> None:
        """Nothing to close."""


class ZeroCostEnv(gymnasium.Env[dict[str, Any], NDArray[np.float32]]):
    """The same as a Gymnasium environment."""

    observation_space = gymnasium.spaces.Dict(
        {
            "images": gymnasium.spaces.Box(0, 255, IMAGES.shape, np.uint8),
            "proprio": gymnasium.spaces.Box(-1.0, 1.0, STATE.shape, np.float32),
        }
    )
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTION,), np.float32)

    def __init__(self) -> None:
        """Make images of its own, as a real environment does (a fork would share them)."""
        self._observation = {"images": IMAGES.copy(), "proprio": STATE.copy()}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Nothing to reset."""
        return self._observation, {}

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Nothing happens."""
        return self._observation, 0.0, False, False, {}


SIMULATORS.register(
    "zero_cost",
    target=ZeroCost,
    options=ZeroCostConfig,
    summary="steps that cost nothing",
    preload=("gymnasium", "embodyrl.envs.manager.worker"),
)
