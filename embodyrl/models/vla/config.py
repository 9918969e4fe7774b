"""Options that several vision-language-action models share, and checks of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config


class WeightType(StrEnum):
    """Type of the weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class ActionUnits(StrEnum):
    """Units of unnormalized motions."""

    simulator = "simulator"
    metric = "metric"


class Frozen(StrEnum):
    """Part of the network that is not trained."""

    nothing = "nothing"
    vision = "vision"
    language = "language"


class StateInput(StrEnum):
    """Form in which a model reads the robot's state."""

    token = "token"
    none = "none"


def check_without_checkpoint(model: Any, *names: str) -> Iterator[ConfigIssue]:
    """Yield an issue for each option that belongs to a checkpoint, for models without one.

    Args:
        model: the model's options.
        names: names of these options.
    """
    for name in names:
        if getattr(model, name) is not None:
            yield ConfigIssue(
                f"model.{name}",
                f"model.{name} is set, but model.checkpoint is null",
                "name the weights it belongs to",
            )


def check_patches(image_size: int, patch_size: int) -> Iterator[ConfigIssue]:
    """Yield an issue if the images of a new model cannot be cut into patches; both sizes are sides [pixels]."""
    if image_size % patch_size:
        yield ConfigIssue(
            "model.scratch.patch_size",
            f"an image of model.scratch.image_size = {image_size} cannot be cut into patches of {patch_size} pixels",
            "choose a divisor",
        )


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
