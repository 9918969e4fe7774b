"""Checks of demonstrations against the config, before anything starts. Once there are a simulator and a policy, their
sizes are compared, too (`EpisodeStore.require_fit`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from embodyrl.config.infos import repeated_for, simulator_info
from embodyrl.config.issues import ConfigIssue, MissingDependency
from embodyrl.config.rules import (
    action_dim,
    described_tasks,
    fact,
    is_supervised,
    known_tasks,
    replay_of,
    state_dim,
    task_descriptions,
)
from embodyrl.config.schema import Config
from embodyrl.data.files import read_json, regular_file, shown
from embodyrl.data.info import Info, check_statistics
from embodyrl.data.layout import EXECUTED, PERTURB, REWARD, SUCCESS, TASKS, DatasetError, DatasetSpec, size_text
from embodyrl.errors import MissingPackageError, did_you_mean, listed
from embodyrl.hub import is_hub_name
from embodyrl.registry import SIMULATORS, SupportedModel

MOST_SHOWN = 200
"""Most characters of what a dataset says of its perturbations, in a message."""
OF_CRITICS = (REWARD, EXECUTED)
"""Columns that only decisions beside a replay have a use for."""


def check(config: Config) -> Iterator[ConfigIssue]:
    """Yield what is wrong with the demonstrations, and why they are not those of the config. Reads all of them,
    but many images only in part."""
    path = config.data.path
    if path is None or is_hub_name(path):
        return  # a rule reports the first; the second is not here yet
    yield from _unused_names(config)
    try:
        info = _info(config)
        fitting = list(_misfits(config, info))
        yield from fitting
        yield from _misperturbed(config)
        wrong = {} if fitting else _not_finite(config)
    except DatasetError as error:
        kind = ConfigIssue if Path(path).exists() else MissingDependency
        yield kind("data.path", error.message, error.remedy)
        return
    for column, episodes in wrong.items():
        if column in OF_CRITICS and replay_of(config) is None:
            continue
        yield ConfigIssue(
            "data.path",
            f"column {column!r} of the demonstrations in {path} holds numbers that are not finite, in episode "
            f"{', '.join(map(str, episodes[:5]))}{' and others' if len(episodes) > 5 else ''}",
            "record them anew, or remove these episodes",
        )


def _info(config: Config) -> Info:
    """Read what the demonstrations of a config are, with the cameras of `env.cameras`."""
    return Info.read(Path(str(config.data.path)), config.data.features, config.env.cameras)


def _unused_names(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each feature that is named for a camera which is not read."""
    for camera in config.data.features.images:
        if camera not in config.env.cameras:
            known = config.env.cameras
            yield ConfigIssue(
                f"data.features.images.{camera}",
                f"env.cameras has no camera {camera!r}",
                did_you_mean(camera, known, otherwise=f"name one of {', '.join(known)}" if known else "leave it out"),
            )


def _misfits(config: Config, info: Info) -> Iterator[ConfigIssue]:
    """Yield the cameras that the demonstrations lack, and sizes of images that differ."""
    env, path, spec = config.env, config.data.path, info.spec
    for index, camera in enumerate(env.cameras):
        if camera not in spec.cameras:
            named = f"name one of {', '.join(info.cameras)}" if info.cameras else "record them with this env.cameras"
            yield ConfigIssue(
                f"env.cameras.{index}",
                f"the demonstrations in {path} have no images of camera {camera!r}",
                f"{named}, or set data.features.images.{camera} to the feature with its images",
            )
    if spec.cameras and list(spec.image_size) != env.image_size:
        yield ConfigIssue(
            "env.image_size",
            f"images of the demonstrations in {path} have {size_text(spec.image_size)} pixels, those of the simulator "
            f"{size_text(env.image_size)}",
            f"set env.image_size to {list(spec.image_size)}, or record them with this env.image_size",
        )


def _misperturbed(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue if `env.perturb` names what the demonstrations were not recorded with, in a run without other
    episodes that it could perturb."""
    wanted, path = config.env.perturb, Path(str(config.data.path))
    if wanted is None or not is_supervised(config):
        return
    recorded = read_json(path, PERTURB) if (path / PERTURB).exists() else None
    if recorded != wanted.drawn_from:
        how = "" if recorded is None else ", ".join(f"{kind}: {shown(each)}" for kind, each in recorded.items())
        had = "without perturbations" if recorded is None else f"with env.perturb={{{how[:MOST_SHOWN]}}}"
        yield ConfigIssue(
            ("env.perturb", "data.path"),
            f"env.perturb does nothing: algorithm {config.algorithm.name!r} plays no training episodes, and the "
            f"demonstrations in {path} were recorded {had}",
            "leave it out, or record demonstrations with it (eval.perturb perturbs evaluations)",
        )


def check_to_imitate(config: Config) -> Iterator[ConfigIssue]:
    """Yield what is wrong with demonstrations that a policy imitates: see `check`, and the sizes of what it reads and
    gives."""
    yield from check(config)
    spec, model = readable(config), config.model
    if spec is None:
        return
    reads_state = fact(SupportedModel, model.name, "images") is False or getattr(model, "state", None) is True
    yield from _sizes(config, spec, ("actions", "states") if reads_state else ("actions",))


def readable(config: Config) -> DatasetSpec | None:
    """Return what the demonstrations are; None if they are not here or cannot be read, which `check` reports."""
    path = config.data.path
    if path is None or is_hub_name(path):
        return None
    try:
        return _info(config).spec
    except DatasetError:
        return None


def _sizes(config: Config, spec: DatasetSpec, kinds: Sequence[str]) -> Iterator[ConfigIssue]:
    """Yield an issue for `actions` and `states` of demonstrations with other sizes than the simulator's."""
    sizes = {"actions": (spec.action_dim, action_dim(config)), "states": (spec.state_dim, state_dim(config))}
    for what in kinds:
        found, wanted = sizes[what]
        if wanted is not None and found != wanted:
            yield ConfigIssue(
                ("data.path", "env.name"),
                f"{what} of the demonstrations in {config.data.path} have {found} numbers, those of the simulator "
                f"{wanted}",
                "record them with this section env",
            )


def check_for_critics(config: Config) -> Iterator[ConfigIssue]:
    """Yield why demonstrations cannot be learned from beside a replay: they have to be of the very task that is rolled
    out."""
    path, spec = config.data.path, readable(config)
    if spec is None:
        return
    if not spec.outcome and config.algorithm.needs(config).outcomes:
        yield ConfigIssue(
            ("data.path", "algorithm.name"),
            f"the demonstrations in {path} do not hold both rewards and successes ({REWARD}, {SUCCESS}): algorithm "
            f"{config.algorithm.name!r} has to know what a decision was worth and where an episode ended",
            "record them anew with embodyrl collect, or set algorithm to sft",
        )
    yield from check_tasks(config)
    yield from _sizes(config, spec, ("actions", "states"))
    frequency = simulator_info(config.env.name).control_frequency(config.env)
    if frequency is not None and max(1, round(spec.fps)) != max(1, round(frequency)):
        fitting = repeated_for(config.env, spec.fps, frequency)
        yield ConfigIssue(
            ("data.path", "env.action_repeat" if hasattr(config.env, "action_repeat") else "env.name"),
            f"the demonstrations in {path} have {spec.fps:g} actions per second, the simulator {frequency:g}: an "
            "action of theirs does something else",
            ("" if fitting is None else f"set env.action_repeat to {fitting}, or ")
            + "record them with this section env",
        )


def check_tasks(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue if all demonstrations are of other tasks than those of the config. That is certain where each of
    their task descriptions is that of another task of the simulator that they come from."""
    shown = _shown_elsewhere(config)
    if shown is None or None in shown.tasks.values():
        return  # see `task_notes`
    tasks, here = sorted({str(task) for task in shown.tasks.values()}), listed(config.env.tasks)
    whose = "" if shown.simulator == config.env.name else f" of simulator {shown.simulator!r}"
    yield ConfigIssue(
        ("data.path", "env.tasks"),
        f"the demonstrations in {config.data.path} are of {listed(tasks)}{whose}, and env.tasks is {here}",
        f"set env.tasks to [{', '.join(tasks)}]{whose}, or record demonstrations of {here}",
    )


def task_notes(config: Config) -> list[str]:
    """Return a note if no task description of the demonstrations is known, though those of the simulator are."""
    shown, described = _shown_elsewhere(config), task_descriptions(config)
    if shown is None or None not in shown.tasks.values() or len(described) < len(config.env.tasks):
        return []
    return [
        f"the demonstrations in {config.data.path} are described as {listed(shown.tasks)}, and env.tasks as "
        f"{listed(dict.fromkeys(described.values()))}: make sure that they show these tasks"
    ]


class _Shown(NamedTuple):
    """What demonstrations show that is none of the config's tasks."""

    simulator: str
    """The one that they come from."""
    tasks: dict[str, str | None]
    """Its tasks by task description; None: it has none that is described so."""


def _shown_elsewhere(config: Config) -> _Shown | None:
    """Return what the demonstrations show; None if that is a task of the config, or unknown."""
    path, env = config.data.path, config.env
    known = known_tasks(env.name)
    if path is None or is_hub_name(path) or not env.tasks or (known is not None and not {*env.tasks} <= {*known}):
        return None  # which other rules report
    try:
        from embodyrl.data.storage import read_tasks

        info = _info(config)
        robot, shown = info.spec.robot, read_tasks(regular_file(Path(path), TASKS), info.tasks)
    except (MissingPackageError, DatasetError):
        return None  # which is reported with the algorithm, or by `check`
    # By name, as the simulator describes them, or as the config does instead.
    if {*shown} & {*env.tasks, *described_tasks(env.name, env.tasks).values(), *task_descriptions(config).values()}:
        return None
    simulator = robot if robot is not None and robot in SIMULATORS else env.name
    tasks = {description: task for task, description in described_tasks(simulator).items()}
    return _Shown(simulator, {description: tasks.get(description) for description in shown})


def _not_finite(config: Config) -> dict[str, list[int]]:
    """Return the episodes with numbers that are not finite, by column; raises `DatasetError` if a file is missing or
    damaged. Of images, see `Dataset.check_images`."""
    try:
        from embodyrl.data.store import EpisodeStore
    except MissingPackageError:
        return {}  # which is reported with the algorithm
    check_statistics(Path(str(config.data.path)))
    store = EpisodeStore.open(config)
    store.require_each()
    store.dataset.check_images()
    return store.dataset.not_finite()
