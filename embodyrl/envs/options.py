"""Options of the built-in simulators (part of the config schema; imports no simulator)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from embodyrl.config.schema import EnvConfig, setting


class RewardMode(StrEnum):
    """Which reward ManiSkill computes."""

    dense = "dense"
    normalized_dense = "normalized_dense"
    sparse = "sparse"


class RenderQuality(StrEnum):
    """How MuJoCo draws pictures."""

    full = "full"
    fast = "fast"


@dataclass(frozen=True, kw_only=True)
class MujocoConfig(EnvConfig):
    """What all backends on MuJoCo share."""

    render_quality: RenderQuality = setting(RenderQuality.full)
    """full: as the simulator's authors draw it. fast: without shadows, reflections and smoothed edges, several times
    faster on a CPU; pictures differ from those that public checkpoints were trained on."""


@dataclass(frozen=True, kw_only=True)
class MetaWorldConfig(MujocoConfig):
    """MetaWorld."""

    end_at_success: bool = setting(False)
    """End the episode (terminated) as soon as the task is solved."""


@dataclass(frozen=True, kw_only=True)
class ManiSkillConfig(EnvConfig):
    """ManiSkill with state observations."""

    control_mode: str = setting("pd_joint_delta_pos")
    """Controller of the robot, as ManiSkill names it; it defines what an action means."""
    reward_mode: RewardMode = setting(RewardMode.normalized_dense)
    """Reward that the task computes."""
    end_at_success: bool = setting(False)
    """End the episode (terminated) as soon as the task is solved."""


@dataclass(frozen=True, kw_only=True)
class GymnasiumConfig(EnvConfig):
    """Any Gymnasium environment."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for `gymnasium.make`; any key is legal here."""
    success_return: float | None = setting(None)
    """An episode is a success if its return is at least this when it ends. Judged at the end and not before, because
    the running return of a task with negative rewards starts high. null: success after each step is what the
    environment's `info["is_success"]` or `info["success"]` says; without them there is none."""
