"""Options of the components that come with embodyrl, each its own; the columns that a component's function may name
besides; and checks of both. Nothing here imports torch."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

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
    RewardLevel,
    setting,
)
from embodyrl.errors import did_you_mean
from embodyrl.registry import ADVANTAGES, FILTERS, LOSSES, REWARDS, Registry


class Pays(StrEnum):
    """What predicted progress is paid for."""

    gain = "gain"
    level = "level"


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
    leave_one_out: bool = setting(False, only_with={"mean_level": ("group", "batch")})
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
    """Failed episodes get reward for how close they came to successful ones."""

    compat: Compat = setting(Compat.none)
    """none: two successes are of one kind if they are closer than half the root mean square distance between successes.
    siirl: closer than 0.5 in units of the standard deviations, which in many dimensions no two ever are."""
    scale: float = setting(0.6, low=0.0)
    """The reward of a failure is less than this; that of a success is 1."""
    steepness: float = setting(10.0, above=0.0)
    """Steepness of the sigmoid over the distance, which runs from 0 (closest failure) to 1 (farthest)."""


@dataclass(frozen=True, kw_only=True)
class JudgedRewardConfig(RewardConfig):
    """A small network that was learned from demonstrations judges observations."""

    path: str | None = setting(None)
    """Run that has learned it (`algorithm: reward_classifier` or `reward_progress`), or its folder there."""


@dataclass(frozen=True, kw_only=True)
class ClassifierRewardConfig(JudgedRewardConfig):
    """A learned classifier decides which observations are a success, and gets reward."""

    threshold: float = setting(0.9, above=0.0, below=1.0)
    """Probability of success from which on an observation counts as one. What such a run prints helps to choose it:
    a reward that comes too early is worse than one that comes late."""
    ends_episodes: bool = setting(True)
    """End an episode where it is judged solved: it has terminated, and nothing follows. false: it continues,
    with this reward once. Evaluations end where the simulator says so, and so do rollouts besides:
    `env.end_at_success=false` leaves it to the classifier."""

    @property
    def judged_ends(self) -> bool:
        """See `RewardConfig`."""
        return self.ends_episodes


@dataclass(frozen=True, kw_only=True)
class ProgressRewardConfig(JudgedRewardConfig):
    """A learned predictor says how far the task is, 0 .. 1, and progress gets reward."""

    pays: Pays = setting(Pays.gain)
    """gain: what a chunk adds to the predicted progress, so that an episode's sum is its progress from beginning to
    end. level: the predicted progress after each chunk; where success ends episodes (env.end_at_success), staying near
    it is then worth more than success."""


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


def check_accuracy(config: Config) -> Iterator[ConfigIssue]:
    """Check that some success rate lies within the filter's limits."""
    options = config.algorithm.parts()["filter"]
    assert isinstance(options, AccuracyConfig)
    if options.accuracy_low > options.accuracy_high:
        yield ConfigIssue(
            "algorithm.filter.accuracy_low",
            f"algorithm.filter.accuracy_low = {options.accuracy_low:g} is above algorithm.filter.accuracy_high = "
            f"{options.accuracy_high:g}, so that no group would be learned from",
            f"set algorithm.filter.accuracy_low to {options.accuracy_high:g} or less",
        )


# ---- the columns that functions may name, and whether a function can be called with them

COMPONENTS: Mapping[str, Registry[Any]] = {
    "reward": REWARDS,
    "filter": FILTERS,
    "advantage": ADVANTAGES,
    "loss": LOSSES,
}
"""The sections of `algorithm` whose components are functions."""

GIVEN: Mapping[str, tuple[str, ...]] = {
    "reward": (
        *("rewards", "success", "terminated", "truncated", "steps", "valid", "executed"),
        *("actions", "task_index", "proprio", "images", "episode", "group", "embeddings"),
    ),
    "filter": ("success", "total_reward", "played"),
    "advantage": (*("rewards", "valid", "ended", "terminated", "discounts", "values", "next_values", "group_size"),),
    "loss": (
        *("logprobs", "old_logprobs", "proximal_logprobs", "reference_logprobs", "advantages", "valid", "weights"),
        *("executed", "sequence", "version", "task_index", "proprio", "images", "returns", "old_values"),
    ),
}
"""The columns that each of them may name besides its own options; docs/algorithms.md describes them."""

RESULTS: Mapping[str, tuple[str, str]] = {
    "reward": ("Tensor", "the rewards, a Tensor [K, B, C]"),
    "filter": ("Tensor", "which groups to keep, a Tensor of bool [P]"),
    "advantage": ("tuple", "advantages and returns, two Tensors [T, B]"),
    "loss": ("LossOutput", "LossOutput(losses=..., metrics={...}) of embodyrl.algorithms.losses"),
}
"""The type that each of them returns, and what it is, for messages."""

BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_signature(key: str, config: Config) -> Iterator[ConfigIssue]:
    """Check that the function of `algorithm.<key>` can be called in a run. Built-in ones are not checked here, since
    that would import torch; tests check them."""
    section, registry, where = config.algorithm.parts()[key], COMPONENTS[key], f"algorithm.{key}.name"
    if section.name not in registry or (entry := registry.entry(section.name)).source == "built-in" or entry.missing():
        return
    what = f"{registry.kind} {entry.name!r}"
    try:
        function = entry.load()
        signature = inspect.signature(function)
    except Exception as error:  # whatever a stranger's module raises, or what is no function
        message = f"{what} cannot be loaded: {type(error).__name__}: {error}"
        yield ConfigIssue(where, message, "fix its registration")
        return
    for parameter in signature.parameters.values():
        yield from _check_argument(key, parameter, config, what)
    yield from _check_use(key, section, signature.parameters, what)
    found, (result, remedy) = _result_of(function, signature), RESULTS[key]
    if found in {name for name, _ in RESULTS.values()} - {result}:
        yield ConfigIssue(where, f"{what} returns a {found}", f"return {remedy}")


def _check_argument(key: str, parameter: inspect.Parameter, config: Config, what: str) -> Iterator[ConfigIssue]:
    """Check that an argument of a function is available."""
    options = option_names(config.algorithm.parts()[key])
    where, name, given = f"algorithm.{key}.name", parameter.name, GIVEN[key]
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        message = f"{what} takes {name!r} by its position, but is called by name"
        yield ConfigIssue(where, message, "remove the `/` from its arguments")
    elif parameter.kind not in BY_NAME:
        message = f"{what} takes {str(parameter).partition(':')[0]}, but gets only what it names"
        yield ConfigIssue(where, message, "name each column and option that it needs")
    elif name in options and name in given:
        yield ConfigIssue(where, f"option {name!r} of {what} has the name of a column", "rename the option")
    elif name in options or parameter.default is not inspect.Parameter.empty:
        return
    elif name not in given:
        hint = did_you_mean(name, [*given, *options], otherwise="make it an option of its own, or give it a default")
        listed = f"{', '.join(given)}; options of its own: {', '.join(options) or 'none'}"
        yield ConfigIssue(where, f"{what} names {name!r}, which is not there for it", f"{hint} (there are {listed})")
    else:
        why, remedy = _absent(name, config) if key != "advantage" else _absent_for_advantages(name, config)
        if why:
            yield ConfigIssue(where, f"{what} names {name!r}, but {why}", remedy)


def _absent(name: str, config: Config) -> tuple[str, str]:
    """Return the reason why a run with this config lacks a column, and a remedy; two empty texts if it has it."""
    algorithm, needs = config.algorithm, config.algorithm.needs(config)
    if name in ("values", "next_values", "returns", "old_values"):
        advantage = algorithm.parts()["advantage"].name
        if advantage in ADVANTAGES and not needs.critic:
            return f"advantage {advantage!r} is registered as one without critic", "choose or register one with critic"
    elif name == "reference_logprobs" and not needs.reference:
        return "there is no reference policy", "set algorithm.kl_coef above 0"
    elif name == "images" and not config.env.cameras:
        return "there are no images", "name some in env.cameras"
    elif name == "embeddings" and not isinstance(algorithm.parts().get("reward"), EncodingRewardConfig):
        remedy = "derive them from embodyrl.algorithms.options.EncodingRewardConfig"
        return "its options do not say how episodes are encoded", remedy
    return "", ""


def _absent_for_advantages(name: str, config: Config) -> tuple[str, str]:
    """Do what `_absent` does, for a column that an advantage estimator names."""
    of_chunks = ("terminated", "values", "next_values")
    if name in of_chunks and getattr(config.algorithm, "reward_level", None) is RewardLevel.action:
        return "actions have none (algorithm.reward_level is 'action')", "set algorithm.reward_level to chunk"
    return _absent(name, config)


def _check_use(key: str, section: Any, named: Mapping[str, Any], what: str) -> Iterator[ConfigIssue]:
    """Check that a function names its options."""
    read_by_stage = option_names(EncodingRewardConfig) if isinstance(section, EncodingRewardConfig) else []
    for option in option_names(section):
        if option not in named and option not in read_by_stage:
            message = f"{what} has an option {option!r}, which its function does not name"
            hint = did_you_mean(option, list(named), otherwise="let the function name it, or remove the option")
            yield ConfigIssue(f"algorithm.{key}.name", message, hint)


def _result_of(function: Any, signature: inspect.Signature) -> str:
    """Return the name of the type that a function returns: `tuple` if a `return` of it lists several values, else as it
    is annotated; empty if nothing says."""
    if _lists_several(function):
        return "tuple"
    annotation = signature.return_annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.partition("[")[0].rpartition(".")[2]


def _lists_several(function: Any) -> bool:
    """Return whether a `return` of a function lists several values, as far as its source can be read."""
    try:
        nodes: list[ast.AST] = [*ast.parse(textwrap.dedent(inspect.getsource(function))).body]
    except (OSError, TypeError, SyntaxError):  # typed into an interpreter, no Python, part of a longer expression
        return False
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            return True
        inside = [*ast.iter_child_nodes(node)]
        nodes += [each for each in inside if not isinstance(each, ast.FunctionDef | ast.Lambda | ast.ClassDef)]
    return False


def option_names(section: Any) -> list[str]:
    """Return the names of a component's own options, from its section of the config or the section's class."""
    return [field.name for field in dataclasses.fields(section) if field.name != "name"]
