"""Checks that demonstrations can be learned from: against the config before anything starts, and against the simulator
and the policy once they exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import action_dim, control_frequency, state_dim
from embodyrl.config.schema import Config
from embodyrl.data.layout import DatasetError, DatasetSpec, Info
from embodyrl.envs import SimulatorSpec
from embodyrl.errors import MissingPackageError
from embodyrl.hub import is_hub_name


def check(config: Config) -> Iterator[ConfigIssue]:
    """Yield what is wrong with the config. Reads `meta/info.json`, but no table."""
    env, path = config.env, config.data.path
    if path is None or is_hub_name(path):
        return  # a rule reports the first; the second is not here yet
    try:
        spec = Info.read(Path(path)).spec
    except DatasetError as error:
        message, _, remedy = str(error).partition(": ")
        yield ConfigIssue("data.path", message, remedy)
        return
    for index, camera in enumerate(env.cameras):
        if camera not in spec.cameras:
            yield ConfigIssue(
                f"env.cameras.{index}",
                f"the demonstrations in {path} have no images of camera {camera!r}",
                f"name one of {', '.join(spec.cameras)}" if spec.cameras else "record them with this env.cameras",
            )
    if env.cameras and spec.cameras and list(spec.image_size) != env.image_size:
        yield ConfigIssue(
            "env.image_size",
            f"images of the demonstrations in {path} have {_by(spec.image_size)} pixels, those of the simulator "
            f"{_by(env.image_size)}",
            f"set env.image_size to {list(spec.image_size)}, or record them with this env.image_size",
        )


def check_for_critics(config: Config) -> Iterator[ConfigIssue]:
    """Yield why critics cannot learn from the demonstrations, which have to be of the very task that is rolled out.
    Reads their rewards, but no other column."""
    path = config.data.path
    if path is None or is_hub_name(path):
        return  # see `check`
    try:
        spec = Info.read(Path(path)).spec
    except DatasetError:
        return  # which `check` reports
    if not spec.outcome:
        yield ConfigIssue(
            ("data.path", "algorithm.name"),
            f"the demonstrations in {path} hold neither rewards nor successes, which the critics of algorithm "
            f"{config.algorithm.name!r} learn from",
            "record them anew with embodyrl collect, or set algorithm to sft",
        )
    sizes = {"actions": (spec.action_dim, action_dim(config)), "states": (spec.state_dim, state_dim(config))}
    for what, (found, wanted) in sizes.items():
        if wanted is not None and found != wanted:
            yield ConfigIssue(
                ("data.path", "env.name"),
                f"{what} of the demonstrations in {path} have {found} numbers, those of the simulator {wanted}",
                "record them with this section env",
            )
    frequency = control_frequency(config)
    if frequency is not None and spec.fps != max(1, round(frequency)):
        yield ConfigIssue(
            ("data.path", "env.action_repeat" if hasattr(config.env, "action_repeat") else "env.name"),
            f"the demonstrations in {path} have {spec.fps} actions per second, the simulator {frequency:g}: an action "
            "of theirs does something else",
            "record them with this section env",
        )
    if spec.outcome:
        yield from _rewards(Path(path))


def _rewards(path: Path) -> Iterator[ConfigIssue]:
    """Check that all rewards are numbers."""
    try:
        from embodyrl.data.reader import Dataset
    except MissingPackageError:
        return  # which is reported with the algorithm
    try:
        wrong = Dataset(path).episodes_with_bad_rewards()
    except DatasetError as error:
        message, _, remedy = str(error).partition(": ")
        yield ConfigIssue("data.path", message, remedy)
        return
    if wrong:
        yield ConfigIssue(
            "data.path",
            f"the demonstrations in {path} hold rewards that are no finite numbers, in episode "
            f"{', '.join(map(str, wrong[:5]))}{' and others' if len(wrong) > 5 else ''}",
            "record them anew, or remove these episodes",
        )


def _by(size: tuple[int, int] | list[int]) -> str:
    return "x".join(map(str, size))


def check_fit(path: Path, spec: DatasetSpec, simulator: SimulatorSpec, proprio_dim: int) -> None:
    """Raise `DatasetError` if demonstrations differ from the simulator in their numbers.

    Args:
        path: the folder of the demonstrations.
        spec: their shapes and names.
        simulator: the simulator's spec.
        proprio_dim: numbers in the state observation that the policy expects; 0: it reads none.
    """
    if spec.action_dim != simulator.action_dim:
        raise DatasetError(
            f"actions of the demonstrations in {path} have {spec.action_dim} numbers ({', '.join(spec.action_names)}), "
            f"the simulator takes {simulator.action_dim}: record them with this simulator and its options"
        )
    if proprio_dim and spec.state_dim != proprio_dim:
        raise DatasetError(
            f"states of the demonstrations in {path} have {spec.state_dim} numbers, the policy expects {proprio_dim}: "
            f"record them with the env.proprio of this config"
        )
