"""Options of OpenVLA-OFT (part of the config schema; imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from embodyrl.config.schema import setting
from embodyrl.models.prismatic.options import PrismaticConfig

ACTION_HEAD, PROPRIO_PROJECTOR = "action_head", "proprio_projector"
"""Parts of a checkpoint in files of their own: how their names begin."""


class ActionHead(StrEnum):
    """How actions are read from the language model."""

    discrete = "discrete"
    l1 = "l1"


class Normalization(StrEnum):
    """Which numbers of the statistics -1 and 1 stand for."""

    q99 = "q99"
    min_max = "min_max"


@dataclass(frozen=True, kw_only=True)
class OpenVLAOFTConfig(PrismaticConfig):
    """OpenVLA-OFT: several pictures, a chunk of actions in one pass."""

    action_head: ActionHead = setting(ActionHead.discrete)
    """discrete: action tokens, as reinforcement learning needs them. l1: a network that says numbers; it has no
    probabilities, so that it can be evaluated and trained on demonstrations only."""
    num_images: int = setting(1, low=1)
    """Pictures per observation; as many cameras as the simulator is to have."""
    use_proprio: bool = setting(False)
    """Show the model the robot's state as well."""
    append_stop_token: bool = setting(True)
    """End the sequence with the stop token, as public training and evaluation do. Models that were trained with RLinf
    go without it."""
    normalization: Normalization = setting(Normalization.q99)
    """q99: -1 and 1 are the 1st and 99th percentile. min_max: the ends of the range, as models for ALOHA have it."""
