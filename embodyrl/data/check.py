"""Whether the demonstrations that a config names can be learned from: before anything starts, from `meta/info.json`;
and once the simulator and the policy are there, from what they say about themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from embodyrl.config.schema import Config
from embodyrl.data.layout import DatasetError, DatasetSpec, Info
from embodyrl.envs import SimulatorSpec


def check(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield what is wrong, as (path of the setting, message, remedy). Reads no table."""
    env, path = config.env, config.data.path
    if path is None:
        return  # which a rule reports
    try:
        spec = Info.read(Path(path)).spec
    except DatasetError as error:
        message, _, remedy = str(error).partition(": ")
        yield "data.path", message, remedy
        return
    for index, camera in enumerate(env.cameras):
        if camera not in spec.cameras:
            yield (
                f"env.cameras.{index}",
                f"the demonstrations in {path} have no images of camera {camera!r}",
                f"name one of {', '.join(spec.cameras)}" if spec.cameras else "record them with this env.cameras",
            )
    if env.cameras and spec.cameras and list(spec.image_size) != env.image_size:
        yield (
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
        path: of the demonstrations.
        spec: what they hold.
        simulator: what it offers.
        proprio_dim: numbers in the state observation that the policy expects; 0: it looks at none.
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
