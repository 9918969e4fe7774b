"""Options that several vision-language-action models share, and checks of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from embodyrl.config.issues import ConfigIssue


class WeightType(StrEnum):
    """Type of the weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class ActionUnits(StrEnum):
    """Units of un-normalised motions."""

    simulator = "simulator"
    metric = "metric"


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
