"""Rules of methods that learn from a replay; see `config.rules`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from embodyrl.config.infos import model_info
from embodyrl.config.issues import LEAVE_OUT, ConfigIssue
from embodyrl.config.needs import Learns, Needs
from embodyrl.config.rules import action_dim, fact, needs_of_all, on_policy_algorithms, state_dim
from embodyrl.config.schema import Config, DataConfig, Episodes, ParallelBackend
from embodyrl.data.check import check as check_demonstrations
from embodyrl.data.check import check_for_critics
from embodyrl.methods.replay import expert_rules
from embodyrl.methods.replay.config import CriticizedConfig, ReplayAlgorithmConfig
from embodyrl.models.flow.config import FlowInfo, flow_sizes
from embodyrl.registry import REWARDS, SupportedModel
from embodyrl.rollout.replay_fields import MIB, row_bytes

LACKED = {
    Learns.reparameterization: ("actions that are differentiable functions of noise", "squashed"),
    Learns.flow: ("a small flow policy beside critics that see what it sees", "flow"),
    Learns.one_step: ("a small flow policy, and one distilled from it that critics teach", "one_step"),
}
"""What a method needs of a policy beside critics, and the head of a small one that has it."""


def check(config: Config, algorithm: ReplayAlgorithmConfig) -> Iterator[ConfigIssue]:
    """Check the settings of a method that learns from a replay."""
    needs = algorithm.needs(config)
    if not needs.imitates:
        yield from _model(config, needs)
        yield from _reward(config)
    yield from _settings_without_use(config, algorithm, needs)
    yield from _rollouts(config, needs)
    yield from _sizes(config, algorithm, needs)
    yield from _room(config, algorithm)
    if needs.transitions:
        yield from check_demonstrations(config)
        yield from check_for_critics(config)
    if needs.expert is not None:
        yield from expert_rules.check(config, needs.expert, needs)


def check_critics(config: Config, settings: CriticizedConfig) -> Iterator[ConfigIssue]:
    """Check the settings of critics of actions."""
    critics = settings.critics
    if critics.subset > critics.count:
        yield ConfigIssue(
            ("algorithm.off_policy.critics.subset", "algorithm.off_policy.critics.count"),
            f"algorithm.off_policy.critics.subset = {critics.subset}, but there are "
            f"algorithm.off_policy.critics.count = {critics.count} critics to draw from, none twice",
            f"set algorithm.off_policy.critics.subset to {critics.count} or less",
        )
    yield from _shifts(config, settings)


def _model(config: Config, needs: Needs) -> Iterator[ConfigIssue]:
    """Check that the policy offers what the method learns it by."""
    name, model = config.algorithm.name, config.model.name
    lacked = LACKED.get(needs.learns)
    if lacked is not None and fact(SupportedModel, model, "off_policy") is False:
        steering = [each for each, other in needs_of_all(config).items() if other.learns is Learns.noise]
        flow = isinstance(model_info(model), FlowInfo)
        steer = f", or to {' or '.join(steering)}, which learns the noise of such a model" if flow and steering else ""
        what, head = lacked
        yield ConfigIssue(
            ("algorithm.name", "model.name"),
            f"algorithm {name!r} needs {what}, which model {model!r} does not have",
            f"set algorithm to {on_policy_algorithms(config)}{steer}, or model to {_able_models(config)} with "
            f"model.head: {head}",
        )


def _reward(config: Config) -> Iterator[ConfigIssue]:
    """Check that rewards can be computed for single decisions."""
    reward = config.algorithm.parts()["reward"].name
    if fact(REWARDS, reward, "of_decisions") is False:
        # In front those that need nothing else.
        rewards = sorted(REWARDS.entries(), key=lambda entry: entry.check is not None)
        able = [entry.name for entry in rewards if entry.of_decisions]
        yield ConfigIssue(
            ("algorithm.reward.name", "algorithm.name"),
            f"reward {reward!r} is computed from whole episodes, and a replay holds single decisions",
            f"set algorithm.reward to {' or '.join(able)} (a reward of your own: register it with of_decisions=True if "
            "it can be computed for single decisions)",
        )


def _able_models(config: Config) -> str:
    """Return the models that can learn from a replay, as text; in front those that see what the config shows."""
    able = [entry for entry in SupportedModel.entries() if entry.off_policy]
    able.sort(key=lambda entry: entry.frames is not bool(config.env.cameras))
    return " or ".join(entry.name for entry in able)


def _settings_without_use(config: Config, algorithm: ReplayAlgorithmConfig, needs: Needs) -> Iterator[ConfigIssue]:
    """Check that nothing is set in other sections that such a method does not read."""
    usual = DataConfig()
    for name in algorithm.unread_data:
        if getattr(config.data, name) != getattr(usual, name):
            yield ConfigIssue(
                (f"data.{name}", "algorithm.name"),
                f"data.{name} is set, but algorithm {config.algorithm.name!r} learns by the settings of "
                "algorithm.off_policy",
                "leave it out",
                fix={f"data.{name}": LEAVE_OUT},
            )
    if config.engine.micro_batch_size is not None and needs.learns in (*LACKED, Learns.noise):
        yield ConfigIssue(
            ("engine.micro_batch_size", "algorithm.name"),
            f"engine.micro_batch_size is set, but algorithm {config.algorithm.name!r} learns from whole minibatches of "
            "algorithm.off_policy.batch_size decisions",
            "leave it out",
            fix={"engine.micro_batch_size": LEAVE_OUT},
        )


def _rollouts(config: Config, needs: Needs) -> Iterator[ConfigIssue]:
    """Check that rollouts are such that a replay can take them up."""
    rollout, name = config.rollout, config.algorithm.name
    if rollout.group_size > 1:
        yield ConfigIssue(
            ("rollout.group_size", "algorithm.name"),
            f"rollout.group_size = {rollout.group_size}, but algorithm {name!r} compares no episodes",
            "set rollout.group_size to 1",
            fix={"rollout.group_size": LEAVE_OUT},
        )
    # Imitation may continue in rounds of whole episodes: no decision of it needs what followed.
    if rollout.episodes is Episodes.whole and not needs.imitates:
        yield ConfigIssue(
            ("rollout.episodes", "algorithm.name"),
            f"rollout.episodes is whole, but algorithm {name!r} learns from single decisions, between short rollouts",
            "set rollout.episodes to continuous",
            fix={"rollout.episodes": LEAVE_OUT},
        )
    elif rollout.episodes is Episodes.whole and rollout.episodes_per_slot > 1:
        yield ConfigIssue(
            ("rollout.episodes_per_slot", "algorithm.name"),
            f"rollout.episodes_per_slot = {rollout.episodes_per_slot}, but algorithm {name!r} learns after every round "
            "of one episode in each env",
            "set rollout.episodes_per_slot to 1",
            fix={"rollout.episodes_per_slot": LEAVE_OUT},
        )
    if config.engine.parallel.backend in (ParallelBackend.fsdp, ParallelBackend.hsdp):
        yield ConfigIssue(
            ("engine.parallel.backend", "algorithm.name"),
            f"engine.parallel.backend = {config.engine.parallel.backend.value!r}, but every rank has all critics of "
            f"algorithm {name!r}, and all of its policy",
            "set engine.parallel.backend to none",
            fix={"engine.parallel.backend": "none"},
        )


def _sizes(config: Config, algorithm: ReplayAlgorithmConfig, needs: Needs) -> Iterator[ConfigIssue]:
    """Check that the replay can hold what is drawn from it."""
    settings, envs = algorithm.off_policy, config.env.num_envs
    capacity = settings.replay.capacity
    wanted = {
        "algorithm.off_policy.replay.start_after": settings.replay.start_after,
        "algorithm.off_policy.batch_size": settings.batch_size,
        # A rollout, and the observation of each env at which the next one continues.
        "(rollout.num_chunks + 1) x env.num_envs": (config.rollout.num_chunks + 1) * envs,
    }
    what, least = max(wanted.items(), key=lambda each: each[1])
    if capacity < least:
        yield ConfigIssue(
            ("algorithm.off_policy.replay.capacity", *re.findall(r"\w+\.[\w.]+", what)),
            f"algorithm.off_policy.replay.capacity = {capacity} decisions, fewer than {what} = {least}",
            f"set algorithm.off_policy.replay.capacity to {least} or more",
        )
    if settings.replay.start_after < settings.batch_size and not needs.imitates:
        yield ConfigIssue(
            ("algorithm.off_policy.replay.start_after", "algorithm.off_policy.batch_size"),
            f"algorithm.off_policy.replay.start_after = {settings.replay.start_after}, fewer decisions than a "
            f"minibatch of algorithm.off_policy.batch_size = {settings.batch_size}",
            f"set algorithm.off_policy.replay.start_after to {settings.batch_size} or more",
        )


def _shifts(config: Config, settings: CriticizedConfig) -> Iterator[ConfigIssue]:
    """Check that it is images that are shifted, and that they stay larger than the shift."""
    pixels, size = settings.augment_pixels, config.env.image_size
    if pixels and config.algorithm.needs(config).steering is not None:
        yield ConfigIssue(
            ("algorithm.off_policy.augment_pixels", "algorithm.name"),
            f"algorithm.off_policy.augment_pixels = {pixels}, but with algorithm {config.algorithm.name!r} the replay "
            "holds features in place of images",
            "set it to 0",
        )
    elif pixels and 2 * pixels >= min(size):
        yield ConfigIssue(
            ("algorithm.off_policy.augment_pixels", "env.image_size"),
            f"algorithm.off_policy.augment_pixels = {pixels} shifts images of {size[0]} x {size[1]} pixels by half of "
            "their size or more",
            f"set it to {max((min(size) - 1) // 8, 1)} or so",
        )


def _room(config: Config, algorithm: ReplayAlgorithmConfig) -> Iterator[ConfigIssue]:
    """Check that there is room for a replay that lies on the disk."""
    needed, memory = replay_size(config, algorithm), psutil.virtual_memory().total
    if needed is None:
        return
    if needed <= algorithm.off_policy.replay.memory_mib * MIB:
        if needed > memory:
            yield ConfigIssue(
                ("algorithm.off_policy.replay.memory_mib", "algorithm.off_policy.replay.capacity"),
                f"the replay takes {needed / MIB:,.0f} MiB of memory, and this machine has {memory / MIB:,.0f} MiB",
                "lower algorithm.off_policy.replay.memory_mib, so that it lies on the disk, or "
                "algorithm.off_policy.replay.capacity",
            )
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


def replay_size(config: Config, algorithm: ReplayAlgorithmConfig) -> int | None:
    """Return the size of the replay [bytes]; None if that of states or actions, or of the policy that
    is steered, is unknown before the simulator runs."""
    state, action = state_dim(config), action_dim(config)
    if state is None or action is None:
        return None
    flow = flow_sizes(config) if algorithm.needs(config).steering is not None else None
    if flow is None and algorithm.needs(config).steering is not None:
        return None
    fields = algorithm.fields(config, proprio_dim=state, action_dim=action, flow=flow)
    return algorithm.off_policy.replay.capacity * row_bytes(fields)
