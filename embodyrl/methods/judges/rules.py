"""Rules of learning a network that judges observations, and of rewards that come from one; see `config.rules`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from embodyrl.algorithms.options import JudgedRewardConfig
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import fact, state_dim
from embodyrl.config.schema import Config, PlacementBackend
from embodyrl.data.check import check as check_demonstrations
from embodyrl.data.check import check_tasks, readable
from embodyrl.models.errors import PolicyError
from embodyrl.models.judging import CLASSIFIER, KINDS, PROGRESS, JudgeFacts, JudgeKind
from embodyrl.models.mlp.options import Distribution, HeadConfig
from embodyrl.registry import SupportedModel

PATH = "algorithm.reward.path"


def check(config: Config) -> Iterator[ConfigIssue]:
    """Check that such a network can be learned."""
    name = config.algorithm.name
    kind = next((each for each in KINDS if each.method == name), None)
    what = name if kind is None else kind.what
    yield from check_demonstrations(config)
    yield from _success_is_known(config)
    yield from check_tasks(config)
    if fact(SupportedModel, config.model.name, "off_policy") is False:
        able = [entry.name for entry in SupportedModel.entries() if entry.off_policy]
        yield ConfigIssue(
            ("model.name", "algorithm.name"),
            f"model {config.model.name!r} cannot be a {what}: that is a small network",
            f"set model to {' or '.join(able)}",
        )
    if isinstance(config.model, HeadConfig) and config.model.head is not Distribution.gaussian:
        yield ConfigIssue(
            ("model.head", "algorithm.name"),
            f"model.head = {config.model.head.value!r} is a distribution of continuous actions, and a {what} gives one "
            "answer",
            "leave it out",
        )
    if config.model.checkpoint is not None:
        yield ConfigIssue(
            ("model.checkpoint", "algorithm.name"),
            f"model.checkpoint = {config.model.checkpoint!r} holds a policy, and algorithm {name!r} learns "
            f"a {what} from the beginning",
            "set it to null",
        )
    for path, is_used in (
        ("engine.parallel.world_size", config.engine.parallel.world_size not in ("auto", 1)),
        ("placement.rollout.workers", bool(config.placement.rollout.workers)),
        ("placement.backend", config.placement.backend is not PlacementBackend.local),
    ):
        if is_used:
            yield ConfigIssue(
                (path, "algorithm.name"),
                f"{path} is set, but one process learns a {what}, in minutes",
                "leave it out",
            )


def _success_is_known(config: Config) -> Iterator[ConfigIssue]:
    spec = readable(config)
    if spec is not None and not spec.outcome:
        yield ConfigIssue(
            ("data.path", "algorithm.name"),
            f"the demonstrations in {config.data.path} do not say after which actions the task was solved "
            "(next.success)",
            "record them anew with embodyrl collect",
        )


def check_classifier_reward(config: Config) -> Iterator[ConfigIssue]:
    """Check that there is a classifier, and that it sees what it was learned from."""
    yield from _check_judge(config, CLASSIFIER)


def check_progress_reward(config: Config) -> Iterator[ConfigIssue]:
    """Check that there is a predictor of progress, that it sees what it was learned from, and that nothing is learned
    from which it has not judged."""
    yield from _check_judge(config, PROGRESS)
    if config.algorithm.needs(config).transitions:
        yield ConfigIssue(
            ("algorithm.reward.name", "algorithm.name"),
            f"algorithm.reward is 'progress', which judges rollouts, and algorithm {config.algorithm.name!r} takes "
            "decisions from demonstrations, too, which have no such reward",
            "set algorithm to one that learns from rollouts alone, such as sac or ppo",
        )


def _check_judge(config: Config, kind: JudgeKind) -> Iterator[ConfigIssue]:
    """Check that there is a network of a kind, and that it sees what it was learned from."""
    settings = config.algorithm.parts()["reward"]
    assert isinstance(settings, JudgedRewardConfig), "their registrations say so"
    if settings.path is None:
        yield ConfigIssue(
            (PATH, "algorithm.reward.name"),
            f"algorithm.reward is {settings.name!r}, but algorithm.reward.path is null",
            f"set it to a run of algorithm {kind.method!r}, such as embodyrl run {kind.method} makes",
        )
        return
    try:
        facts = JudgeFacts.read(kind.find(Path(settings.path)), kind)
    except PolicyError as error:
        yield ConfigIssue(PATH, error.message, error.remedy)
        return
    env, seen, it = config.env, facts.seen, f"the {kind.what} in {settings.path}"
    size = tuple(env.image_size) if env.cameras else (0, 0)
    differing = {
        "env.cameras": (list(seen.cameras), list(env.cameras)),
        "env.image_size": (list(seen.image_size), list(size)),
        "env.frames": (seen.frames, env.frames),
    }
    for name, (wanted, found) in differing.items():
        if wanted != found:
            yield ConfigIssue(
                (name, PATH),
                f"{name} is {found}, and {it} was learned with {wanted}",
                f"set {name} to {wanted}, or learn one with this section env",
            )
    dim = state_dim(config)
    if dim is not None and dim != seen.state_dim:
        yield ConfigIssue(
            (PATH, "env.name"),
            f"states of the simulator have {dim} numbers, and {it} was learned from {seen.state_dim}",
            "learn one with this section env",
        )
    if others := [task for task in env.tasks if task not in facts.tasks]:
        yield ConfigIssue(
            ("env.tasks", PATH),
            f"{it} was learned from {', '.join(facts.tasks)}, not from {', '.join(others)}: it does not know what "
            "solves that",
            "learn one with these env.tasks",
        )
