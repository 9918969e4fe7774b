"""Rules of algorithms that learn from a replay; see `rules`."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from embodyrl.algorithms.off_policy_sizes import MIB, largest_entropy, replay_bytes, usual_target_entropy
from embodyrl.algorithms.options import SACConfig
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import action_dim, fact, state_dim
from embodyrl.config.schema import AlgorithmConfig, Config, Episodes, ParallelBackend
from embodyrl.registry import ALGORITHMS, REWARDS, SupportedModel

USED = ("name", "reward", "time_penalty", "reward_scale", "gamma", "discount_per", "bootstrap")
"""Settings of every algorithm that a replay has a use for."""


def check(config: Config) -> Iterator[ConfigIssue]:
    """Check the settings of an algorithm that learns from a replay."""
    yield from _model(config)
    yield from _settings_without_use(config)
    yield from _rollouts(config)
    yield from _sizes(config)
    yield from _entropy(config)
    yield from _room(config)


def _model(config: Config) -> Iterator[ConfigIssue]:
    """Check that the model can learn from a replay, and that its rewards can be computed there."""
    name, model, reward = config.algorithm.name, config.model.name, config.algorithm.reward.name
    if fact(SupportedModel, model, "off_policy") is False:
        able = [entry.name for entry in SupportedModel.entries() if entry.off_policy]
        others = [entry.name for entry in ALGORITHMS.entries() if not entry.off_policy and not entry.demonstrations]
        yield ConfigIssue(
            ("algorithm.name", "model.name"),
            f"algorithm {name!r} needs actions that are differentiable functions of noise, which model {model!r} does "
            "not have",
            f"set algorithm to one that learns from its newest rollout ({', '.join(others)}), or model to "
            f"{' or '.join(able)}",
        )
    if fact(REWARDS, reward, "of_decisions") is False:
        able = [entry.name for entry in REWARDS.entries() if entry.of_decisions]
        yield ConfigIssue(
            ("algorithm.reward.name", "algorithm.name"),
            f"reward {reward!r} is computed from whole episodes, and a replay holds single decisions",
            f"set algorithm.reward to {' or '.join(able)} (a reward of your own: register it with of_decisions=True if "
            "it can be computed for single decisions)",
        )


def _settings_without_use(config: Config) -> Iterator[ConfigIssue]:
    """Check that no setting of learning from the newest rollout is changed."""
    defaults = SACConfig(name=config.algorithm.name)
    for each in dataclasses.fields(AlgorithmConfig):
        found, default = getattr(config.algorithm, each.name), getattr(defaults, each.name)
        if each.name not in USED and found != default:
            yield ConfigIssue(
                f"algorithm.{each.name}" + (".name" if dataclasses.is_dataclass(found) else ""),
                f"algorithm.{each.name} has no use: algorithm {config.algorithm.name!r} learns from a replay, by the "
                "settings of algorithm.off_policy",
                "leave it out",
            )
    if config.engine.micro_batch_size is not None:
        yield ConfigIssue(
            ("engine.micro_batch_size", "algorithm.name"),
            f"engine.micro_batch_size has no use: algorithm {config.algorithm.name!r} learns from minibatches of "
            "algorithm.off_policy.batch_size decisions",
            "leave it out",
        )


def _rollouts(config: Config) -> Iterator[ConfigIssue]:
    """Check that rollouts are such that a replay can take them up."""
    rollout, name = config.rollout, config.algorithm.name
    if rollout.group_size > 1:
        yield ConfigIssue(
            ("rollout.group_size", "algorithm.name"),
            f"rollout.group_size = {rollout.group_size} has no use: algorithm {name!r} compares no episodes",
            "set rollout.group_size to 1",
        )
    if rollout.episodes is Episodes.whole:
        yield ConfigIssue(
            ("rollout.episodes", "algorithm.name"),
            f"rollout.episodes is whole, but algorithm {name!r} learns from single decisions, between short rollouts",
            "set rollout.episodes to continuous",
        )
    if config.placement.rollout.workers:
        yield ConfigIssue(
            ("placement.rollout.workers", "algorithm.name"),
            f"placement.rollout.workers = {config.placement.rollout.workers}, but the replay of algorithm {name!r} is "
            "that of the ranks, which roll out themselves",
            "set placement.rollout.workers to 0, and engine.parallel.world_size to the number of processes",
        )
    if config.engine.parallel.backend in (ParallelBackend.fsdp, ParallelBackend.hsdp):
        yield ConfigIssue(
            ("engine.parallel.backend", "algorithm.name"),
            f"engine.parallel.backend = {config.engine.parallel.backend.value!r}, but every rank has all critics of "
            f"algorithm {name!r}, and all of its policy",
            "set engine.parallel.backend to none",
        )


def _sizes(config: Config) -> Iterator[ConfigIssue]:
    """Check that the replay can hold what is drawn from it."""
    assert isinstance(config.algorithm, SACConfig)
    settings, envs = config.algorithm.off_policy, config.env.num_envs
    capacity = settings.replay.capacity
    needs = {
        "algorithm.off_policy.replay.start_after": settings.replay.start_after,
        "algorithm.off_policy.batch_size": settings.batch_size,
        # A rollout, and the observation of each env at which the next one goes on.
        "(rollout.num_chunks + 1) x env.num_envs": (config.rollout.num_chunks + 1) * envs,
    }
    what, least = max(needs.items(), key=lambda need: need[1])
    if capacity < least:
        yield ConfigIssue(
            ("algorithm.off_policy.replay.capacity", *re.findall(r"\w+\.[\w.]+", what)),
            f"algorithm.off_policy.replay.capacity = {capacity} decisions, fewer than {what} = {least}",
            f"set algorithm.off_policy.replay.capacity to {least} or more",
        )
    if settings.replay.start_after < settings.batch_size:
        yield ConfigIssue(
            ("algorithm.off_policy.replay.start_after", "algorithm.off_policy.batch_size"),
            f"algorithm.off_policy.replay.start_after = {settings.replay.start_after}, fewer decisions than a "
            f"minibatch of algorithm.off_policy.batch_size = {settings.batch_size}",
            f"set algorithm.off_policy.replay.start_after to {settings.batch_size} or more",
        )
    if settings.critics.subset > settings.critics.count:
        yield ConfigIssue(
            ("algorithm.off_policy.critics.subset", "algorithm.off_policy.critics.count"),
            f"algorithm.off_policy.critics.subset = {settings.critics.subset}, but there are "
            f"algorithm.off_policy.critics.count = {settings.critics.count} critics to draw from, none twice",
            f"set algorithm.off_policy.critics.subset to {settings.critics.count} or less",
        )


def _entropy(config: Config) -> Iterator[ConfigIssue]:
    """Check that a policy can have the target entropy."""
    assert isinstance(config.algorithm, SACConfig)
    wanted, dim = config.algorithm.off_policy.temperature.target_entropy, action_dim(config)
    if isinstance(wanted, str) or dim is None:
        return
    size = dim * config.rollout.chunk_size
    if wanted >= largest_entropy(size):
        yield ConfigIssue(
            "algorithm.off_policy.temperature.target_entropy",
            f"algorithm.off_policy.temperature.target_entropy = {wanted:g} nats, which no distribution of {size} "
            f"numbers in -1 .. 1 reaches: a uniform one has {largest_entropy(size):.3g}",
            f"set it below that (auto: {usual_target_entropy(size):g})",
        )


def _room(config: Config) -> Iterator[ConfigIssue]:
    """Check that there is room for a replay that lies on the disk."""
    assert isinstance(config.algorithm, SACConfig)
    needed = replay_size(config)
    if needed is None or needed <= config.algorithm.off_policy.replay.memory_mib * MIB:
        return
    folder = Path(config.run.dir or ".").absolute()
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        yield ConfigIssue(
            ("algorithm.off_policy.replay.capacity", "algorithm.off_policy.replay.memory_mib"),
            f"the replay takes {needed / MIB:,.0f} MiB on the disk of {there}, where {free / MIB:,.0f} MiB are free",
            "lower algorithm.off_policy.replay.capacity, or set run.dir to a folder on a larger disk",
        )


def notes(config: Config) -> list[str]:
    """Return the size and the place of the replay, as far as they are known before the simulator runs."""
    assert isinstance(config.algorithm, SACConfig)
    settings, size = config.algorithm.off_policy.replay, replay_size(config)
    if size is None:
        return []
    place = "in memory" if size <= settings.memory_mib * MIB else "on the disk, in the run's folder"
    return [f"the replay of {settings.capacity:,} chunks takes up to {size / MIB:,.1f} MiB {place}"]


def replay_size(config: Config) -> int | None:
    """Return the size of the replay [bytes]; None if that of states or actions is unknown before the simulator runs."""
    assert isinstance(config.algorithm, SACConfig)
    state, action = state_dim(config), action_dim(config)
    if state is None or action is None:
        return None
    return replay_bytes(
        config.algorithm.off_policy.replay.capacity,
        proprio_dim=state,
        action_dim=action,
        chunk_size=config.rollout.chunk_size,
    )
