"""Driver of ManiSkill's environments through their own interface, for versions that `driver` does not support.

Observations, rewards and success are those of `driver`, bit for bit. Environments come from `gymnasium.make` with
nothing in them replaced; they render their cameras at every step. `loading` changes two things for both drivers: a
question on the terminal becomes an error, and materials have a stand-in on a machine without a Vulkan driver.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from mani_skill.utils import common
from numpy.typing import NDArray

from embodyrl.envs.maniskill.loading import robot_state
from embodyrl.envs.maniskill.simulator import ManiSkillSlot
from embodyrl.envs.options import ManiSkillConfig
from embodyrl.errors import UserError


def make(entry: Any, config: ManiSkillConfig, **settings: Any) -> Any:
    """Build an environment of a registered task, whose observations are nested dictionaries.

    Raises:
        UserError: the task does not offer these observations, or images of this size.
    """
    mode = "rgb+state_dict" if config.cameras else "state_dict"
    offered = entry.cls.SUPPORTED_OBS_MODES
    if "state_dict" not in offered or (config.cameras and "any_textures" not in offered):
        raise UserError(
            f"env.driver = 'upstream' reads observations of ManiSkill's mode {mode}, and {entry.uid!r} offers only "
            f"{', '.join(offered)}: set env.driver to fast"
        )
    height, width = config.image_size
    sensors = {"shader_pack": "minimal", "height": height, "width": width}
    env: Any = gymnasium.make(entry.uid, **settings | {"obs_mode": mode, "sensor_configs": sensors}).unwrapped
    for camera in set(config.cameras) & set(known_cameras(env)):
        if env.scene.sensors[camera].config.intrinsic is not None:
            raise UserError(
                f"env.cameras: the lens of {camera!r} is given in pixels of another image size than env.image_size, "
                "which env.driver = 'upstream' does not convert: set env.driver to fast"
            )
    return env


def known_cameras(env: Any) -> tuple[str, ...]:
    """Return the cameras that the task of `env` and its robot have."""
    return tuple(env.scene.sensors)


class UpstreamSlot(ManiSkillSlot):
    """One ManiSkill environment, with nothing in it replaced."""

    def _images(self) -> NDArray[np.uint8]:
        """Return the images that the last step rendered, `[V, H, W, 3]`."""
        seen = self._observation["sensor_data"]
        return np.stack([seen[camera]["rgb"][0].numpy() for camera in self._config.cameras])

    def _state(self) -> Any:
        """Return the state vector `[1, S]`, or the robot's part of it."""
        if self._robot_only:
            return robot_state(self._env.agent, self._observation["agent"])
        parts = {name: self._observation[name] for name in ("agent", "extra")}
        return common.flatten_state_dict(parts, use_torch=True, device=self._env.device)
