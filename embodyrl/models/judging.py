"""Files of a small network that judges observations for a reward: a policy's folder, and beside it what it can be used
for.

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


@dataclass(frozen=True)
class JudgeKind:
    """A kind of such networks."""

    folder: str
    """Folder of a run that has learned one; `<folder>.json` in it is what it can be used for."""
    what: str
    """What it is, for people."""
    method: str
    """Method that learns one."""

    @property
    def file(self) -> str:
        """Name of the file beside its weights."""
        return f"{self.folder}.json"

    def find(self, path: Path) -> Path:
        """Return the folder of the network that a run has learned, or that is named itself."""
        return path / self.folder if (path / self.folder).is_dir() else path


CLASSIFIER = JudgeKind("classifier", "classifier of success", "reward_classifier")
PROGRESS = JudgeKind("progress", "predictor of progress", "reward_progress")
KINDS = (CLASSIFIER, PROGRESS)


@dataclass(frozen=True, kw_only=True)
class JudgeInput:
    """What it sees."""

    state_dim: int
    """`S`; 0: no state."""
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    """`(H, W)` [pixels]; (0, 0) without cameras."""
    frames: int
    """Images of each camera, the newest and earlier ones."""


@dataclass(frozen=True, kw_only=True)
class JudgeFacts:
    """What it can be used for."""

    model: str
    """Name of the model that it is an instance of."""
    seen: JudgeInput
    tasks: tuple[str, ...]
    """Those of the demonstrations that it was learned from."""
    held_out: dict[str, Any]
    """How right it was about demonstrations that it was not learned from, see its method."""

    def write(self, folder: Path, kind: JudgeKind) -> None:
        """Write them into a folder."""
        (folder / kind.file).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path, kind: JudgeKind) -> JudgeFacts:
        """Read what `write` wrote.

        Raises:
            PolicyError: the folder holds no such network, or a damaged one.
        """
        path = folder / kind.file
        if not path.is_file():
            raise PolicyError(
                f"{folder} holds no {kind.what} (no {kind.file})",
                f"give a run of algorithm {kind.method!r}, or its folder {kind.folder}",
            )
        weight_files(folder)
        try:
            found = read_json(path)
            seen = found["seen"]
            return cls(
                model=str(found["model"]),
                seen=JudgeInput(
                    state_dim=int(seen["state_dim"]),
                    cameras=tuple(seen["cameras"]),
                    image_size=(int(seen["image_size"][0]), int(seen["image_size"][1])),
                    frames=int(seen["frames"]),
                ),
                tasks=tuple(found["tasks"]),
                held_out=dict(found["held_out"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PolicyError(f"{path} is damaged ({error!r})", f"learn the {kind.what} again") from error
