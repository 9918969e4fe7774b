"""Options of several vision-language-action models, and what is wrong with them (imports no torch)."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from embodyrl.config.issues import ConfigIssue


class WeightType(StrEnum):
    """Type of the weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class ActionUnits(StrEnum):
    """What un-normalised motions are measured in."""

    simulator = "simulator"
    metric = "metric"


def check_without_checkpoint(model: Any, *names: str) -> Iterator[ConfigIssue]:
    """Object to options that belong to the weights of a checkpoint, where there is none.

    Args:
        model: the model's options.
        names: of the options.
    """
    for name in names:
        if getattr(model, name) is not None:
            yield ConfigIssue(
                f"model.{name}",
                f"model.{name} is set, but model.checkpoint is null",
                "name the weights it belongs to",
            )


def check_patches(image_size: int, patch_size: int) -> Iterator[ConfigIssue]:
    """Object to images of a new model that cannot be cut into patches; both are sides [pixels]."""
    if image_size % patch_size:
        yield ConfigIssue(
            "model.scratch.patch_size",
            f"an image of model.scratch.image_size = {image_size} cannot be cut into patches of {patch_size} pixels",
            "choose a divisor",
        )
