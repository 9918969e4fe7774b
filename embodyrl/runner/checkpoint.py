"""Checkpoints that are whole or not there: written beside their place, synced, hashed in a manifest, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embodyrl.errors import UserError
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.version import __version__

FORMAT = 1
MANIFEST = "manifest.json"
LAST = "last"
CHECKPOINTS = "checkpoints"
SURPLUS = "surplus.safetensors"


class CheckpointError(UserError):
    """Raised when a checkpoint is missing, incomplete or altered."""


@dataclass(kw_only=True)
class TrainerState:
    """Everything a run needs to go on, apart from the policy's weights."""

    counters: dict[str, Any]
    """JSON: iteration, env steps, collector, first evaluation, ..."""
    engine: dict[str, Any]
    """`HybridEngine.state_dict`: optimiser and random streams."""
    simulators: list[bytes]
    """State of every slot; empty if no episode is in progress."""
    surplus: TrajectoryBatch | None = None
    """What was collected and not learned from yet."""

    def save(self, folder: Path) -> None:
        """Write into an existing folder."""
        (folder / "counters.json").write_text(json.dumps(self.counters, indent=2) + "\n")
        torch.save(self.engine, folder / "engine.pt")
        (folder / "simulators").mkdir()
        for slot, state in enumerate(self.simulators):
            (folder / "simulators" / f"slot_{slot:04d}.bin").write_bytes(state)
        if self.surplus is not None:
            self.surplus.save(folder / SURPLUS)

    @classmethod
    def load(cls, folder: Path) -> TrainerState:
        """Read what `save` wrote; no pickled code runs."""
        return cls(
            counters=json.loads((folder / "counters.json").read_text()),
            engine=torch.load(folder / "engine.pt", weights_only=True),
            simulators=[path.read_bytes() for path in sorted((folder / "simulators").glob("slot_*.bin"))],
            surplus=TrajectoryBatch.load(folder / SURPLUS) if (folder / SURPLUS).exists() else None,
        )


@contextmanager
def writing(run_dir: Path, iteration: int) -> Iterator[Path]:
    """A temporary folder that becomes checkpoint `iteration` (and `last`) when the block ends without an exception."""
    place = run_dir / CHECKPOINTS / f"{iteration:06d}"
    temporary = place.with_name(f".{place.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _write_manifest(temporary, iteration)
    outdated = place.with_name(f".{place.name}.old")
    if place.exists():
        place.rename(outdated)
    temporary.rename(place)
    shutil.rmtree(outdated, ignore_errors=True)
    _point_last_to(place)
    _sync(place.parent)


def _write_manifest(folder: Path, iteration: int) -> None:
    files = {}
    for path in _files(folder):
        _sync(path)
        files[str(path.relative_to(folder))] = {"size": path.stat().st_size, "sha256": _digest(path)}
    manifest = {"format": FORMAT, "embodyrl": __version__, "iteration": iteration, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    _sync(folder / MANIFEST)
    for directory in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(directory)


def _point_last_to(place: Path) -> None:
    link = place.with_name(f".{LAST}.tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(place.name)
    link.replace(place.with_name(LAST))


def find(path: Path) -> Path:
    """The checkpoint that `path` stands for: a checkpoint's folder, or a run directory (then its last one), verified.

    Raises:
        CheckpointError: there is none, or a file is missing or altered (each is named).
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a run directory, or one of its checkpoints/ folders")
    place = path / CHECKPOINTS / LAST if (path / CHECKPOINTS).is_dir() else path
    if not place.exists():
        where = place.relative_to(path)
        raise CheckpointError(f"{path} holds no checkpoint (no {where}): the run stopped before it saved one")
    place = place.resolve()
    verify(place)
    return place


def verify(place: Path) -> Mapping[str, Any]:
    """Compare every file with the manifest; returns the manifest.

    Raises:
        CheckpointError: names every file that is missing, added or altered.
    """
    if not (place / MANIFEST).is_file():
        raise CheckpointError(
            f"{place} is not a checkpoint (no {MANIFEST}): give a run directory or one of its checkpoints/ folders"
        )
    try:
        manifest: dict[str, Any] = json.loads((place / MANIFEST).read_text())
        files = manifest["files"]
    except (json.JSONDecodeError, KeyError) as error:
        raise CheckpointError(f"{place / MANIFEST} is damaged ({error}): use another checkpoint of the run") from error
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{place} has checkpoint format {manifest['format']}, this version reads {FORMAT}")
    present = {str(path.relative_to(place)) for path in _files(place)} - {MANIFEST}
    faults = [f"{name} is missing" for name in files.keys() - present]
    faults += [f"{name} is not in the manifest" for name in present - files.keys()]
    both = present & files.keys()
    faults += [f"{name} is altered" for name in both if _digest(place / name) != files[name]["sha256"]]
    if faults:
        raise CheckpointError(f"checkpoint {place} is damaged: {'; '.join(sorted(faults))}. Use another one of the run")
    return manifest


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
