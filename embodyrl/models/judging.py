"""Files of a learned classifier of success: a policy's folder, and beside it what it can be used for.

Imports no torch, so that a config can be checked against them before anything starts.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import read_json, weight_files

CLASSIFIER = "classifier"
"""Folder of a run that has learned one."""
FACTS_FILE = "classifier.json"


@dataclass(frozen=True, kw_only=True)
class ClassifierInput:
    """Inputs of a classifier."""

    state_dim: int
    """`S`; 0: no state."""
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    """`(H, W)` [pixels]; (0, 0) without cameras."""
    frames: int
    """Images of each camera, the newest and earlier ones."""


@dataclass(frozen=True, kw_only=True)
class ClassifierFacts:
    """Contents of `classifier.json`."""

    model: str
    """Name of the model that it is an instance of."""
    seen: ClassifierInput
    tasks: tuple[str, ...]
    """Those of the demonstrations that it was learned from."""
    held_out: dict[str, Any]
    """How often it was right about demonstrations that it was not learned from, see `runner.classifier`."""

    def write(self, folder: Path) -> None:
        """Write them into a folder."""
        (folder / FACTS_FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> ClassifierFacts:
        """Read what `write` wrote.

        Raises:
            PolicyError: the folder holds no classifier, or a damaged one.
        """
        path = folder / FACTS_FILE
        if not path.is_file():
            raise PolicyError(
                f"{folder} holds no classifier of success (no {FACTS_FILE})",
                f"give a run of algorithm 'reward_classifier', or its folder {CLASSIFIER}",
            )
        weight_files(folder)
        try:
            found = read_json(path)
            seen = found["seen"]
            return cls(
                model=str(found["model"]),
                seen=ClassifierInput(
                    state_dim=int(seen["state_dim"]),
                    cameras=tuple(seen["cameras"]),
                    image_size=(int(seen["image_size"][0]), int(seen["image_size"][1])),
                    frames=int(seen["frames"]),
                ),
                tasks=tuple(found["tasks"]),
                held_out=dict(found["held_out"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PolicyError(f"{path} is damaged ({error!r})", "learn the classifier again") from error


def find_classifier(path: Path) -> Path:
    """Return the folder of the classifier that a run has learned, or that is named itself."""
    return path / CLASSIFIER if (path / CLASSIFIER).is_dir() else path
