"""Fast driver of ManiSkill's environments: state vectors at every step, images only on request.

ManiSkill's code is written for batches on the GPU. On the CPU every pose and every joint target goes through general
conversions, several dozen per step. The three shortcuts here give the same numbers bit for bit
(`tests/envs/test_maniskill.py` compares them) and save a fifth to a third of the time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.envs.tasks.digital_twins.base_env import BaseDigitalTwinEnv
from mani_skill.sensors.camera import parse_camera_configs
from mani_skill.utils import common
from mani_skill.utils.structs import Articulation
from mani_skill.utils.structs.pose import Pose

from embodyrl.envs.maniskill.loading import robot_state
from embodyrl.envs.options import ManiSkillConfig

_create = Pose.create.__func__
_set_joint_drive_targets = Articulation.set_joint_drive_targets


def install() -> None:
    """Replace ManiSkill's methods by the shortcuts for poses and joint targets, in this process."""
    Pose.create = classmethod(_quick_pose)
    Articulation.set_joint_drive_targets = _quick_joint_targets


def make(entry: Any, config: ManiSkillConfig, **settings: Any) -> Any:
    """Build an environment of a registered task, whose observations are ManiSkill's state vectors `[N, S]`.

    Args:
        entry: the task's entry in ManiSkill's registry.
        config: ManiSkill's options; `env.images()` renders its cameras.
        settings: arguments of ManiSkill's classes.
    """
    install()
    cls = lean(entry.cls, tuple(config.cameras), (config.image_size[0], config.image_size[1]))
    env = cls(**settings | {"obs_mode": cls.obs_mode_with_images if config.cameras else "state"})
    agent = env.agent
    agent.set_action = lambda action: agent.controller.set_action(action)  # without a second check for NaN
    return env


def known_cameras(env: Any) -> tuple[str, ...]:
    """Return the cameras that the task of `env` and its robot have."""
    cameras: tuple[str, ...] = env.all_cameras
    return cameras


def _quick_pose(cls: type[Pose], pose: Any, device: Any = None) -> Pose:
    """`Pose.create`, without conversions for the one pose of one object on the CPU."""
    if sapien.physx.is_gpu_enabled():
        return _create(cls, pose, device)
    if type(pose) is not list or len(pose) != 1 or type(pose[0]) is not sapien.Pose or str(device or "cpu") != "cpu":
        return _create(cls, pose, device)
    raw = np.empty((1, 7), np.float32)
    raw[0, :3], raw[0, 3:] = pose[0].p, pose[0].q
    return cls(raw_pose=torch.from_numpy(raw))


def _quick_joint_targets(self: Any, targets: Any, joints: Any = None, joint_indices: Any = None) -> None:
    """`Articulation.set_joint_drive_targets`, with one conversion for all joints instead of one each."""
    if self.scene.gpu_sim_enabled or joints is None or not isinstance(targets, torch.Tensor):
        _set_joint_drive_targets(self, targets, joints, joint_indices)
        return
    values = targets[0].to(torch.float32).numpy()
    for index, joint in enumerate(joints):
        joint._objs[0].drive_target = values[index : index + 1]


@cache
def lean(cls: type, cameras: tuple[str, ...], image_size: tuple[int, int]) -> Any:
    """Return a subclass of a task's class that renders images of `image_size` (H, W) from `cameras`, on request only.

    Every task gets state vectors and the sparse reward, which its base class can compute whatever the task declares.
    """
    twin = issubclass(cls, BaseDigitalTwinEnv)
    mode = "state+rgb+segmentation" if twin else "state+rgb"  # a twin puts a photograph behind what it draws
    attributes: dict[str, Any] = {
        "cameras": cameras,
        "image_size": image_size,
        "obs_mode_with_images": mode,
        "SUPPORTED_OBS_MODES": (*cls.SUPPORTED_OBS_MODES, "state", mode),  # type: ignore[attr-defined]
        "SUPPORTED_REWARD_MODES": (*cls.SUPPORTED_REWARD_MODES, "sparse"),  # type: ignore[attr-defined]
    }
    if twin and not cameras:
        attributes["rgb_overlay_mode"] = "none"
    return type(cls.__name__, (_Lean, cls), attributes)


class _Lean:
    """Mix-in in front of a task's class. `N` scenes, `V` cameras, `S` proprio dims."""

    cameras: tuple[str, ...]
    """Cameras to render, in this order."""
    image_size: tuple[int, int]
    """`(H, W)` of their images [pixels]."""
    all_cameras: tuple[str, ...] = ()
    """Cameras that the task and its robot have."""

    def images(self: Any) -> torch.Tensor:
        """Render the cameras: uint8 `[N, V, H, W, 3]`, on the simulation's device."""
        seen = self._get_obs_sensor_data()
        return torch.stack([_resized(seen[name]["rgb"], self.image_size) for name in self.cameras], dim=1)

    def robot_state(self: Any) -> torch.Tensor:
        """Return the quantities that the robot can measure, `[N, S]`."""
        state: torch.Tensor = robot_state(self.agent, self._get_obs_agent())
        return state

    def get_obs(self: Any, info: dict[str, Any] | None = None, unflattened: bool = False) -> Any:
        """Return the state vector `[N, S]`, or its parts. ManiSkill would render images here, at every step."""
        parts = self._get_obs_state_dict(self.get_info() if info is None else info)
        return parts if unflattened else self._flatten_raw_obs(parts)

    def _flatten_raw_obs(self: Any, obs: Any) -> torch.Tensor:
        state: torch.Tensor = common.flatten_state_dict(obs, use_torch=True, device=self.device)
        return state

    def _setup_sensors(self: Any, options: dict[str, Any]) -> None:
        configs = {
            **parse_camera_configs(self._default_sensor_configs),
            **parse_camera_configs(self.agent._sensor_configs if self.agent is not None else []),
        }
        self.all_cameras = tuple(configs)
        self._custom_sensor_configs = {
            name: _drawn(configs[name], self.image_size) for name in self.cameras if name in configs
        }
        super()._setup_sensors(options)  # type: ignore[misc]
        for name in set(self._sensors) - set(self.cameras):
            del self._sensors[name]


def _drawn(camera: Any, image_size: tuple[int, int]) -> dict[str, Any]:
    """Return the render settings of a camera: at the wanted size, unless its intrinsics are in pixels of its own
    size."""
    if camera.intrinsic is not None:
        return {"shader_pack": "minimal"}
    return {"shader_pack": "minimal", "height": image_size[0], "width": image_size[1]}


def _resized(images: torch.Tensor, image_size: tuple[int, int]) -> torch.Tensor:
    """Resize images uint8 `[N, h, w, 3]` to `image_size`, with antialiasing where they shrink."""
    if tuple(images.shape[1:3]) == image_size:
        return images.to(torch.uint8)
    channels_first = images.permute(0, 3, 1, 2).float()
    resized = torch.nn.functional.interpolate(channels_first, image_size, mode="bilinear", antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
