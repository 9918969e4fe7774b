"""The registered simulator, and ManiSkill on the CPU: every slot is a separate environment in this process.

PhysX on the CPU has no batches, but several environments in one process work and do not influence each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import AUTO
from embodyrl.envs.base import RenderError, Slot, SlotSimulator, Transition, check_task_list, check_tasks
from embodyrl.envs.maniskill import loading
from embodyrl.envs.maniskill.batch import ManiSkillBatch
from embodyrl.envs.maniskill.loading import action_fields, description_of, specification, start_of
from embodyrl.envs.maniskill.tasks import limit_of, task_description
from embodyrl.envs.options import Driver, ManiSkillConfig, Proprio, Sim
from embodyrl.envs.types import EpisodeSpec, Simulator
from embodyrl.errors import UserError


def open_simulator(config: ManiSkillConfig, num_slots: int) -> Simulator:
    """Open a simulator of `num_slots` slots; see `ManiSkill` and `ManiSkillBatch` for the errors raised."""
    return ManiSkillBatch(config, num_slots) if config.sim is Sim.gpu else ManiSkill(config, num_slots)


class ManiSkill(SlotSimulator):
    """ManiSkill on the CPU.

    Raises:
        UserError: a task, a camera or an option does not exist, or assets or a driver are missing.
    """

    def __init__(self, config: ManiSkillConfig, num_slots: int) -> None:
        check_task_list(config.tasks, "maniskill")
        registered = loading.load().REGISTERED_ENVS
        check_tasks(config.tasks, sorted(registered), "maniskill")
        self._config = config
        speaking = [task for task in config.tasks if hasattr(registered[task].cls, "get_language_instruction")]
        built = {task: self._make(task) for task in dict.fromkeys([config.tasks[0], *speaking])}
        first = built[config.tasks[0]]
        spec = specification(
            config,
            tasks={
                task: built[task].task_description if task in built else task_description(task) for task in config.tasks
            },
            actions=first.fields,
            proprio_dim=first.proprio_dim,
            control_frequency=first.control_frequency,
        )
        super().__init__(spec, num_slots, spare=list(built.items()))

    def make_slot(self, task: str) -> Slot:
        """Build an environment of `task`."""
        slot = self._make(task)
        if (slot.fields, slot.proprio_dim) != (self.spec.actions, self.spec.proprio_dim):
            raise UserError(
                f"env.tasks mixes tasks of different shapes: {task!r} has {slot.proprio_dim} state numbers and actions "
                f"{[field.name for field in slot.fields]}, {self._config.tasks[0]!r} has {self.spec.proprio_dim} and "
                f"{[field.name for field in self.spec.actions]}: name tasks of one shape"
            )
        return slot

    def _make(self, task: str) -> ManiSkillSlot:
        if self._config.driver is Driver.upstream:
            from embodyrl.envs.maniskill.upstream import UpstreamSlot

            return UpstreamSlot(task, self._config)
        return ManiSkillSlot(task, self._config)


# ------------------------------------------------------------------------------------------------------ one environment


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
