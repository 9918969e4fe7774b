"""Checks that a model, its files, its robot and the simulator fit. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, TypeVar

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import action_dim, state_dim
from embodyrl.config.schema import Config
from embodyrl.envs import SimulatorSpec
from embodyrl.errors import MissingPackageError
from embodyrl.models.errors import PolicyError
from embodyrl.models.lerobot import Robot

Found = TypeVar("Found")


def attempt(setting: str, make: Callable[[], Found]) -> Generator[ConfigIssue, None, Found | None]:
    """Return what a call returns; None if it raises a `PolicyError` or lacks a package, which is yielded as the fault
    of a setting."""
    try:
        return make()
    except PolicyError as error:
        yield error.issue(setting)
    except MissingPackageError as error:
        yield ConfigIssue(setting, f"{setting}: {error}")
    return None


def file_setting(error: PolicyError) -> str:
    """Return the setting that names the file of an error: the one that its message begins with, else the checkpoint."""
    first = error.message.partition(" ")[0]
    return first if first.startswith("model.") else "model.checkpoint"


class SimulatorSizes(NamedTuple):
    """Numbers of a simulator's states and actions; None: not known yet."""

    proprio: int | None = None
    action: int | None = None

    @classmethod
    def of(cls, simulator: SimulatorSpec | None) -> SimulatorSizes:
        """Return those of a simulator, if there is one."""
        return cls() if simulator is None else cls(simulator.proprio_dim, simulator.action_dim)

    @classmethod
    def of_config(cls, config: Config) -> SimulatorSizes:
        """Return those of the simulator that a config names."""
        return cls(state_dim(config), action_dim(config))


# ----------------------------------------------------------------------------------------------- without a checkpoint


def check_without_checkpoint(model: Any, *names: str) -> Iterator[ConfigIssue]:
    """Yield an issue for each option that belongs to a checkpoint, for models without one."""
    for name in names:
        if getattr(model, name) is not None:
            yield ConfigIssue(
                f"model.{name}",
                f"model.{name} is set, but model.checkpoint is null",
                "name the weights it belongs to",
            )


def check_patches(image_size: int, patch_size: int, *, joined: int = 1) -> Iterator[ConfigIssue]:
    """Yield an issue if the images of a new model cannot be cut into patches.

    Args:
        image_size, patch_size: sides [pixels].
        joined: patches on a side of the square that becomes one token.
    """
    unit = joined * patch_size
    if image_size % unit:
        squares = f", joined in squares of {joined} x {joined}" if joined > 1 else ""
        yield ConfigIssue(
            "model.scratch.patch_size",
            f"an image of model.scratch.image_size = {image_size} cannot be cut into patches of {patch_size} pixels"
            f"{squares}",
            f"choose a multiple of {unit} for model.scratch.image_size, or other patches",
        )


def check_heads(scratch: Any, *names: str) -> Iterator[ConfigIssue]:
    """Yield an issue for each width of a new model that cannot be split among its attention heads."""
    for name in names:
        if getattr(scratch, name) % scratch.heads:
            yield ConfigIssue(
                f"model.scratch.{name}",
                f"model.scratch.{name} = {getattr(scratch, name)} cannot be split among {scratch.heads} heads",
                f"choose a multiple of {scratch.heads}",
            )


# --------------------------------------------------------------------------------------------------- a checkpoint


def note_executed(config: Config, written: Any) -> Iterator[str]:
    """Yield a text if a checkpoint of LeRobot was meant to execute another number of actions of a chunk.

    Args:
        config: the whole config.
        written: `n_action_steps` of the checkpoint's config.json; None: it says nothing.
    """
    executed = config.executed_actions
    if isinstance(written, int) and not isinstance(written, bool) and written != executed:
        name = "eval.actions" if written < config.rollout.chunk_size else "rollout.chunk_size"
        yield (
            f"the checkpoint was evaluated with {written} actions per chunk (n_action_steps), here {executed} are "
            f"executed; to do so here: embodyrl eval with {name}={written}"
        )


def check_robot(
    what: str, size: int, most: float, there: int | None, *, settings: tuple[str, ...], instead: str
) -> Iterator[ConfigIssue]:
    """Yield an issue if the statistics of a robot do not fit the network, or are not those of the simulator's.

    Args:
        what: states or actions.
        size: their numbers in the statistics.
        most: numbers that the network takes.
        there: numbers in the simulator; None: not known yet.
        settings: that choose the statistics.
        instead: what else could be changed.
    """
    if size > most:
        yield ConfigIssue(
            settings[0],
            f"the statistics are of {what} with {size} numbers, the checkpoint takes {most}",
            "choose statistics of another robot",
        )
    if there is not None and size != there:
        yield ConfigIssue(
            settings[0],
            f"the statistics are of {what} with {size} numbers, the simulator has {there}",
            f"choose statistics of this robot ({', '.join(settings)}), or {instead}",
        )


def check_horizon(
    chunk: int,
    horizon: int,
    setting: str = "rollout.chunk_size",
    predicts: str = "the checkpoint gives {horizon} actions at once",
) -> Iterator[ConfigIssue]:
    """Yield an issue if more actions are asked for, by a setting, than a model predicts."""
    if chunk > horizon:
        yield ConfigIssue(
            setting,
            f"{setting} = {chunk}, but {predicts.format(horizon=horizon)}",
            f"set {setting} to {horizon} or less",
        )


def check_sizes(
    robot: Robot | None,
    there: SimulatorSizes,
    *settings: str,
    states: str,
    most: tuple[float, float] = (math.inf, math.inf),
) -> Iterator[ConfigIssue]:
    """Yield an issue for each size of a robot that exceeds the network's or is not the simulator's.

    Args:
        robot: normalisation of its states and actions; None: it cannot be read.
        there: the simulator's sizes.
        settings: that choose the statistics.
        states: what else could be changed if states differ.
        most: numbers of a state and of an action that the network takes.
    """
    if robot is None:
        return
    rows = (
        ("states", robot.states, most[0], there.proprio, states),
        ("actions", robot.actions, most[1], there.action, "its matching controller"),
    )
    for what, scale, limit, wanted, instead in rows:
        if scale is not None:
            yield from check_robot(what, len(scale), limit, wanted, settings=settings, instead=instead)
