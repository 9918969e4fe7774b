"""gym-hil's tasks of a Panda arm, without its pause before each reset, and with layouts that the seed decides.

Its environments make a renderer when they are built, which needs OpenGL even if nothing is rendered, and draw layouts
from numpy's global generator. Images come from the cameras of the scene.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

TASKS = ("gym_hil/PandaPickCube-v0", "gym_hil/PandaArrangeBoxes-v0")
"""Ids of the tasks whose actions move the end effector by up to 2.5 cm and command the gripper (0 closes, 2 opens)."""


class NoRenderer:
    """Takes the place of the renderer that gym-hil makes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept what a `mujoco.Renderer` does."""

    def render(self) -> None:
        """Render nothing."""

    def close(self) -> None:
        """Release nothing."""


def known_tasks() -> list[str]:
    """Return the ids of the tasks."""
    return list(TASKS)


def make(task: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Make one of the tasks; PickCube places the cube at random unless `random_block_position: false`."""
    if task == TASKS[0]:
        kwargs = {"random_block_position": True, **kwargs}
    mujoco: Any = importlib.import_module("mujoco")
    own = mujoco.Renderer
    mujoco.Renderer = NoRenderer
    try:
        env = gymnasium.make(
            task, disable_env_checker=True, max_episode_steps=-1, **{"reset_delay_seconds": 0.0, **kwargs}
        )
    finally:
        mujoco.Renderer = own
    inner: Any = env.unwrapped
    inner.film_camera, inner.dt = "front", float(inner.control_dt)
    return Seeded(env)


class Seeded(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Draws the layout of an episode from its seed, and leaves numpy's global generator as it was."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        with global_numbers(seed):
            seen, info = self.env.reset(seed=seed)
        return seen, dict(info)


@contextlib.contextmanager
def global_numbers(seed: int | None) -> Iterator[None]:
    """Seed numpy's global generator within a block."""
    before = np.random.get_state()
    if seed is not None:
        np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(before)
