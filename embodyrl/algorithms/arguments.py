"""The columns that stages pass to losses, advantages, rewards and filters, and checks that functions can be called."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from embodyrl.algorithms.options import EncodingRewardConfig
from embodyrl.config.schema import Config, RewardLevel
from embodyrl.errors import did_you_mean
from embodyrl.registry import ADVANTAGES, FILTERS, LOSSES, REWARDS, Registry

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

BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def objections(key: str, config: Config) -> Iterator[tuple[str, str]]:
    """Yield the reasons why the component of `algorithm.<key>` could not be called in a run, each with a remedy.

    Built-in components are not checked here, since that would import torch; tests check them.
    """
    section, registry = getattr(config.algorithm, key), COMPONENTS[key]
    if section.name not in registry or (entry := registry.entry(section.name)).source == "built-in" or entry.missing():
        return
    what = f"{registry.kind} {entry.name!r}"
    try:
        parameters = inspect.signature(entry.load()).parameters
    except Exception as error:  # whatever a stranger's module raises, or what is no function
        yield f"{what} cannot be loaded: {type(error).__name__}: {error}", "fix its registration"
        return
    yield from (objection for parameter in parameters.values() if (objection := _why_not(key, parameter, config, what)))
    yield from _unused(section, parameters, what)


def _why_not(key: str, parameter: inspect.Parameter, config: Config, what: str) -> tuple[str, str] | None:
    """Return the reason why an argument of a function is not available, and a remedy; None if it is."""
    options = _options(getattr(config.algorithm, key))
    name, given = parameter.name, GIVEN[key]
    if parameter.kind not in BY_NAME:
        return f"{what} takes {parameter}, but is called by name", "name each column and option that it needs"
    if name in options and name in given:
        return f"option {name!r} of {what} has the name of a column", "rename the option"
    if name in options or parameter.default is not inspect.Parameter.empty:
        return None
    if name not in given:
        remedy = did_you_mean(name, [*given, *options], otherwise="make it an option of its own, or give it a default")
        listed = f"{', '.join(given)}; options of its own: {', '.join(options) or 'none'}"
        return f"{what} names {name!r}, which is not there for it", f"{remedy} (there are {listed})"
    why, remedy = _absent(name, config) if key != "advantage" else _absent_for_advantages(name, config)
    return (f"{what} names {name!r}, but {why}", remedy) if why else None


def _absent(name: str, config: Config) -> tuple[str, str]:
    """Return the reason why a run with this config lacks a column, and a remedy; two empty texts if it has it."""
    algorithm, advantage = config.algorithm, config.algorithm.advantage.name
    if name in ("values", "next_values", "returns", "old_values"):
        if advantage in ADVANTAGES and not ADVANTAGES.entry(advantage).critic:
            return f"advantage {advantage!r} is registered as one without critic", "choose or register one with critic"
    elif name == "reference_logprobs" and algorithm.kl_coef == 0.0:
        return "there is no reference policy", "set algorithm.kl_coef above 0"
    elif name == "images" and not config.env.cameras:
        return "there are no images", "name some in env.cameras"
    elif name == "embeddings" and not isinstance(algorithm.reward, EncodingRewardConfig):
        remedy = "derive them from embodyrl.algorithms.options.EncodingRewardConfig"
        return "its options do not say how episodes are encoded", remedy
    return "", ""


def _absent_for_advantages(name: str, config: Config) -> tuple[str, str]:
    """Do what `_absent` does, for a column that an advantage estimator names."""
    of_decisions = ("terminated", "values", "next_values")
    if name in of_decisions and config.algorithm.reward_level is RewardLevel.action:
        return "actions have none (algorithm.reward_level is 'action')", "set algorithm.reward_level to chunk"
    return _absent(name, config)


def _unused(section: Any, named: Mapping[str, Any], what: str) -> Iterator[tuple[str, str]]:
    """Yield options that no function reads."""
    read_by_stage = _options(EncodingRewardConfig) if isinstance(section, EncodingRewardConfig) else []
    for option in _options(section):
        if option not in named and option not in read_by_stage:
            remedy = did_you_mean(option, list(named), otherwise="let the function name it, or remove the option")
            yield f"option {option!r} of {what} has no use: its function does not name it", remedy


def _options(section: Any) -> list[str]:
    """Return the names of a component's own options."""
    return [field.name for field in dataclasses.fields(section) if field.name != "name"]
