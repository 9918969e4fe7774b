"""Rules of methods that learn from their newest rollout; see `config.rules`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from embodyrl.config.issues import LEAVE_OUT, ConfigIssue
from embodyrl.config.rules import divisors, fact
from embodyrl.config.schema import (
    Bootstrap,
    Config,
    Episodes,
    Level,
    OldLogprobs,
    RewardLevel,
    RolloutMode,
)
from embodyrl.methods.on_policy.config import NewestConfig, OnPolicyConfig
from embodyrl.pipelines.pipeline import Stage
from embodyrl.registry import (
    ADVANTAGES,
    ALGORITHMS,
    FILTERS,
    LOSSES,
    REWARDS,
    STAGES,
    Registry,
    SupportedModel,
    load_target,
)


def check_newest(config: Config, algorithm: NewestConfig) -> Iterator[ConfigIssue]:
    """Check the settings of a method that learns from its newest rollout."""
    for rule in (
        _groups_are_compared,
        _whole_episodes_are_collected,
        _collections_wait_for_a_filter,
        _stages_fit_advantage,
        _bootstrap_has_critic,
        _model_has_critic,
        _batch_splits_into_minibatches,
    ):
        yield from rule(config, algorithm)


def check(config: Config, algorithm: OnPolicyConfig) -> Iterator[ConfigIssue]:
    """Check the settings of a method that learns by log-probs besides."""
    for rule in (
        _behaviour_policy_is_known,
        _staleness_is_corrected,
        _rewards_of_actions_are_used,
        _levels_fit_model,
        _value_loss_has_critic,
        _micro_batches_hold_whole_episodes,
    ):
        yield from rule(config, algorithm)


def notes(config: Config, algorithm: OnPolicyConfig) -> list[str]:
    """Return a note if chunks of much older policies are learned from more than once."""
    rollout, epochs = config.rollout, algorithm.epochs
    if rollout.mode is not RolloutMode.async_ or rollout.max_staleness < 2 or epochs < 2:
        return []
    return [
        f"algorithm.epochs = {epochs} passes over rollouts that are rollout.max_staleness = {rollout.max_staleness} "
        "iterations old lead far away from the policy that acted: prefer 1 of either"
    ]


def _comparing(settings: NewestConfig) -> str | None:
    """Return the component that compares the episodes of a group, as text; None if there is none or it is unknown."""
    if fact(FILTERS, settings.filter.name, "group"):
        return f"filter {settings.filter.name!r}"
    compares = fact(ADVANTAGES, settings.advantage.name, "group")
    if load_target(compares)(settings.advantage) if isinstance(compares, str) else compares:
        return f"advantage {settings.advantage.name!r}"
    return None


def _groups_are_compared(config: Config, algorithm: NewestConfig) -> Iterator[ConfigIssue]:
    """Check that there are groups if a component compares their episodes, and only then."""
    name, size, comparing = algorithm.advantage.name, config.rollout.group_size, _comparing(algorithm)
    if comparing is not None and size == 1:
        paths = ("rollout.group_size", "algorithm.filter.name" if "filter" in comparing else "algorithm.advantage.name")
        message = f"{comparing} compares the episodes of a group, but rollout.group_size is 1"
        remedy = f"set rollout.group_size to a divisor of env.num_envs: {_group_sizes(config)}"
        yield ConfigIssue(paths, message, remedy, fix={"rollout.group_size": _usual_group_size(config)})
    # Another advantage, which the method needs anyway, may compare them.
    fits = _fits_critic(algorithm) is not False
    if comparing is None and size > 1 and fits and fact(ADVANTAGES, name, "group") is not None:
        so_set = " with these options" if fact(ADVANTAGES, name, "group") else ""
        yield ConfigIssue(
            ("rollout.group_size", "algorithm.advantage.name"),
            f"rollout.group_size = {size}, but advantage {name!r}{so_set} does not compare the episodes of a group, "
            "and no filter does",
            "set rollout.group_size to 1, or choose an advantage that does, as 'grpo'",
            fix={"rollout.group_size": LEAVE_OUT},
        )


def _whole_episodes_are_collected(config: Config, algorithm: NewestConfig) -> Iterator[ConfigIssue]:
    """Check that components that need whole episodes get them."""
    if config.rollout.episodes is Episodes.whole:
        return
    wanting: dict[str, tuple[Registry[Any], str]] = {
        "advantage": (ADVANTAGES, "whole"),
        "reward": (REWARDS, "whole"),
        "loss": (LOSSES, "whole"),
        "filter": (FILTERS, "group"),
    }
    parts = algorithm.parts()
    names = {key: parts[key].name for key in wanting if key in parts}
    named = {key: name for key, name in names.items() if fact(wanting[key][0], name, wanting[key][1])}
    if named:
        yield ConfigIssue(
            ("rollout.episodes", *(f"algorithm.{key}.name" for key in named)),
            f"{' and '.join(f'{key} {name!r}' for key, name in named.items())} {'need' if len(named) > 1 else 'needs'} "
            f"whole episodes, but rollout.episodes is {config.rollout.episodes.value!r}",
            "set rollout.episodes to whole",
            fix={"rollout.episodes": "whole"},
        )


def _collections_wait_for_a_filter(config: Config, algorithm: NewestConfig) -> Iterator[ConfigIssue]:
    """Check that repeated rollouts come with a filter that drops groups."""
    most, name = algorithm.max_collections, algorithm.filter.name
    if most > 1 and fact(FILTERS, name, "group") is False:
        yield ConfigIssue(
            ("algorithm.max_collections", "algorithm.filter.name"),
            f"algorithm.max_collections = {most}, but filter {name!r} drops no group",
            "set algorithm.max_collections to 1, or choose a filter",
            fix={"algorithm.max_collections": LEAVE_OUT},
        )


def _behaviour_policy_is_known(config: Config, algorithm: OnPolicyConfig) -> Iterator[ConfigIssue]:
    """Check that a loss that weights by the behaviour policy gets its log-probs."""
    settings = algorithm
    if settings.loss.name == "decoupled_ppo" and settings.old_logprobs is OldLogprobs.recompute:
        yield ConfigIssue(
            ("algorithm.old_logprobs", "algorithm.loss.name"),
            "algorithm.old_logprobs = 'recompute' replaces the log-probs of the behaviour policy, by which loss "
            "'decoupled_ppo' weights",
            "set algorithm.old_logprobs to rollout; with algorithm.proximal = recompute ratios start at 1 as well",
            fix={"algorithm.old_logprobs": LEAVE_OUT},
        )


def _staleness_is_corrected(config: Config, algorithm: OnPolicyConfig) -> Iterator[ConfigIssue]:
    """Check that asynchronous rollouts have a loss that corrects for older policies."""
    if config.rollout.mode is not RolloutMode.async_:
        return
    loss = algorithm.loss.name
    if config.rollout.max_staleness and fact(LOSSES, loss, "corrects_staleness") is False:
        able = [entry.name for entry in LOSSES.entries() if entry.corrects_staleness]
        yield ConfigIssue(
            ("rollout.mode", "algorithm.loss.name"),
            f"rollout.mode is async, but loss {loss!r} does not weight by the policy that acted, which is an older one",
            f"set algorithm.loss to {' or '.join(able)}, or rollout.max_staleness to 0 (a loss of your own: register "
            "it with corrects_staleness=True if it does)",
        )


def _rewards_of_actions_are_used(config: Config, algorithm: OnPolicyConfig) -> Iterator[ConfigIssue]:
    """Check that advantages of actions have an estimator that supports them, and log-probs of actions."""
    settings = algorithm
    if settings.reward_level is not RewardLevel.action:
        return
    if fact(ADVANTAGES, settings.advantage.name, "actions") is False:
        able = [entry.name for entry in ADVANTAGES.entries() if entry.actions]
        yield ConfigIssue(
            ("algorithm.reward_level", "algorithm.advantage.name"),
            f"algorithm.reward_level is 'action', but advantage {settings.advantage.name!r} works on chunks",
            f"set algorithm.reward_level to chunk, or algorithm.advantage to {' or '.join(able)}",
            fix={"algorithm.reward_level": LEAVE_OUT},
        )
    if config.rollout.delay:
        yield ConfigIssue(
            ("algorithm.reward_level", "rollout.delay"),
            f"algorithm.reward_level is 'action', but with rollout.delay = {config.rollout.delay} actions of two "
            "chunks are executed after a decision",
            "set algorithm.reward_level to chunk",
            fix={"algorithm.reward_level": LEAVE_OUT},
        )
    if settings.logprob_level is Level.chunk:
        yield ConfigIssue(
            ("algorithm.logprob_level", "algorithm.reward_level"),
            "algorithm.reward_level is 'action', but algorithm.logprob_level is 'chunk': one log-prob per chunk cannot "
            "have the advantages of its actions",
            "set algorithm.logprob_level to action or token",
        )


def _levels_fit_model(config: Config, algorithm: OnPolicyConfig) -> Iterator[ConfigIssue]:
    """Check that actions have log-probs of their own where these are asked for."""
    if fact(SupportedModel, config.model.name, "whole_chunks") is not True:
        return
    for name in ("logprob_level", "reward_level"):
        if getattr(algorithm, name) == Level.action.value:
            yield ConfigIssue(
                (f"algorithm.{name}", "model.name"),
                f"algorithm.{name} is 'action', but the tokens of model {config.model.name!r} belong to whole chunks",
                f"set algorithm.{name} to chunk" + (" or token" if name == "logprob_level" else ""),
                fix={f"algorithm.{name}": LEAVE_OUT},
            )


def _fits_critic(algorithm: NewestConfig) -> bool | None:
    """Return whether the method has a critic if, and only if, the advantage uses one; None: one of them is unknown."""
    stages = fact(ALGORITHMS, algorithm.name, "critic")
    estimator = fact(ADVANTAGES, algorithm.advantage.name, "critic")
    return None if None in (stages, estimator) else stages is estimator


def _stages_fit_advantage(config: Config, algorithm: NewestConfig) -> Iterator[ConfigIssue]:
    """Check that the algorithm's stages provide a critic's values if, and only if, the estimator uses them."""
    advantage = algorithm.advantage.name
    if _fits_critic(algorithm) is False:
        estimator = fact(ADVANTAGES, advantage, "critic")
        stages = not estimator
        fitting = [entry.name for entry in ALGORITHMS.entries() if entry.critic is estimator]
        able = [entry.name for entry in ADVANTAGES.entries() if entry.critic is stages]
        yield ConfigIssue(
            ("algorithm.advantage.name", "algorithm.name"),
            f"advantage {advantage!r} {'uses a' if estimator else 'has no'} critic, and algorithm "
            f"{algorithm.name!r} is made for one {'without' if estimator else 'with'}",
            f"set algorithm.advantage to {' or '.join(able)}"
            + (f", or algorithm to {' or '.join(fitting)}" if fitting else ""),
        )


def _bootstrap_has_critic(config: Config, algorithm: NewestConfig) -> Iterator[ConfigIssue]:
    """Check that bootstrapping comes with an advantage that has a critic."""
    name, bootstrap = algorithm.advantage.name, algorithm.bootstrap
    if fact(ADVANTAGES, name, "critic") is False and bootstrap is not Bootstrap.none:
        yield ConfigIssue(
            ("algorithm.bootstrap", "algorithm.advantage.name"),
            f"algorithm.bootstrap = {bootstrap.value!r} needs a critic, and advantage {name!r} has none",
            "set algorithm.bootstrap to none",
            fix={"algorithm.bootstrap": "none"},
        )


def _value_loss_has_critic(config: Config, algorithm: OnPolicyConfig) -> Iterator[ConfigIssue]:
    """Check that the value loss has no weight without a critic."""
    name, weight = algorithm.advantage.name, algorithm.value_coef
    if fact(ADVANTAGES, name, "critic") is False and weight > 0:
        yield ConfigIssue(
            ("algorithm.value_coef", "algorithm.advantage.name"),
            f"algorithm.value_coef = {weight:g} weights the loss of a critic, and advantage {name!r} has none",
            "set algorithm.value_coef to 0",
            fix={"algorithm.value_coef": 0.0},
        )


def _model_has_critic(config: Config, algorithm: NewestConfig) -> Iterator[ConfigIssue]:
    """Check that an advantage that needs values has a model that predicts them."""
    name, model = algorithm.advantage.name, config.model.name
    if fact(ADVANTAGES, name, "critic") and fact(SupportedModel, model, "critic") is False:
        without = [entry.name for entry in ADVANTAGES.entries() if not entry.critic]
        yield ConfigIssue(
            ("algorithm.advantage.name", "model.name"),
            f"advantage {name!r} needs values, and model {model!r} predicts none",
            f"choose another model, or an advantage without a critic ({', '.join(without)})",
        )


def _micro_batches_hold_whole_episodes(config: Config, algorithm: OnPolicyConfig) -> Iterator[ConfigIssue]:
    """Check that a whole episode fits into a micro-batch if the loss needs whole episodes."""
    size, loss, chunks = config.engine.micro_batch_size, algorithm.loss.name, config.rollout.num_chunks
    if size is not None and fact(LOSSES, loss, "whole") and size < chunks:
        yield ConfigIssue(
            ("engine.micro_batch_size", "rollout.num_chunks", "algorithm.loss.name"),
            f"engine.micro_batch_size = {size}, but loss {loss!r} needs the up to rollout.num_chunks = {chunks} chunks "
            "of an episode at once",
            f"set engine.micro_batch_size to {chunks} or more, or algorithm.loss to one that does not compare episodes",
            fix={"engine.micro_batch_size": chunks},
        )


def _batch_splits_into_minibatches(config: Config, algorithm: NewestConfig) -> Iterator[ConfigIssue]:
    """Check that every minibatch has the same number of chunks."""
    envs, rollout, parts = config.env.num_envs, config.rollout, algorithm.minibatches
    batch = envs * rollout.episodes_per_slot * rollout.num_chunks
    episodes = f" x rollout.episodes_per_slot = {rollout.episodes_per_slot}" if rollout.episodes_per_slot > 1 else ""
    if batch % parts:
        yield ConfigIssue(
            ("algorithm.minibatches", "rollout.num_chunks", "env.num_envs"),
            f"a batch of env.num_envs = {envs}{episodes} x rollout.num_chunks = {rollout.num_chunks} cannot be split "
            f"into algorithm.minibatches = {parts}",
            f"set algorithm.minibatches to {divisors(parts, batch)}",
            fix={"algorithm.minibatches": max(n for n in range(1, parts + 1) if batch % n == 0)},
        )


def _usual_group_size(config: Config) -> int:
    """Return the largest size up to 8 of which there are two groups or more; 2 if no size fits."""
    envs = config.env.num_envs
    return max((size for size in range(2, 9) if envs % size == 0 and envs > size), default=2)


def _group_sizes(config: Config) -> str:
    envs = config.env.num_envs
    return ", ".join(str(size) for size in range(2, envs + 1) if envs % size == 0) or f"none fits {envs}; raise it"


CRITIC_COLUMNS = ("values", "next_values")
"""Columns that `collect` writes only with a critic."""


def check_stages(config: Config, algorithm: NewestConfig, stages: Sequence[Stage]) -> Iterator[ConfigIssue]:
    """Check that stages fit the filter and the advantage."""
    yield from _check_filter(algorithm, [stage.function for stage in stages])
    if config.pipeline.function is not None or fact(ALGORITHMS, algorithm.name, "critic") is None:
        yield from _check_critic(algorithm, [stage for stage in stages if stage.function == "collect"])


def _check_filter(algorithm: NewestConfig, functions: list[object]) -> Iterator[ConfigIssue]:
    """Check that a filter is used by a stage, and that stages that filter have one."""
    name = algorithm.filter.name
    filters = fact(FILTERS, name, "group")
    paths = ("algorithm.filter.name", "algorithm.name", "pipeline")
    builtin = [entry.name for entry in STAGES.entries() if entry.source == "built-in"]
    if filters is not False and "filter_groups" not in functions and all(each in builtin for each in functions):
        yield ConfigIssue(
            paths,
            f"algorithm.filter.name is {name!r}, but the iteration has no stage that filters",
            "set algorithm.name to dapo, insert the stage filter_groups, or set algorithm.filter to none",
        )
    if filters is False and "filter_groups" in functions:
        useful = [entry.name for entry in FILTERS.entries() if entry.group]
        yield ConfigIssue(
            paths,
            f"the iteration filters groups, but algorithm.filter.name is {name!r}",
            f"set algorithm.filter to {' or '.join(useful)}, or choose an algorithm that does not filter",
        )


def _check_critic(algorithm: NewestConfig, collecting: list[Stage]) -> Iterator[ConfigIssue]:
    """Check that the user's own collecting stages declare the critic's columns if and only if there is a critic."""
    advantage = algorithm.advantage.name
    critic = fact(ADVANTAGES, advantage, "critic")
    for stage in collecting if critic is not None else []:
        declared = [name for name in CRITIC_COLUMNS if name in stage.writes]
        columns = ", ".join(map(repr, CRITIC_COLUMNS))
        if critic and len(declared) < len(CRITIC_COLUMNS):
            message = f"advantage {advantage!r} has a critic, but stage {stage.name!r} does not write its columns"
            hint = f"add writes=({columns}) to the stage, or choose an advantage without a critic"
        elif not critic and declared:
            message = f"stage {stage.name!r} writes the columns of a critic, but advantage {advantage!r} has none"
            hint = f"remove {columns} from the stage's writes, or choose an advantage with a critic"
        else:
            continue
        yield ConfigIssue(("pipeline.function", "algorithm.advantage.name", "algorithm.name"), message, hint)
