"""Simulators as Gymnasium knows them: their spaces, and a vector environment for its wrappers and training code.

Shapes: `B` envs, `C` actions in a chunk, `D` action dims, `S` proprio dims, `V` images, `H, W` pixels.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import ArrayLike, NDArray

from embodyrl.envs import Observation
from embodyrl.errors import UserError
from embodyrl.runner.playing import Envs, checked_seed, detached_copy


class GymnasiumEnvs(VectorEnv[Any, ArrayLike, NDArray[Any]]):
    """Simulators as a vector environment of Gymnasium. What its `AsyncVectorEnv` does, this does, too: an env whose
    episode ends shows its last observation; the next step begins its next episode, ignores its action, and gives it a
    reward of 0 (`AutoresetMode.NEXT_STEP`).

    Observations are float32 `[B, S]`, or a dict with `images` uint8 `[B, V, H, W, 3]`, `proprio` float32 `[B, S]` and
    `task_description`, a tuple of `B` texts: see `Envs.single_observation_space`. A step executes a chunk, whose
    rewards are added up; with a `chunk_size` of 1 that is one action.

    Args:
        envs: started simulators, which `close` ends.
    """

    render_mode = "rgb_array"
    observation: Observation
    """The observations that were returned last, as `LoadedPolicy.act` takes them."""

    def __init__(self, envs: Envs) -> None:
        self.envs = envs
        self.num_envs = envs.num_envs
        self.single_observation_space, self.observation_space = envs.single_observation_space, envs.observation_space
        self.single_action_space, self.action_space = envs.single_action_space, envs.action_space
        self.metadata = {
            "autoreset_mode": AutoresetMode.NEXT_STEP,
            "render_modes": [self.render_mode],
            "render_fps": envs.spec.control_frequency,
        }
        self._waiting = np.zeros(self.num_envs, np.bool_)
        """Mask of the envs whose episode ended in the last step."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every env.

        Args:
            seed: begin with the first training episodes of this seed, of which every env has its own; None: continue
                with those of the last one.
            options: there are none.

        Raises:
            UserError: the seed is none, or there are options; the envs are closed.
            WorkerError: a simulator failed; only `close` works then.
        """
        if options:
            raise UserError(f"reset got options {options!r:.60}: these envs have none, so leave them out")
        observation = self.envs.reset(seed=seed)
        super().reset(seed=None if seed is None else checked_seed(seed))
        self._waiting[:] = False
        return self._shown(observation), {}

    def step(
        self, actions: ArrayLike
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Execute actions `[B, D]` in every env, chunks `[B, C, D]` where C is more than 1.

        Returns:
            Observations; rewards float64 `[B]`, of all actions of the chunk; terminations and truncations bool `[B]`;
            infos with `is_success` bool `[B]` (the task's success condition held after an action of the chunk),
            `_is_success` (mask of the envs whose simulator says so), `steps` int32 `[B]` (actions executed), and
            `lost` bool `[B]` (the process died; counted as truncated).

        Raises:
            UserError: see `Envs.step`.
            WorkerError: a simulator failed; only `close` works then.
        """
        chunks, manager = self.envs.checked(actions), self.envs.manager
        playing, waiting = np.flatnonzero(~self._waiting), np.flatnonzero(self._waiting)
        rewards, steps = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int32)
        terminated, truncated, success, known, lost = np.zeros((5, self.num_envs), np.bool_)
        shown = []
        if len(playing):
            result = manager.step(playing, chunks[playing])
            shown.append(detached_copy(result.observation))
            rewards[playing] = result.rewards.sum(1, dtype=np.float64)
            terminated[playing], truncated[playing] = result.terminated, result.truncated | result.lost
            lost[playing], steps[playing] = result.lost, result.steps
            success[playing] = result.success.any(1)
            known[playing] = True if result.success_known is None else result.success_known
        if len(waiting):
            shown.append(detached_copy(manager.reset(waiting, self.envs.begun(waiting))))
        self._waiting = terminated | truncated
        order = np.argsort(np.concatenate([playing, waiting]))
        observation = shown[0] if len(shown) == 1 else Observation.concat(shown).take(order)
        infos = {"is_success": success, "_is_success": known, "steps": steps, "lost": lost}
        return self._shown(observation), rewards, terminated, truncated, infos

    def render(self) -> tuple[NDArray[np.uint8], ...]:
        """Render an image `[H, W, 3]` of every env.

        Raises:
            UserError: the envs are closed, or were never reset.
            WorkerError: the simulator renders no images here, or failed; only `close` works then.
        """
        return tuple(self.envs.render())

    def close_extras(self, **kwargs: Any) -> None:
        """End the simulators."""
        self.envs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _shown(self, observation: Observation) -> Any:
        """Return observations as the space describes them."""
        self.observation = observation
        if isinstance(self.single_observation_space, Box):
            return observation.proprio
        found = {
            "images": observation.images,
            "proprio": observation.proprio,
            "task_description": tuple(observation.task_descriptions),
        }
        return {name: value for name, value in found.items() if value is not None}
