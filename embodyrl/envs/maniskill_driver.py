"""ManiSkill with less Python around the same physics, for environments on the CPU.

ManiSkill's code is written for batches on the GPU. On the CPU every pose and every joint target goes through general
conversions, several dozen per step. The three short cuts here give the same numbers bit for bit
(`tests/envs/test_maniskill.py` compares them) and save a fifth to a third of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.utils.structs import Articulation
from mani_skill.utils.structs.pose import Pose

_create = Pose.create.__func__
_set_joint_drive_targets = Articulation.set_joint_drive_targets


def install() -> None:
    """Put the short cuts for poses and joint targets in place of ManiSkill's methods, in this process."""
    Pose.create = classmethod(_quick_pose)
    Articulation.set_joint_drive_targets = _quick_joint_targets


def uninstall() -> None:
    """Put ManiSkill's own methods back."""
    Pose.create = classmethod(_create)
    Articulation.set_joint_drive_targets = _set_joint_drive_targets


def trust_actions(env: Any) -> None:
    """Skip ManiSkill's search for NaN in the actions of `env`: `SlotSimulator` has checked them."""
    agent = env.agent
    agent.set_action = lambda action: agent.controller.set_action(action)


def _quick_pose(cls: type[Pose], pose: Any, device: Any = None) -> Pose:
    """`Pose.create`, without conversions for the one pose of one object on the CPU."""
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
