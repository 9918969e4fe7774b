"""Rules about perturbations of episodes, `env.perturb` and `eval.perturb`; see `rules`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from embodyrl.config.infos import simulator_info
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import PARAPHRASES, fact, simulator_rule, task_descriptions
from embodyrl.config.schema import KINDS, MOST_LEVEL, Config, EnvConfig, PerturbationLevels, TrainingPerturbations
from embodyrl.config.values import show
from embodyrl.errors import did_you_mean
from embodyrl.registry import SupportedModel, load_target


def perturbations(config: Config, *, known: bool = True) -> list[str]:
    """Return the kinds of perturbation that a config's simulator can do, and that its model and tasks can show.

    Args:
        config: the config.
        known: whether paraphrases are left out if only the running simulator knows its task descriptions.
    """
    able = simulator_info(config.env.name, installed=True).perturbations(config.env)
    are_known = set(task_descriptions(config)) >= set(config.env.tasks)
    reads = fact(SupportedModel, config.model.name, "words")
    has_words = reads and (are_known or not known) and not list(_without_paraphrases(config))
    return [kind for kind in KINDS if kind in able and (kind != "words" or has_words)]


def _of(config: Config) -> Iterator[tuple[str, PerturbationLevels]]:
    """Yield the sections with perturbations that there are, and their names."""
    for name, found in (("env.perturb", config.env.perturb), ("eval.perturb", config.eval.perturb)):
        if found is not None:
            yield name, found


@simulator_rule
def levels_are_ranges(config: Config) -> Iterator[ConfigIssue]:
    """Check that perturbations name kinds, and a level or a range of levels for each."""
    for section, settings in _of(config):
        if not settings.named:
            message = f"{section} names no kind of perturbation"
            yield ConfigIssue(section, message, f"add one, as in `noise: 2` ({', '.join(KINDS)})")
        for kind, levels in settings.named.items():
            if len(levels) > 2 or levels[0] > levels[-1]:
                yield ConfigIssue(
                    f"{section}.{kind}",
                    f"{section}.{kind} = {show(levels)} is neither a level nor a range of levels",
                    f"write one level, or the lowest and the highest, as in [{min(levels)}, {max(levels)}]",
                )
        if isinstance(settings, TrainingPerturbations):
            yield from _growing(section, settings)


def _growing(section: str, settings: TrainingPerturbations) -> Iterator[ConfigIssue]:
    """Yield an issue if levels are to grow that cannot."""
    highest = max((max(pair) for pair in settings.ranges.values()), default=MOST_LEVEL)
    if settings.ramp and highest == 1:
        yield ConfigIssue(
            f"{section}.ramp",
            f"{section}.ramp = {settings.ramp} does nothing: levels grow from 1, and none is higher",
            "name a higher level, or leave it out",
        )


@simulator_rule
def perturbations_are_possible(config: Config) -> Iterator[ConfigIssue]:
    """Check that the simulator can do the perturbations."""
    info: Any = simulator_info(config.env.name, installed=True)
    able = info.perturbations(config.env)
    for section, settings in _of(config):
        for kind in (kind for kind in settings.ranges if kind not in able):
            where, cameras = (f"{section}.{kind}", "env.cameras"), config.env.cameras
            possible = f"leave it out (possible: {', '.join(perturbations(config)) or 'nothing'})"
            if kind not in info.perturbations(replace(config.env, cameras=["any"])):
                message = f"{section}.{kind}: simulator {config.env.name!r} cannot do this"
                if name := _in_the_way(config.env, kind):
                    message += f" with env.{name} = {show(getattr(config.env, name))}"
                    possible = f"leave one of them out (possible: {', '.join(perturbations(config)) or 'nothing'})"
                yield ConfigIssue(where, message, possible)
            elif not cameras:
                known = info.cameras() or ["render"]
                message = f"{section}.{kind} changes images, but env.cameras is empty"
                yield ConfigIssue(where, message, f"name a camera, as in env.cameras: [{known[0]}], or leave it out")
            else:
                message = f"{section}.{kind} changes a scene, and env.cameras = {show(cameras)} shows no camera of one"
                yield ConfigIssue(where, message, f"name one of its scene, or {possible}")


def _in_the_way(env: EnvConfig, kind: str) -> str | None:
    """Return the setting of a simulator's own without which it could do a kind of perturbation."""
    info: Any = simulator_info(env.name, installed=True)
    shown = replace(env, cameras=["any"])
    shared = {each.name for each in fields(EnvConfig)}
    own = (each for each in fields(env) if each.name not in shared and each.default is not MISSING)
    changed = (each for each in own if getattr(env, each.name) != each.default)
    for each in changed:
        default: Any = {each.name: each.default}
        if kind in info.perturbations(replace(shown, **default)):
            return each.name
    return None


@simulator_rule
def paraphrases_are_known(config: Config) -> Iterator[ConfigIssue]:
    """Check that task descriptions are read, and that there are paraphrases of them."""
    model = config.model.name
    for section, settings in _of(config):
        if not settings.words:
            continue
        if fact(SupportedModel, model, "words") is False:
            yield ConfigIssue(
                (f"{section}.words", "model.name"),
                f"{section}.words does nothing: model {model!r} reads no task description",
                "leave it out",
            )
        for task, description in _without_paraphrases(config):
            verbs: list[str] = _words("known_verbs")()
            near = did_you_mean(description.split()[0] if description.split() else "", verbs, lead=" - ")
            yield ConfigIssue(
                f"{section}.words",
                f"{section}.words: there are no paraphrases of {description!r}, the task description of {task!r}{near}",
                "leave it out, or set env.task_descriptions to one that begins with a verb such as "
                f"{', '.join(verbs[:4])}",
            )


def _without_paraphrases(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the tasks of whose task descriptions there are no paraphrases."""
    has: Callable[[str], bool] = _words("has_paraphrases")
    for task, description in task_descriptions(config).items():
        if task in config.env.tasks and not has(description):
            yield task, description


def _words(name: str) -> Any:
    return load_target(f"{PARAPHRASES}:{name}")
