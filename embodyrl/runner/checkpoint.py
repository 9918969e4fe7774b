"""What a checkpoint is on the disk, and how one is found and verified. `publishing` writes them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from embodyrl.errors import UserError, without_controls
from embodyrl.version import __version__

FORMAT = 3
"""Rises with every change after which an older version could not read, or would misread, a checkpoint."""
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
LAST, BEST = "last", "best"
"""Links to the newest checkpoint, and to the one with the best evaluation."""
POLICY, TRAINER = "policy", "trainer"
"""Folders of a checkpoint: weights in the model's public layout, and everything else that a run needs to go on."""
_NAME = re.compile(r"(\d{6,})(?:-\d+)?")


class CheckpointError(UserError):
    """Raised when a checkpoint is missing, incomplete, altered, or of another version."""


class VersionError(CheckpointError):
    """Raised when another version of embodyrl wrote the checkpoint; that is no damage."""


class DamageError(CheckpointError):
    """Raised when files of a checkpoint are missing, added or altered."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `manifest.json` says."""

    iteration: int
    """Iterations that the run had done."""
    metrics: Mapping[str, float]
    """What the evaluation after that iteration found; empty if there was none."""
    files: Mapping[str, Mapping[str, Any]]
    """`size` [bytes] and `sha256` of every other file, by its path in the checkpoint."""

    def to_json(self) -> str:
        """Contents of the file."""
        contents = {"format": FORMAT, "embodyrl": __version__, **vars(self)}
        return json.dumps(contents, indent=2) + "\n"

    @classmethod
    def read(cls, place: Path) -> Manifest:
        """The manifest of a checkpoint's folder.

        Raises:
            DamageError: it cannot be read.
            VersionError: it has a format that this version does not know.
        """
        try:
            if not is_file(place / MANIFEST):  # reading a pipe would wait for ever
                raise OSError("not a file")
            contents = json.loads((place / MANIFEST).read_text())
            number, version = int(contents["format"]), str(contents["embodyrl"])
            if number == FORMAT:
                return cls(
                    iteration=int(contents["iteration"]),
                    metrics=dict(contents["metrics"]),
                    files={str(name): {**facts} for name, facts in contents["files"].items()},
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamageError(f"{MANIFEST} cannot be read ({error})") from error
        if number > FORMAT:
            raise VersionError(
                f"{place} was saved by a newer version, embodyrl {version} (format {number}; this is {__version__}, "
                f"which reads format {FORMAT}): install that version"
            )
        raise VersionError(
            f"{place} was saved by an older version, embodyrl {version} (format {number}; this is {__version__}, which "
            f"reads format {FORMAT}): go on with that version, or start a run from its weights "
            f"(model.checkpoint={place / POLICY})"
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """A whole checkpoint."""

    place: Path
    warning: str | None = None
    """Why it is not the one that was asked for, if so."""


def find(path: Path) -> Found:
    """The checkpoint that `path` stands for: a checkpoint's folder, or a run directory. Of a run directory it is the
    last one, or if that is damaged the newest that is whole.

    Raises:
        CheckpointError: there is none, or a file is missing or altered (each is named).
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a run directory, or one of its {CHECKPOINTS}/ folders")
    is_run = (path / CHECKPOINTS).is_dir() or (path / "config.yaml").is_file()
    place = path.resolve()
    if is_run and not (place / MANIFEST).exists():
        return _find_in_run(path)
    if not (place / MANIFEST).is_file():
        raise CheckpointError(
            f"{path} is not a checkpoint (no {MANIFEST}): give a run directory or one of its {CHECKPOINTS}/ folders"
        )
    try:
        verify(place)
    except DamageError as error:
        raise DamageError(f"checkpoint {path} is damaged: {error}. Use another one of the run") from error
    return Found(place=place)


def find_and_tell(path: Path) -> Path:
    """The same; prints why it is not the last one, if so."""
    found = find(path)
    if found.warning is not None:
        print(without_controls(found.warning), flush=True)
    return found.place


def _find_in_run(run_dir: Path) -> Found:
    """The last checkpoint of a run directory, or the newest whole one."""
    last = run_dir / CHECKPOINTS / LAST
    candidates = [place for _, place in reversed(published(run_dir))]
    if not candidates and not last.is_symlink():
        where = last.relative_to(run_dir)
        raise CheckpointError(
            f"{run_dir} holds no checkpoint (no {where}), because the run stopped before it saved one: remove the "
            "folder, or choose another run.dir, and start it again"
        )
    faults = []
    if last.exists():
        candidates.sort(key=last.samefile, reverse=True)  # the last one first, the others as before
    else:
        faults.append(f"{CHECKPOINTS}/{LAST} leads nowhere")
    for place in map(Path.resolve, candidates):
        try:
            verify(place)
        except DamageError as error:
            faults.append(f"{CHECKPOINTS}/{place.name} is damaged: {error}")
            continue
        warning = f"warning: {'. '.join(faults)}. Taking {place.name} instead, the newest that is whole"
        return Found(place=place, warning=warning if faults else None)
    raise DamageError(f"no checkpoint of {run_dir} is whole. {'. '.join(faults)}")


def published(run_dir: Path) -> list[tuple[int, Path]]:
    """Iteration and folder of every checkpoint of a run, the newest last. Whether they are whole is not looked at."""
    folder = run_dir / CHECKPOINTS
    places = folder.iterdir() if folder.is_dir() else ()
    numbered = [(match, place) for place in places if (match := _NAME.fullmatch(place.name)) and place.is_dir()]
    return sorted((int(match[1]), place) for match, place in numbered)


def verify(place: Path) -> Manifest:
    """Compare every file with the manifest; returns the manifest. Nothing outside the folder is looked at.

    Raises:
        DamageError: names every file that is missing, added, cut short or altered, and whatever is no file.
        VersionError: another version wrote it.
    """
    manifest = Manifest.read(place)
    present = {str(path.relative_to(place)): path for path in entries_in(place)}
    faults = [f"{name} is {_kind(path)}, not a file" for name, path in present.items() if not is_file(path)]
    faults += [f"{name} is not in the manifest" for name in present.keys() - manifest.files.keys() - {MANIFEST}]
    for name, facts in manifest.files.items():
        if name not in present:
            faults.append(f"{name} is missing" if _is_below(name) else f"{name} is no name of a file in it")
        elif is_file(present[name]) and (fault := _fault(present[name], facts)) is not None:
            faults.append(f"{name} {fault}")
    if faults:
        raise DamageError("; ".join(sorted(faults)))
    return manifest


def _fault(path: Path, facts: Mapping[str, Any]) -> str | None:
    """What is wrong with a file, if anything."""
    size, expected = path.stat().st_size, facts.get("size")
    if size != expected:
        return f"has {size} bytes instead of {expected}"
    return None if digest(path) == facts.get("sha256") else "is altered"


def files_in(folder: Path) -> list[Path]:
    """Every file below a folder; links are none."""
    return [path for path in entries_in(folder) if is_file(path)]


def entries_in(folder: Path) -> list[Path]:
    """Everything below a folder but folders, without following links."""
    found = [Path(base) / name for base, folders, names in os.walk(folder) for name in (*folders, *names)]
    return sorted(path for path in found if not stat.S_ISDIR(path.lstat().st_mode))


def is_file(path: Path) -> bool:
    """Whether a path is a regular file and no link."""
    return stat.S_ISREG(path.lstat().st_mode)


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    kinds = {stat.S_ISLNK: "a link", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_one, name in kinds.items() if is_one(mode)), "a device")


def _is_below(name: str) -> bool:
    """Whether a name in a manifest can be that of a file in its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == name


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
