"""Rules between the settings of the learning algorithm and others; see `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.config.rules import Finding, fact, rule
from embodyrl.config.schema import Bootstrap, Config, Episodes, Level, NormLevel, RewardLevel
from embodyrl.registry import ADVANTAGES, ALGORITHMS, FILTERS, LOSSES, REWARDS, SupportedModel


def _comparing(config: Config) -> str | None:
    """What compares the episodes of a group, in words; None if nothing does, or if that cannot be known."""
    settings, norm = config.algorithm, config.algorithm.norm
    if fact(FILTERS, settings.filter.name, "group"):
        return f"filter {settings.filter.name!r}"
    by_group = NormLevel.group in (norm.mean_level, norm.std_level)
    if fact(ADVANTAGES, settings.advantage, "group") and by_group:
        return f"advantage {settings.advantage!r}"
    return None


@rule
def groups_are_compared(config: Config) -> Iterator[Finding]:
    """What compares a group's episodes gets groups, and where nothing does there are none."""
    name, size, comparing = config.algorithm.advantage, config.rollout.group_size, _comparing(config)
    if comparing is not None and size == 1:
        paths = ("rollout.group_size", "algorithm.filter.name" if "filter" in comparing else "algorithm.advantage")
        message = f"{comparing} compares the episodes of a group, but rollout.group_size is 1"
        yield Finding(paths, message, f"set rollout.group_size to a divisor of env.num_envs: {_group_sizes(config)}")
    if comparing is None and size > 1 and fact(ADVANTAGES, name, "group") is not None:
        by_norm = " with this algorithm.norm" if fact(ADVANTAGES, name, "group") else ""
        yield Finding(
            ("rollout.group_size", "algorithm.advantage"),
            f"rollout.group_size = {size} has no use: advantage {name!r}{by_norm} does not compare the episodes of a "
            f"group, and no filter does",
            "set rollout.group_size to 1, or choose an advantage that does, as 'grpo'",
        )


def _group_sizes(config: Config) -> str:
    envs = config.env.num_envs
    return ", ".join(str(size) for size in range(2, envs + 1) if envs % size == 0) or f"none fits {envs}; raise it"


@rule
def whole_episodes_are_collected(config: Config) -> Iterator[Finding]:
    """What looks at whole episodes gets them."""
    if config.rollout.episodes is Episodes.whole:
        return
    settings = config.algorithm
    wanting = {
        "advantage": (settings.advantage, fact(ADVANTAGES, settings.advantage, "whole")),
        "reward": (settings.reward, fact(REWARDS, settings.reward, "whole")),
        "loss": (settings.loss, fact(LOSSES, settings.loss, "whole")),
        "filter": (settings.filter.name, fact(FILTERS, settings.filter.name, "group")),
    }
    named = {key: name for key, (name, wants) in wanting.items() if wants}
    if named:
        yield Finding(
            ("rollout.episodes", *(f"algorithm.{key}" for key in named)),
            f"{' and '.join(f'{key} {name!r}' for key, name in named.items())} {'need' if len(named) > 1 else 'needs'} "
            f"whole episodes, but rollout.episodes is {config.rollout.episodes.value!r}",
            "set rollout.episodes to whole",
        )


@rule
def collections_wait_for_a_filter(config: Config) -> Iterator[Finding]:
    """It collects more than once only to replace groups that were dropped."""
    settings = config.algorithm.filter
    if settings.max_collections > 1 and fact(FILTERS, settings.name, "group") is False:
        yield Finding(
            ("algorithm.filter.max_collections", "algorithm.filter.name"),
            f"algorithm.filter.max_collections = {settings.max_collections} has no use: filter {settings.name!r} drops "
            f"no group",
            "set algorithm.filter.max_collections to 1, or choose a filter",
        )


@rule
def filter_limits_are_in_order(config: Config) -> Iterator[Finding]:
    """Some success rate lies within the filter's limits."""
    low, high = config.algorithm.filter.accuracy_low, config.algorithm.filter.accuracy_high
    if low > high:
        yield Finding(
            ("algorithm.filter.accuracy_low", "algorithm.filter.accuracy_high"),
            f"algorithm.filter.accuracy_low = {low:g} is above algorithm.filter.accuracy_high = {high:g}, so that no "
            f"group would be learned from",
            f"set algorithm.filter.accuracy_low to {high:g} or less",
        )


@rule
def one_is_left_out_of_a_mean(config: Config) -> Iterator[Finding]:
    """Leave-one-out is about a mean."""
    norm = config.algorithm.norm
    if norm.leave_one_out and norm.mean_level is NormLevel.none:
        yield Finding(
            ("algorithm.norm.leave_one_out", "algorithm.norm.mean_level"),
            "algorithm.norm.leave_one_out has no use: algorithm.norm.mean_level is 'none', so no mean is subtracted",
            "set algorithm.norm.mean_level to group, or algorithm.norm.leave_one_out to false",
        )


@rule
def rewards_of_actions_are_used(config: Config) -> Iterator[Finding]:
    """Advantages of single actions come from an estimator that knows them and meet log-probs of single actions."""
    settings = config.algorithm
    if settings.reward_level is not RewardLevel.action:
        return
    if fact(ADVANTAGES, settings.advantage, "actions") is False:
        able = [entry.name for entry in ADVANTAGES.entries() if entry.facts.get("actions")]
        yield Finding(
            ("algorithm.reward_level", "algorithm.advantage"),
            f"algorithm.reward_level is 'action', but advantage {settings.advantage!r} compares decisions",
            f"set algorithm.reward_level to chunk, or algorithm.advantage to {' or '.join(able)}",
        )
    if settings.logprob_level is Level.chunk:
        yield Finding(
            ("algorithm.logprob_level", "algorithm.reward_level"),
            "algorithm.reward_level is 'action', but algorithm.logprob_level is 'chunk': a decision cannot have the "
            "advantages of its actions",
            "set algorithm.logprob_level to action or token",
        )


@rule
def graph_fits_advantage(config: Config) -> Iterator[Finding]:
    """A graph that passes a critic's values on has an estimator that wants them, and the other way round."""
    graph = fact(ALGORITHMS, config.algorithm.name, "critic")
    estimator = fact(ADVANTAGES, config.algorithm.advantage, "critic")
    if graph is not None and estimator is not None and graph is not estimator:
        fitting = [entry.name for entry in ALGORITHMS.entries() if entry.facts.get("critic") is estimator]
        yield Finding(
            ("algorithm.advantage", "algorithm.name"),
            f"advantage {config.algorithm.advantage!r} {'uses a' if estimator else 'has no'} critic, and algorithm "
            f"{config.algorithm.name!r} is made for one {'without' if estimator else 'with'}",
            f"choose algorithm.name among: {', '.join(fitting) or 'none so far'}",
        )


@rule
def bootstrap_has_critic(config: Config) -> Iterator[Finding]:
    """Only an advantage with a critic can estimate what was cut off."""
    name, bootstrap = config.algorithm.advantage, config.algorithm.bootstrap
    if fact(ADVANTAGES, name, "critic") is False and bootstrap is not Bootstrap.none:
        yield Finding(
            ("algorithm.bootstrap", "algorithm.advantage"),
            f"algorithm.bootstrap = {bootstrap.value!r} needs a critic, and advantage {name!r} has none",
            "set algorithm.bootstrap to none",
        )


@rule
def value_loss_has_critic(config: Config) -> Iterator[Finding]:
    """Without a critic there is no value loss to weigh."""
    name, weight = config.algorithm.advantage, config.algorithm.value_coef
    if fact(ADVANTAGES, name, "critic") is False and weight > 0:
        yield Finding(
            ("algorithm.value_coef", "algorithm.advantage"),
            f"algorithm.value_coef = {weight:g} weighs the loss of a critic, and advantage {name!r} has none",
            "set algorithm.value_coef to 0",
        )


@rule
def model_has_critic(config: Config) -> Iterator[Finding]:
    """An advantage that needs values gets a model that predicts them."""
    name, model = config.algorithm.advantage, config.model.name
    if fact(ADVANTAGES, name, "critic") and fact(SupportedModel, model, "critic") is False:
        without = [entry.name for entry in ADVANTAGES.entries() if entry.facts.get("critic") is False]
        yield Finding(
            ("algorithm.advantage", "model.name"),
            f"advantage {name!r} needs values, and model {model!r} predicts none",
            f"choose another model, or an advantage without a critic ({', '.join(without)})",
        )


@rule
def srpo_rewards_progress(config: Config) -> Iterator[Finding]:
    """The graph of SRPO is GRPO's; what makes it SRPO is its reward."""
    settings = config.algorithm
    if settings.name == "srpo" and settings.reward != "srpo":
        yield Finding(
            ("algorithm.reward", "algorithm.name"),
            f"algorithm.name is 'srpo', but algorithm.reward is {settings.reward!r}, which makes it GRPO",
            "set algorithm.reward to srpo, or algorithm.name to grpo",
        )
