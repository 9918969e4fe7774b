"""Checks that demonstrations can be learned from: against the config before anything starts, and against the simulator
and the policy once they exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config
from embodyrl.data.layout import DatasetError, DatasetSpec, Info
from embodyrl.envs import SimulatorSpec
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
