"""MetaWorld 3: 50 tabletop tasks of a Sawyer arm, simulated by MuJoCo on the CPU.

Observations are MetaWorld's 39 numbers: hand and object poses now (18) and one step ago (18), then the goal (3).
Actions are 4 numbers in -1 .. 1: the hand's displacement in x, y, z (1 is 1 cm per step) and the gripper (-1 opens).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.base import Slot, SlotSimulator, Transition, check_task_list, check_tasks
from embodyrl.envs.metaworld_tasks import TASKS, known_tasks
from embodyrl.envs.mujoco_painter import Painter
from embodyrl.envs.options import MetaWorldConfig
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.errors import UserError

STEP_LIMIT = 500
"""MetaWorld refuses to step an episode further than this."""


class MetaWorld(SlotSimulator):
    """MetaWorld with state observations."""

    def __init__(self, config: MetaWorldConfig, num_slots: int) -> None:
        check_task_list(config.tasks, "metaworld")
        check_tasks(config.tasks, known_tasks(), "metaworld")
        if config.max_episode_steps > STEP_LIMIT:
            raise UserError(
                f"env.max_episode_steps is {config.max_episode_steps}, but MetaWorld ends its episodes at "
                f"{STEP_LIMIT} steps: set at most that"
            )
        self._end_at_success = config.end_at_success
        super().__init__(
            SimulatorSpec(
                tasks={task: TASKS[task] for task in config.tasks},
                actions=(
                    ActionField(
                        name="arm", meaning="delta_position", unit="m", low=(-1.0,) * 3, high=(1.0,) * 3, scale=0.01
                    ),
                    ActionField(name="gripper", meaning="gripper", unit="1", low=(-1.0,), high=(1.0,)),
                ),
                proprio_dim=39,
                max_episode_steps=config.max_episode_steps,
                control_frequency=80.0,
            ),
            num_slots,
        )

    def make_slot(self, task: str) -> Slot:
        """An environment of `task`."""
        return MetaWorldSlot(task, end_at_success=self._end_at_success)


class MetaWorldSlot(Slot):
    """One MetaWorld environment."""

    def __init__(self, task: str, *, end_at_success: bool) -> None:
        from embodyrl.envs import metaworld_driver

        self._driver = metaworld_driver
        self._env = metaworld_driver.make(task)
        self._end_at_success = end_at_success
        self._observation: NDArray[np.float64] = np.zeros(39)
        self._painter: Painter | None = None

    def reset(self, episode: EpisodeSpec) -> None:
        """Place goal and objects as `episode.start_state` says; MetaWorld draws nothing random after that."""
        self._observation = self._driver.reset(self._env, episode.start_state)
        self._env.np_random = np.random.default_rng(episode.seed)

    def step(self, action: NDArray[np.float32]) -> Transition:
        """Execute `action [4]`."""
        self._observation, reward, info = self._env.step(action)
        success = bool(info["success"])
        return Transition(float(reward), success and self._end_at_success, success)

    def observe(self) -> tuple[None, NDArray[np.float32]]:
        """No images; proprio `[39]`."""
        return None, self._observation.astype(np.float32)

    def render(self) -> NDArray[np.uint8]:
        """The scene as MetaWorld's camera `corner2` sees it, `[480, 480, 3]`."""
        if self._painter is None:
            self._painter = Painter(self._env.model, height=480, width=480)
        upside_down = self._painter.paint(self._env.data, "corner2")
        return np.ascontiguousarray(upside_down[::-1, ::-1])

    def close(self) -> None:
        """Release the environment."""
        if self._painter is not None:
            self._painter.close()
