"""Rules of algorithms that learn from a replay; see `rules`."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

import psutil

from embodyrl.algorithms.off_policy_options import (
    CriticizedConfig,
    CriticsConfig,
    DSRLConfig,
    IQLConfig,
    ReplayAlgorithmConfig,
    RLPDConfig,
    SACConfig,
    demonstrated_share,
    imitation_steps,
    weighs_imitation,
)
from embodyrl.algorithms.off_policy_sizes import MIB, fields_of, largest_entropy, row_bytes, usual_target_entropy
from embodyrl.config.issues import LEAVE_OUT, ConfigIssue
from embodyrl.config.rules import action_dim, fact, of_newest_rollouts, state_dim
from embodyrl.config.schema import (
    AdvantageConfig,
    AlgorithmConfig,
    Config,
    DataConfig,
    Episodes,
    FilterConfig,
    LossConfig,
    ParallelBackend,
    RewardConfig,
    RolloutMode,
)
from embodyrl.data.check import check as check_demonstrations
from embodyrl.data.check import check_for_critics, task_notes
from embodyrl.pipelines import intervene_rules, steering_rules
from embodyrl.registry import ALGORITHMS, REWARDS, SupportedModel

USED = ("name", "reward", "time_penalty", "reward_scale", "gamma", "discount_per", "bootstrap")
"""Settings of every algorithm that a replay has a use for."""

COMPONENTS = (RewardConfig, FilterConfig, AdvantageConfig, LossConfig)


def check(config: Config) -> Iterator[ConfigIssue]:
    """Check the settings of an algorithm that learns from a replay."""
    assert isinstance(config.algorithm, ReplayAlgorithmConfig), "its registration says so"
    yield from _model(config)
    yield from _settings_without_use(config)
    yield from _rollouts(config)
    yield from _sizes(config)
    yield from _room(config)
    if demonstrated_share(config.algorithm) is not None:
        yield from check_demonstrations(config)
        yield from check_for_critics(config)
    if isinstance(config.algorithm, RLPDConfig):
        yield from _imitation(config.algorithm)
    if isinstance(config.algorithm, IQLConfig):
        yield from _demonstrated(config.algorithm)
    yield from intervene_rules.check(config)
    if isinstance(config.algorithm, SACConfig):
        yield from _entropy(config, config.algorithm)
    settings = config.algorithm.off_policy
    if isinstance(settings, CriticizedConfig):
        yield from _critics(settings.critics)
        yield from _shifts(config, settings)


def _model(config: Config) -> Iterator[ConfigIssue]:
    """Check that the model can learn from a replay, and that its rewards can be computed there."""
    name, model, reward = config.algorithm.name, config.model.name, config.algorithm.reward.name
    if isinstance(config.algorithm, DSRLConfig):
        yield from steering_rules.check(config)
    elif weighs_imitation(config):
        yield from _weighed_imitation(config)
    elif fact(SupportedModel, model, "off_policy") is False and not fact(ALGORITHMS, name, "imitates"):
        flow = fact(SupportedModel, model, "flow") is not None
        steer = ", or to dsrl, which learns the noise of such a model" if flow else ""
        yield ConfigIssue(
            ("algorithm.name", "model.name"),
            f"algorithm {name!r} needs actions that are differentiable functions of noise, which model {model!r} does "
            "not have",
            f"set algorithm to {of_newest_rollouts()}{steer}, or model to {_able_models(config)} with model.head: "
            "squashed",
        )
    if fact(REWARDS, reward, "of_decisions") is False and not fact(ALGORITHMS, name, "imitates"):
        # In front those that need nothing else.
        rewards = sorted(REWARDS.entries(), key=lambda entry: entry.check is not None)
        able = [entry.name for entry in rewards if entry.of_decisions]
        yield ConfigIssue(
            ("algorithm.reward.name", "algorithm.name"),
            f"reward {reward!r} is computed from whole episodes, and a replay holds single decisions",
            f"set algorithm.reward to {' or '.join(able)} (a reward of your own: register it with of_decisions=True if "
            "it can be computed for single decisions)",
        )


def _weighed_imitation(config: Config) -> Iterator[ConfigIssue]:
    """Check that a policy can learn so."""
    model, algorithm = config.model.name, config.algorithm
    assert isinstance(algorithm, IQLConfig)
    if fact(SupportedModel, model, "weighs") is False:
        able = [entry.name for entry in SupportedModel.entries() if entry.weighs]
        yield ConfigIssue(
            ("model.name", "algorithm.name"),
            f"algorithm {algorithm.name!r} weights demonstrations by their advantage, which the supervised loss of "
            f"model {model!r} does not take into account",
            f"set model to one that does ({', '.join(able)}); a model of your own: use inputs['sample_weights'] in "
            "its sft_loss, and register it with weighs=True",
        )
    if algorithm.off_policy.offline_iterations == 0:
        yield ConfigIssue(
            ("algorithm.off_policy.offline_iterations", "model.name"),
            f"algorithm.off_policy.offline_iterations = 0, so that rollouts begin with random actions, which model "
            f"{model!r} does not draw",
            "set algorithm.off_policy.offline_iterations to 1 or more",
        )


def _able_models(config: Config) -> str:
    """Return the models that can learn from a replay, as text; in front those that see what the config shows."""
    able = [entry for entry in SupportedModel.entries() if entry.off_policy]
    able.sort(key=lambda entry: entry.frames is not bool(config.env.cameras))
    return " or ".join(entry.name for entry in able)


def _settings_without_use(config: Config) -> Iterator[ConfigIssue]:
    """Check that no setting of learning from the newest rollout is changed."""
    defaults = AlgorithmConfig(name=config.algorithm.name)
    imitates = fact(ALGORITHMS, config.algorithm.name, "imitates")
    used = ("name",) if imitates else USED
    for each in dataclasses.fields(AlgorithmConfig):
        found, default = getattr(config.algorithm, each.name), getattr(defaults, each.name)
        for path in () if each.name in used else _changed(found, default, f"algorithm.{each.name}"):
            yield ConfigIssue(
                path,
                f"{path.removesuffix('.name')} has no use: algorithm {config.algorithm.name!r} learns from a replay, "
                "by the settings of algorithm.off_policy",
                "leave it out",
                fix={path: LEAVE_OUT},
            )
    usual = DataConfig()
    for name in _unread(config.algorithm):
        if getattr(config.data, name) != getattr(usual, name):
            yield ConfigIssue(
                (f"data.{name}", "algorithm.name"),
                f"data.{name} has no use: algorithm {config.algorithm.name!r} learns by the settings of "
                "algorithm.off_policy",
                "leave it out",
                fix={f"data.{name}": LEAVE_OUT},
            )
    if config.engine.micro_batch_size is not None and not (imitates or weighs_imitation(config)):
        yield ConfigIssue(
            ("engine.micro_batch_size", "algorithm.name"),
            f"engine.micro_batch_size has no use: algorithm {config.algorithm.name!r} learns from minibatches of "
            "algorithm.off_policy.batch_size decisions",
            "leave it out",
            fix={"engine.micro_batch_size": LEAVE_OUT},
        )


def _changed(found: object, default: object, path: str) -> Iterator[str]:
    """Yield the settings at or below a path that are not the default; of another component only its name."""
    if not isinstance(found, COMPONENTS):
        if found != default:
            yield path
    elif not isinstance(default, type(found)) or found.name != default.name:
        yield f"{path}.name"
    else:
        for each in dataclasses.fields(found):
            if getattr(found, each.name) != getattr(default, each.name):
                yield f"{path}.{each.name}"


def _unread(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Return the settings of the section `data` that such an algorithm does not read."""
    if isinstance(algorithm, RLPDConfig):
        return ("steps",) if imitation_steps(algorithm) else ("steps", "batch_size", "shift_pixels")
    return ("batch_size", "shift_pixels") if isinstance(algorithm, IQLConfig) else ()


def _rollouts(config: Config) -> Iterator[ConfigIssue]:
    """Check that rollouts are such that a replay can take them up."""
    rollout, name = config.rollout, config.algorithm.name
    if rollout.group_size > 1:
        yield ConfigIssue(
            ("rollout.group_size", "algorithm.name"),
            f"rollout.group_size = {rollout.group_size} has no use: algorithm {name!r} compares no episodes",
            "set rollout.group_size to 1",
            fix={"rollout.group_size": LEAVE_OUT},
        )
    # Imitation may continue in rounds of whole episodes: no decision of it needs what followed.
    rounds = bool(fact(ALGORITHMS, name, "imitates"))
    if rollout.episodes is Episodes.whole and not rounds:
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
    if rollout.mode is RolloutMode.async_:
        yield ConfigIssue(
            ("rollout.mode", "algorithm.name"),
            f"rollout.mode is async, which needs rollout workers, and algorithm {name!r} has none",
            "set rollout.mode to sync",
            fix={"rollout.mode": LEAVE_OUT},
        )
    if config.placement.rollout.workers:
        yield ConfigIssue(
            ("placement.rollout.workers", "algorithm.name"),
            f"placement.rollout.workers = {config.placement.rollout.workers}, but the replay of algorithm {name!r} is "
            "that of the ranks, which roll out themselves",
            "set placement.rollout.workers to 0, and engine.parallel.world_size to the number of processes",
            fix={"placement.rollout.workers": LEAVE_OUT},
        )
    if config.engine.parallel.backend in (ParallelBackend.fsdp, ParallelBackend.hsdp):
        yield ConfigIssue(
            ("engine.parallel.backend", "algorithm.name"),
            f"engine.parallel.backend = {config.engine.parallel.backend.value!r}, but every rank has all critics of "
            f"algorithm {name!r}, and all of its policy",
            "set engine.parallel.backend to none",
            fix={"engine.parallel.backend": "none"},
        )


def _sizes(config: Config) -> Iterator[ConfigIssue]:
    """Check that the replay can hold what is drawn from it."""
    assert isinstance(config.algorithm, ReplayAlgorithmConfig)
    settings, envs = config.algorithm.off_policy, config.env.num_envs
    capacity = settings.replay.capacity
    needs = {
        "algorithm.off_policy.replay.start_after": settings.replay.start_after,
        "algorithm.off_policy.batch_size": settings.batch_size,
        # A rollout, and the observation of each env at which the next one continues.
        "(rollout.num_chunks + 1) x env.num_envs": (config.rollout.num_chunks + 1) * envs,
    }
    what, least = max(needs.items(), key=lambda need: need[1])
    if capacity < least:
        yield ConfigIssue(
            ("algorithm.off_policy.replay.capacity", *re.findall(r"\w+\.[\w.]+", what)),
            f"algorithm.off_policy.replay.capacity = {capacity} decisions, fewer than {what} = {least}",
            f"set algorithm.off_policy.replay.capacity to {least} or more",
        )
    imitates = fact(ALGORITHMS, config.algorithm.name, "imitates")
    if settings.replay.start_after < settings.batch_size and not imitates:
        yield ConfigIssue(
            ("algorithm.off_policy.replay.start_after", "algorithm.off_policy.batch_size"),
            f"algorithm.off_policy.replay.start_after = {settings.replay.start_after}, fewer decisions than a "
            f"minibatch of algorithm.off_policy.batch_size = {settings.batch_size}",
            f"set algorithm.off_policy.replay.start_after to {settings.batch_size} or more",
        )


def _critics(critics: CriticsConfig) -> Iterator[ConfigIssue]:
    """Check that a target has as many critics as it wants."""
    if critics.subset > critics.count:
        yield ConfigIssue(
            ("algorithm.off_policy.critics.subset", "algorithm.off_policy.critics.count"),
            f"algorithm.off_policy.critics.subset = {critics.subset}, but there are "
            f"algorithm.off_policy.critics.count = {critics.count} critics to draw from, none twice",
            f"set algorithm.off_policy.critics.subset to {critics.count} or less",
        )


def _demonstrated(algorithm: IQLConfig) -> Iterator[ConfigIssue]:
    """Check that something is learned from demonstrations."""
    settings = algorithm.off_policy
    if not settings.demonstrations and not settings.offline_iterations:
        yield ConfigIssue(
            ("algorithm.off_policy.demonstrations", "algorithm.off_policy.offline_iterations"),
            "algorithm.off_policy.demonstrations = 0 and algorithm.off_policy.offline_iterations = 0, so that nothing "
            "is learned from data.path",
            "raise one of them, or set algorithm to sac and data.path to null",
        )


def _imitation(algorithm: RLPDConfig) -> Iterator[ConfigIssue]:
    """Check that no setting of imitation lacks another that it needs."""
    settings, imitation = algorithm.off_policy, algorithm.off_policy.imitation
    if not settings.demonstrations and not imitation.first_steps:
        yield ConfigIssue(
            ("algorithm.off_policy.demonstrations", "algorithm.off_policy.imitation.first_steps"),
            "algorithm.off_policy.demonstrations = 0 and algorithm.off_policy.imitation.first_steps = 0, so that "
            "nothing is learned from data.path",
            "raise one of them, or set algorithm to sac and data.path to null",
        )
    if imitation.cloned_coef and not imitation.first_steps:
        yield ConfigIssue(
            ("algorithm.off_policy.imitation.cloned_coef", "algorithm.off_policy.imitation.first_steps"),
            f"algorithm.off_policy.imitation.cloned_coef = {imitation.cloned_coef:g} has no use: with "
            "algorithm.off_policy.imitation.first_steps = 0 there is no policy that imitation alone gave",
            "raise algorithm.off_policy.imitation.first_steps, or leave it out",
        )
    if imitation.better_only and not (imitation.coef and settings.demonstrations):
        yield ConfigIssue(
            ("algorithm.off_policy.imitation.better_only", "algorithm.off_policy.imitation.coef"),
            "algorithm.off_policy.imitation.better_only has no use: no action is imitated while critics learn",
            "raise algorithm.off_policy.imitation.coef and algorithm.off_policy.demonstrations, or leave it out",
        )


def _entropy(config: Config, algorithm: SACConfig) -> Iterator[ConfigIssue]:
    """Check that a policy can have the target entropy."""
    wanted, size = algorithm.off_policy.temperature.target_entropy, _decision_size(config, algorithm)
    if isinstance(wanted, str) or size is None:
        return
    if wanted >= largest_entropy(size):
        yield ConfigIssue(
            "algorithm.off_policy.temperature.target_entropy",
            f"algorithm.off_policy.temperature.target_entropy = {wanted:g} nats, which no distribution of {size} "
            f"number{'' if size == 1 else 's'} in -1 .. 1 reaches: a uniform one has {largest_entropy(size):.3g}",
            f"set it below that (auto: {usual_target_entropy(size):g})",
        )


def _shifts(config: Config, settings: CriticizedConfig) -> Iterator[ConfigIssue]:
    """Check that there are images to shift, which stay larger than the shift."""
    pixels, cameras, size = settings.augment_pixels, config.env.cameras, config.env.image_size
    if pixels and isinstance(config.algorithm, DSRLConfig):
        yield ConfigIssue(
            ("algorithm.off_policy.augment_pixels", "algorithm.name"),
            f"algorithm.off_policy.augment_pixels = {pixels} has no use: with algorithm {config.algorithm.name!r} the "
            "replay holds features in place of images",
            "set it to 0",
        )
    elif pixels and not cameras:
        yield ConfigIssue(
            ("algorithm.off_policy.augment_pixels", "env.cameras"),
            f"algorithm.off_policy.augment_pixels = {pixels} has no use: env.cameras is empty, so that the replay "
            "holds no images",
            "set it to 0, or env.cameras to cameras of the simulator",
        )
    elif pixels and 2 * pixels >= min(size):
        yield ConfigIssue(
            ("algorithm.off_policy.augment_pixels", "env.image_size"),
            f"algorithm.off_policy.augment_pixels = {pixels} shifts images of {size[0]} x {size[1]} pixels by half of "
            "their size or more",
            f"set it to {max((min(size) - 1) // 8, 1)} or so",
        )


def _decision_size(config: Config, algorithm: SACConfig) -> int | None:
    """Return the numbers of a decision; None if they are unknown before the simulator runs."""
    chunk_size = config.rollout.chunk_size
    if isinstance(algorithm, DSRLConfig):
        flow = steering_rules.flow_sizes(config)
        return None if flow is None else prod(flow.noise(algorithm.off_policy.steering, chunk_size))
    dim = action_dim(config)
    return None if dim is None else dim * chunk_size


def _room(config: Config) -> Iterator[ConfigIssue]:
    """Check that there is room for a replay that lies on the disk."""
    assert isinstance(config.algorithm, ReplayAlgorithmConfig)
    needed, memory = replay_size(config), psutil.virtual_memory().total
    if needed is None:
        return
    if needed <= config.algorithm.off_policy.replay.memory_mib * MIB:
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


def notes(config: Config) -> list[str]:
    """Return the size and the place of the replay, as far as they are known before the simulator runs, and a doubt
    about what the demonstrations show."""
    assert isinstance(config.algorithm, ReplayAlgorithmConfig)
    settings, size = config.algorithm.off_policy.replay, replay_size(config)
    doubts = task_notes(config) if demonstrated_share(config.algorithm) is not None else []
    if size is None:
        return doubts
    place = "in memory" if size <= settings.memory_mib * MIB else "on the disk, in the run's folder"
    return [f"the replay of {settings.capacity:,} chunks takes up to {size / MIB:,.1f} MiB {place}", *doubts]


def replay_size(config: Config) -> int | None:
    """Return the size of the replay [bytes]; None if that of states or actions, or of the policy that
    is steered, is unknown before the simulator runs."""
    assert isinstance(config.algorithm, ReplayAlgorithmConfig)
    state, action = state_dim(config), action_dim(config)
    if state is None or action is None:
        return None
    flow = steering_rules.flow_sizes(config)
    if isinstance(config.algorithm, DSRLConfig) and flow is None:
        return None
    fields = fields_of(config, proprio_dim=state, action_dim=action, flow=flow)
    return config.algorithm.off_policy.replay.capacity * row_bytes(fields)
