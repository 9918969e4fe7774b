"""Components whose functions cannot be called."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.config.schema import LossConfig, setting
from embodyrl.registry import ADVANTAGES, LOSSES, REWARDS


@dataclass(frozen=True, kw_only=True)
class Options(LossConfig):
    """Options of the loss."""

    temprature: float = setting(1.0, above=0.0)
    """Of nothing."""
    valid: bool = setting(True)
    """Named like a column."""


def misnamed(*, rewardz):
    return rewardz


def two_mistakes(*, logprobs, temperature, valid, scale=0.01, **more):
    return logprobs


def critical(*, rewards, values):
    return rewards, values


REWARDS.register("misnamed", target=misnamed, whole=False, summary="misspells a column")
LOSSES.register("two_mistakes", target=two_mistakes, options=Options, whole=False, summary="and more")
ADVANTAGES.register(
    "critical",
    target=critical,
    critic=False,
    whole=False,
    group=False,
    actions=False,
    summary="wants values that it is registered without",
)
