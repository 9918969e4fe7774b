"""The simulator's cameras that show the images of a checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config
from embodyrl.errors import did_you_mean
from embodyrl.models.errors import PolicyError
from embodyrl.screen import counted

ABSENT = "absent"


@dataclass(frozen=True)
class Cameras:
    """The simulator's cameras that a model reads."""

    used: tuple[str, ...]
    """All of the simulator's."""
    order: tuple[int, ...]
    """Their indices, in the model's order."""


def choose_cameras(wanted: Sequence[str], there: Sequence[str] | None, images: Sequence[str]) -> Cameras:
    """Match a checkpoint's images with a simulator's cameras.

    Absent images are left out: public code passes black ones, which it then masks everywhere.

    Args:
        wanted: `model.cameras`.
        there: the simulator's cameras; None: those of `wanted`.
        images: names of the checkpoint's images.

    Raises:
        PolicyError: the checkpoint expects an image that no camera is named for, or whose camera does not exist.
    """
    cameras = tuple(there) if there is not None else tuple(name for name in wanted or images if name != ABSENT)
    names = tuple(wanted) or cameras
    if len(names) != len(images):
        raise PolicyError(
            f"the checkpoint expects {counted(len(images), 'image')} ({', '.join(images)}), named: {len(names)} "
            f"({', '.join(names) or 'none'}): set model.cameras to a camera, or `{ABSENT}`, for each"
        )
    check_names(names, cameras)
    shown = [name for name in names if name != ABSENT]
    unseen = [name for name in cameras if name not in shown]
    if unseen or not shown:
        raise PolicyError(
            f"the model does not use {', '.join(unseen)}: remove it from env.cameras, or name it in model.cameras"
            if unseen
            else "the model needs images: set env.cameras"
        )
    return Cameras(cameras, tuple(cameras.index(name) for name in shown))


def check_names(names: Sequence[str], cameras: Sequence[str]) -> None:
    """Raise a `PolicyError` if a name is neither a camera nor `ABSENT`."""
    for name in names:
        if name != ABSENT and name not in cameras:
            hint = did_you_mean(name, list(cameras), lead=" - ")
            raise PolicyError(f"env.cameras has no {name!r}{hint} (has: {', '.join(cameras) or 'none'})")


# --------------------------------------------------------------------------------------------------------------- checks


def check_there(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue if a model that needs images gets none."""
    if not config.env.cameras:
        yield ConfigIssue(
            "env.cameras", f"model {config.model.name!r} needs images, and env.cameras is empty", "name a camera"
        )


def check_images_shown(chosen: Sequence[str], config: Config, images: Sequence[str]) -> Iterator[ConfigIssue]:
    """Yield an issue if `chosen`, the `model.cameras` of a model with a checkpoint, do not show its `images`."""
    try:
        choose_cameras(chosen, config.env.cameras, images)
    except PolicyError as error:
        yield ConfigIssue("model.cameras", str(error))


def check_chosen(chosen: Sequence[str], config: Config) -> Iterator[ConfigIssue]:
    """Yield issues if `chosen`, the `model.cameras` of a model that can do without an image, do not exist or leave
    none."""
    yield from _check_names(chosen, config)
    if chosen and set(chosen) == {ABSENT}:
        yield ConfigIssue("model.cameras", "model.cameras leaves no image", "name a camera of env.cameras")


def check_each_once(chosen: Sequence[str], config: Config) -> Iterator[ConfigIssue]:
    """Yield issues if `chosen`, the `model.cameras` of a model that needs all of its images, do not exist or name one
    twice."""
    yield from _check_names(chosen, config)
    if len(set(chosen)) != len(chosen) or ABSENT in chosen:
        yield ConfigIssue(
            "model.cameras", "model.cameras must name each camera once", f"remove {ABSENT} and what is there twice"
        )


def _check_names(chosen: Sequence[str], config: Config) -> Iterator[ConfigIssue]:
    try:
        check_names(chosen, config.env.cameras)
    except PolicyError as error:
        yield ConfigIssue("model.cameras", str(error))
