"""Options of the components that come with embodyrl, each its own; checks of them; and calling a component with the
options and columns that it names."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import (
    AdvantageConfig,
    Compat,
    Config,
    Excess,
    FilterConfig,
    FilterMetric,
    LossConfig,
    NormLevel,
    RewardConfig,
    setting,
)
from embodyrl.errors import UserError, did_you_mean

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class ClippedLossConfig(LossConfig):
    """Clipping limits of a loss."""

    clip_low: float = setting(0.2, above=0.0, below=1.0)
    """Smallest probability ratio that still has a gradient is 1 - clip_low."""
    clip_high: float = setting(0.2, above=0.0)
    """Largest probability ratio that still has a gradient is 1 + clip_high."""


@dataclass(frozen=True, kw_only=True)
class PPOLossConfig(ClippedLossConfig):
    """Clipped surrogate."""

    dual_clip: float | None = setting(None, above=1.0)
    """Where the advantage is negative, the loss is at most this many times its size (3 is usual); null: no bound."""


@dataclass(frozen=True, kw_only=True)
class DecoupledPPOLossConfig(PPOLossConfig):
    """Clipped surrogate around a proximal policy (`algorithm.proximal`), for chunks of an older policy."""

    behaviour_cap: float | None = setting(5.0, above=0.0)
    """Largest weight (proximal over behaviour probability) that is trusted; null: any."""
    behaviour_excess: Excess = setting(Excess.mask)
    """Entries with a larger weight are left out (mask) or get this weight (clamp)."""


@dataclass(frozen=True, kw_only=True)
class CPGDLossConfig(ClippedLossConfig):
    """Clipped policy gradient with policy drift."""

    drift_coef: float = setting(1.0e-3, low=0.0)
    """Weight of the drift from the policy that chose the chunks."""


@dataclass(frozen=True, kw_only=True)
class GSPOLossConfig(ClippedLossConfig):
    """Clipped ratio of whole episodes, a geometric mean, so that useful clips are a few percent."""


@dataclass(frozen=True, kw_only=True)
class GAEConfig(AdvantageConfig):
    """Generalised advantage estimation."""

    gae_lambda: float = setting(0.95, low=0.0, high=1.0)
    """Trade between bias (0) and variance (1)."""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(AdvantageConfig):
    """Comparison of the returns of episodes: (return - mean) / (standard deviation + eps)."""

    mean_level: NormLevel = setting(NormLevel.group)
    """The mean that is subtracted: of the episode's group, of the whole batch, or none."""
    std_level: NormLevel = setting(NormLevel.group)
    """The standard deviation to divide by: of the group, of the batch, or none (`unbiased` and `eps` are not used)."""
    leave_one_out: bool = setting(False)
    """The mean is that of the other episodes (RLOO)."""
    unbiased: bool = setting(True)
    """The standard deviation of n episodes divides by n - 1; otherwise by n."""
    eps: float = setting(1.0e-6, above=0.0)
    """Added to the standard deviation."""


@dataclass(frozen=True, kw_only=True)
class EncodingRewardConfig(RewardConfig):
    """Encoding of episodes as vectors, for rewards that name `embeddings`."""

    encoder: str = setting("random_projection", registry="ENCODERS")
    """Encoder of an episode's observations."""
    frames: int = setting(64, low=1)
    """Observations of an episode that are encoded, evenly spread over it."""
    dim: int = setting(64, low=1)
    """Numbers in the vector that the encoder is asked for."""


@dataclass(frozen=True, kw_only=True)
class SRPORewardConfig(EncodingRewardConfig):
    """Failed episodes are paid for how close they came to successful ones."""

    compat: Compat = setting(Compat.none)
    """none: two successes are of one kind if they are closer than half the root mean square distance between successes.
    siirl: closer than 0.5 in units of the standard deviations, which in many dimensions no two ever are."""
    scale: float = setting(0.6, low=0.0)
    """A failure is paid less than this; a success is paid 1."""
    steepness: float = setting(10.0, above=0.0)
    """Steepness of the sigmoid over the distance, which runs from 0 (closest failure) to 1 (farthest)."""


@dataclass(frozen=True, kw_only=True)
class ZeroVarianceConfig(FilterConfig):
    """Drops groups whose episodes all came out the same."""

    metric: FilterMetric = setting(FilterMetric.success)
    """The number that must differ: the episodes' success, or the sum of the simulator's own rewards."""


@dataclass(frozen=True, kw_only=True)
class AccuracyConfig(FilterConfig):
    """Keeps groups whose success rate lies within limits, both included."""

    accuracy_low: float = setting(0.1, low=0.0, high=1.0)
    """Smallest success rate of a group."""
    accuracy_high: float = setting(0.9, low=0.0, high=1.0)
    """Largest success rate of a group."""


# ---- checks of options, and what follows from them


def compares_groups(options: AdvantageConfig) -> bool:
    """Return whether `grpo` compares the episodes of a group, rather than those of the whole batch."""
    assert isinstance(options, GRPOConfig)
    return NormLevel.group in (options.mean_level, options.std_level)


def check_grpo(config: Config) -> Iterator[ConfigIssue]:
    """Check that leave-one-out has a mean to change."""
    options = config.algorithm.advantage
    assert isinstance(options, GRPOConfig)
    if options.leave_one_out and options.mean_level is NormLevel.none:
        yield ConfigIssue(
            "algorithm.advantage.leave_one_out",
            "algorithm.advantage.leave_one_out has no use: algorithm.advantage.mean_level is 'none', so no mean is "
            "subtracted",
            "set algorithm.advantage.mean_level to group, or algorithm.advantage.leave_one_out to false",
        )


def check_accuracy(config: Config) -> Iterator[ConfigIssue]:
    """Check that some success rate lies within the filter's limits."""
    options = config.algorithm.filter
    assert isinstance(options, AccuracyConfig)
    if options.accuracy_low > options.accuracy_high:
        yield ConfigIssue(
            "algorithm.filter.accuracy_low",
            f"algorithm.filter.accuracy_low = {options.accuracy_low:g} is above algorithm.filter.accuracy_high = "
            f"{options.accuracy_high:g}, so that no group would be learned from",
            f"set algorithm.filter.accuracy_low to {options.accuracy_high:g} or less",
        )


# ---- calling a component


class SignatureError(UserError):
    """Raised when a registered function names an argument that is not available."""


def options_of(section: Any) -> dict[str, Any]:
    """Return a component's own options by name, from its section of the config (`config.algorithm.loss`)."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section) if field.name != "name"}


def call_with(function: Callable[..., R], columns: Mapping[str, Any], options: Mapping[str, Any]) -> R:
    """Call `function` with those columns and options that its keyword arguments name.

    A loss, advantage estimator, reward or filter lists what it needs as keyword-only arguments, and nothing else, so
    that its signature is its documentation. `arguments` has checked before the run that they are available.

    Args:
        function: of the component.
        columns: of the batch.
        options: the component's own, see `options_of`; no other component's.

    Raises:
        SignatureError: an argument without default is not available; lists those that are.
    """
    available, arguments = {**columns, **options}, {}
    for name, parameter in _parameters(function).items():
        if name in available:
            arguments[name] = available[name]
        elif parameter.default is inspect.Parameter.empty:
            hint = did_you_mean(name, list(available), lead=" - ")
            raise SignatureError(
                f"{function.__module__}.{function.__qualname__} asks for {name!r}, which is not available{hint} "
                f"(available: {', '.join(sorted(available))})"
            )
    return function(**arguments)


def asks_for(function: Callable[..., Any], name: str) -> bool:
    """Return whether a registered function names this argument, so that expensive columns are computed only for
    functions that use them."""
    return name in _parameters(function)


@functools.cache  # looking it up takes as long as several operations on a small minibatch
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
