"""Rules of an expert beside the policy (`algorithm.off_policy.intervene`); see `config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.config.infos import MOST_EPISODE_STEPS
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Needs
from embodyrl.config.replay import InterveneConfig, Labelled
from embodyrl.config.rules import needs_of_all
from embodyrl.config.schema import Config
from embodyrl.registry import EXPERTS, SIMULATORS

HERE = "algorithm.off_policy.intervene"


def check(config: Config, settings: InterveneConfig, needs: Needs) -> Iterator[ConfigIssue]:
    """Check the settings of interventions by an expert."""
    if needs.steering is not None:
        yield ConfigIssue(
            (HERE, "algorithm.name"),
            f"{HERE} is set, but algorithm {config.algorithm.name!r} learns which noise to choose, and an expert "
            "chooses actions",
            "set it to null",
        )
        return
    yield from _expert(config, settings)
    yield from _moments(config, settings, needs)
    yield from _labels(config, settings, needs)


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
    elif (name or simulator) in EXPERTS:
        refusal = EXPERTS.entry(name or simulator).cannot_play(config.env.tasks)
        if refusal is not None:
            yield ConfigIssue(("env.tasks", HERE), refusal, f"choose such tasks, or set {HERE} to null")


def _moments(config: Config, settings: InterveneConfig, needs: Needs) -> Iterator[ConfigIssue]:
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
        label = f", or {HERE}.labels to every" if needs.imitates_labels else ""
        yield ConfigIssue(
            HERE,
            f"the expert of {HERE} has nothing to do: it takes over no decision and labels none",
            f"set {HERE}.after or {HERE}.share{label}",
        )


def _labels(config: Config, settings: InterveneConfig, needs: Needs) -> Iterator[ConfigIssue]:
    """Check that labels of decisions that the expert does not execute are imitated."""
    if settings.labels is Labelled.every and not needs.imitates_labels:
        able = [name for name, each in needs_of_all(config).items() if each.imitates_labels]
        yield ConfigIssue(
            (f"{HERE}.labels", "algorithm.name"),
            f"{HERE}.labels = 'every', but algorithm {config.algorithm.name!r} imitates nothing: it learns from what "
            "was executed",
            f"set {HERE}.labels to executed, or algorithm to {' or '.join(able)} (algorithm.off_policy.imitation.coef)",
        )
