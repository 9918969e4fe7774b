"""Rules of an expert beside the policy (`algorithm.off_policy.intervene`), and of imitating it; see `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.algorithms.off_policy_options import (
    CorrectedConfig,
    DAggerConfig,
    DSRLConfig,
    InterveneConfig,
    Labelled,
    ReplayAlgorithmConfig,
    RLPDConfig,
)
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import MOST_EPISODE_STEPS, AlgorithmConfig, Config
from embodyrl.registry import EXPERTS, SIMULATORS

HERE = "algorithm.off_policy.intervene"


def check(config: Config) -> Iterator[ConfigIssue]:
    """Check the expert beside the policy, and what is imitated."""
    assert isinstance(config.algorithm, ReplayAlgorithmConfig)
    settings = config.algorithm.off_policy
    intervene = settings.intervene if isinstance(settings, CorrectedConfig) else None
    if isinstance(config.algorithm, DAggerConfig):
        yield from _imitated(config, config.algorithm)
    if intervene is not None and isinstance(config.algorithm, DSRLConfig):
        yield ConfigIssue(
            (HERE, "algorithm.name"),
            f"{HERE} has no use: algorithm {config.algorithm.name!r} learns which noise to choose, and an expert "
            "chooses actions",
            "set it to null",
        )
    elif intervene is not None:
        yield from _expert(config, intervene)
        yield from _moments(config, intervene)
        yield from _labels(config, intervene)


def _imitated(config: Config, algorithm: DAggerConfig) -> Iterator[ConfigIssue]:
    """Check that there is something to imitate, and nothing is set for demonstrations that are not there."""
    settings, path = algorithm.off_policy, config.data.path
    if settings.intervene is None:
        yield ConfigIssue(
            (HERE, "algorithm.name"),
            f"algorithm {algorithm.name!r} imitates an expert beside the policy, but {HERE} is null",
            f"give it {HERE}.labels, or set algorithm to sft, which learns from demonstrations alone",
        )
    if path is None and settings.imitation.first_steps:
        yield ConfigIssue(
            ("data.path", "algorithm.off_policy.imitation.first_steps", "algorithm.name"),
            f"algorithm.off_policy.imitation.first_steps = {settings.imitation.first_steps} steps imitate "
            "demonstrations, but data.path is null",
            "name the folder of a LeRobotDataset v3 (`embodyrl collect CONFIG --out DIR --episodes N` records one), or "
            "set algorithm.off_policy.imitation.first_steps to 0",
        )
    share = settings.demonstrations
    if path is None and not isinstance(share, str):
        yield ConfigIssue(
            ("algorithm.off_policy.demonstrations", "data.path"),
            f"algorithm.off_policy.demonstrations = {share:g} has no use: data.path is null",
            "leave it out, or name demonstrations",
        )


def _expert(config: Config, settings: InterveneConfig) -> Iterator[ConfigIssue]:
    """Check that there is an expert for the simulator."""
    simulator, name = config.env.name, settings.expert
    if simulator not in SIMULATORS or (name is not None and name not in EXPERTS):
        return  # which has been reported
    known = ", ".join(EXPERTS.names())
    if name is None and simulator not in EXPERTS:
        yield ConfigIssue(
            ("env.name", HERE),
            f"simulator {simulator!r} has no scripted expert, who acts beside the policy (those that have one: "
            f"{known})",
            f"choose another simulator, register an expert (docs/data.md), or set {HERE} to null with an algorithm "
            "that needs none",
        )
    if name is not None and name != simulator and name in SIMULATORS:
        yield ConfigIssue(
            (f"{HERE}.expert", "env.name"),
            f"{HERE}.expert = {name!r} is the expert of another simulator than {simulator!r}",
            f"leave it out: the simulator's own is the default (experts: {known})",
        )


def _moments(config: Config, settings: InterveneConfig) -> Iterator[ConfigIssue]:
    """Check that the expert has its turn, and acts where it sees what it reacts to."""
    chunk, longest = config.rollout.chunk_size, config.env.known_time_limit
    if chunk > 1:
        yield ConfigIssue(
            ("rollout.chunk_size", HERE),
            f"rollout.chunk_size = {chunk}, but an expert reacts to every observation, and there is none within a "
            "chunk",
            "set rollout.chunk_size to 1",
            fix={"rollout.chunk_size": 1},
        )
    if longest == MOST_EPISODE_STEPS:
        yield ConfigIssue(
            (HERE, "env.max_episode_steps"),
            f"{HERE} decides of every control step beforehand who acts, but episodes have no time limit "
            f"(env.max_episode_steps = {config.env.max_episode_steps or 'null'})",
            "set env.max_episode_steps to a number",
        )
    elif settings.after is not None and longest is not None and settings.after >= longest:
        yield ConfigIssue(
            (f"{HERE}.after", "env.max_episode_steps"),
            f"{HERE}.after = {settings.after} control steps, but episodes end after env.max_episode_steps = {longest}",
            f"set {HERE}.after to less than {longest}",
        )
    if settings.after is None and settings.share == 0.0 and settings.labels is Labelled.executed:
        label = f", or {HERE}.labels to every" if _imitates(config.algorithm) else ""
        yield ConfigIssue(
            HERE,
            f"the expert of {HERE} has nothing to do: it takes over no decision and labels none",
            f"set {HERE}.after or {HERE}.share{label}",
        )


def _labels(config: Config, settings: InterveneConfig) -> Iterator[ConfigIssue]:
    """Check that labels of decisions that the expert does not execute are imitated."""
    algorithm = config.algorithm
    if settings.labels is Labelled.every and not _imitates(algorithm):
        yield ConfigIssue(
            (f"{HERE}.labels", "algorithm.name"),
            f"{HERE}.labels = 'every' has no use: algorithm {algorithm.name!r} imitates nothing, it learns from what "
            "was executed",
            f"set {HERE}.labels to executed, or algorithm to dagger or rlpd (algorithm.off_policy.imitation.coef)",
        )


def _imitates(algorithm: AlgorithmConfig) -> bool:
    """Return whether an algorithm imitates what an expert says, whoever acts."""
    imitates = isinstance(algorithm, RLPDConfig) and algorithm.off_policy.imitation.coef > 0.0
    return imitates or isinstance(algorithm, DAggerConfig)
