"""What is known of MetaWorld without importing it."""

from __future__ import annotations

from embodyrl.envs.metaworld.tasks import ACTION_DIM, CAMERAS, PROPRIO_DIM, STEP_LIMIT, STEPS_PER_S, TASKS
from embodyrl.envs.mujoco.info import MuJoCoInfo
from embodyrl.envs.options import Driver, MetaWorldConfig


class MetaWorldInfo(MuJoCoInfo[MetaWorldConfig]):
    """Tasks and sizes of MetaWorld."""

    def tasks(self) -> list[str]:
        """Return all task names."""
        return sorted(TASKS)

    def task_description(self, task: str) -> str:
        """Return the task description of a task."""
        return TASKS[task]

    def cameras(self) -> list[str]:
        """Return all camera names; every task has the same."""
        return list(CAMERAS)

    def state_dim(self, env: MetaWorldConfig) -> int:
        """Return the size of the state (S)."""
        return PROPRIO_DIM[env.proprio]

    def action_dim(self, env: MetaWorldConfig) -> int:
        """Return the size of an action (D)."""
        return ACTION_DIM

    def control_frequency(self, env: MetaWorldConfig) -> float:
        """Return the control steps per second [Hz]."""
        return STEPS_PER_S / env.action_repeat

    def perturbations(self, env: MetaWorldConfig) -> list[str]:
        """Return the kinds of perturbation that it can do: all; without the fast driver none of where things begin."""
        placed = ["layout", "robot"] if env.driver is Driver.fast else []
        return [*self._shown(env), *placed, *super().perturbations(env)]

    def time_limit(self, env: MetaWorldConfig) -> int:
        """Return the most actions of an episode."""
        return (STEP_LIMIT - env.settle_steps) // env.action_repeat
