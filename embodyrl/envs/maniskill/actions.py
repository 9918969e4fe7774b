"""What the entries of a ManiSkill action mean, as the robot's controllers define them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from embodyrl.envs.types import ActionField
from embodyrl.errors import UserError


def action_fields(env: Any, task: str) -> tuple[ActionField, ...]:
    """The parts of the action vector of `env`, an environment of `task`.

    Raises:
        UserError: the task has several robots, or an action has no limits.
    """
    from mani_skill.agents.controllers.base_controller import CombinedController
    from mani_skill.agents.multi_agent import MultiAgent

    if isinstance(env.agent, MultiAgent):
        raise UserError(f"the ManiSkill task {task!r} has several robots, which is not supported: choose another task")
    controller = env.agent.controller
    parts = controller.controllers if isinstance(controller, CombinedController) else {"robot": controller}
    fields = [field for name, part in parts.items() for field in _controller_fields(name, part)]
    if not all(np.isfinite([*field.low, *field.high]).all() for field in fields):
        raise UserError(
            f"env.control_mode {env.agent.control_mode!r} has actions without limits for {task!r}: choose another one"
        )
    return tuple(fields)


def _controller_fields(name: str, controller: Any) -> list[ActionField]:
    """The action entries of one controller."""
    from mani_skill.agents.controllers import pd_ee_pose, pd_joint_pos

    space, config = controller.single_action_space, controller.config
    low, high = tuple(map(float, space.low)), tuple(map(float, space.high))
    if not low:  # a passive controller
        return []

    def field(meaning: str, unit: str = "1", scale: float = 1.0, part: slice = slice(None), suffix: str = "") -> Any:
        return ActionField(name=name + suffix, meaning=meaning, unit=unit, low=low[part], high=high[part], scale=scale)

    if name.endswith("gripper"):
        return [_gripper(field("gripper"), controller)]
    if isinstance(controller, pd_ee_pose.PDEEPosController) and config.use_delta:
        move = _scale(config, config.pos_lower, config.pos_upper)
        if move is None:
            return [field("normalized")]
        if not isinstance(controller, pd_ee_pose.PDEEPoseController):
            return [field("delta_position", "m", move)]
        # ManiSkill multiplies a normalised rotation by its lower limit, so a positive action turns backwards.
        turn = float(np.min(config.rot_lower)) if config.normalize_action else 1.0
        return [
            field("delta_position", "m", move, slice(0, 3), "_position"),
            field("delta_rotation", "rad", turn, slice(3, 6), "_rotation"),
        ]
    if type(controller) is pd_joint_pos.PDJointPosController:
        scale = _scale(config, config.lower, config.upper)
        if scale is not None:
            return [field("joint_delta" if config.use_delta else "joint_target", "rad", scale)]
    return [field("normalized" if getattr(config, "normalize_action", False) else "native")]


def _gripper(field: ActionField, controller: Any) -> ActionField:
    """`field` with the values that open and close, where that is known: fingers that slide move apart."""
    slides = all(kind == "prismatic" for joint in controller.joints for kind in joint.type)
    if not slides or len(field.low) != 1:
        return field
    return replace(field, opens=field.high[0], closes=field.low[0])


def _scale(config: Any, low: Any, high: Any) -> float | None:
    """What an action of 1 is worth in the controller's own unit, or None if that is not one number."""
    if not config.normalize_action:
        return 1.0
    limits = np.unique(np.abs(np.hstack([low, high]).astype(np.float64))) if low is not None else np.zeros(0)
    symmetric = limits.size == 1 and np.array_equal(np.negative(low), high)
    return float(limits[0]) if symmetric else None
