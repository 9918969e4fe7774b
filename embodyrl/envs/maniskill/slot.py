"""One environment of ManiSkill on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import AUTO
from embodyrl.envs.base import RenderError, Slot, Transition
from embodyrl.envs.maniskill import loading
from embodyrl.envs.maniskill.loading import action_fields, description_of, start_of
from embodyrl.envs.maniskill.tasks import limit_of
from embodyrl.envs.options import ManiSkillConfig, Proprio
from embodyrl.envs.types import EpisodeSpec


class ManiSkillSlot(Slot):
    """One ManiSkill environment, without Gymnasium's wrappers."""

    def __init__(self, task: str, config: ManiSkillConfig) -> None:
        import torch

        torch.set_num_threads(1)  # the tensors are tiny; more threads only wait for each other
        self._torch = torch
        self._task, self._config = task, config
        self._robot_only = config.proprio is Proprio.robot
        self._env = loading.build(task, config)
        self.time_limit = limit_of(task) if config.max_episode_steps == AUTO else None
        self.fields = action_fields(self._env, task)
        self.task_description = description_of(self._env, task)
        self.control_frequency = float(self._env.control_freq)
        self._observation: Any = self._env.get_obs()
        _, proprio = self.observe()  # the first images take seconds: shaders are compiled
        self.proprio_dim = len(proprio)

    def reset(self, episode: EpisodeSpec) -> None:
        """Start from `episode.start_state`; ManiSkill's tasks draw nothing random afterwards."""
        start = start_of(self._env, episode)
        if self._config.rebuild:
            start["options"] = {**start.get("options", {}), "reconfigure": True}
        with self._torch.inference_mode():
            self._observation, _ = self._env.reset(**start)

    def step(self, action: NDArray[np.float32]) -> Transition:
        """Execute `action [D]`."""
        with self._torch.inference_mode():
            self._observation, reward, _, _, info = self._env.step(self._torch.from_numpy(action))
        success = bool(info["success"]) if "success" in info else None
        failed = bool(info["fail"]) if "fail" in info else False
        return Transition(float(reward), failed or (bool(success) and self._config.end_at_success), success)

    def observe(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32]]:
        """Return images `[V, H, W, 3]`, or None without cameras, and proprio `[S]`."""
        with self._torch.inference_mode():
            images = self._images() if self._config.cameras else None
            return images, self._state()[0].numpy().astype(np.float32)

    def render(self) -> NDArray[np.uint8]:
        """Render the task's camera for people, `[H, W, 3]`."""
        if loading.rendering_device() is None:
            raise loading.NoVulkanError(f"ManiSkill cannot render {self._task!r}")
        with self._torch.inference_mode():
            drawn = self._env.render_rgb_array()
        if drawn is None:
            raise RenderError(f"the ManiSkill task {self._task!r} has no camera for people")
        image: NDArray[np.uint8] = drawn[0].to(self._torch.uint8).cpu().numpy()
        return image

    def close(self) -> None:
        """Release the environment."""
        self._env.close()

    def _images(self) -> NDArray[np.uint8]:
        """Render the cameras, `[V, H, W, 3]`."""
        images: NDArray[np.uint8] = self._env.images()[0].numpy()
        return images

    def _state(self) -> Any:
        """Return the state vector `[1, S]`, or the robot's part of it."""
        return self._env.robot_state() if self._robot_only else self._observation
