"""Checkpoints on the disk: finding, verifying, and writing them atomically.

Files are written to a temporary folder, synced, hashed in a manifest, and the folder is renamed. If the process or the
machine dies at any moment, `last` leads to a whole checkpoint once one has been published: a folder gets its name when
it is complete, a folder that `last` leads to is never renamed, and old checkpoints are removed after new ones exist.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from embodyrl.errors import UserError
from embodyrl.screen import say
from embodyrl.version import __version__

FORMAT = 3
"""Incremented with every change after which an older version could not read, or would misread, a checkpoint."""
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
    """Contents of `manifest.json`."""

    iteration: int
    """Iterations that the run had done."""
    metrics: Mapping[str, float]
    """Metrics of the evaluation after that iteration; empty if there was none."""
    files: Mapping[str, Mapping[str, Any]]
    """`size` [bytes] and `sha256` of every other file, by its path in the checkpoint."""

    def to_json(self) -> str:
        """Return the contents of the file."""
        contents = {"format": FORMAT, "embodyrl": __version__, **vars(self)}
        return json.dumps(contents, indent=2) + "\n"

    @classmethod
    def read(cls, place: Path) -> Manifest:
        """Read the manifest of a checkpoint's folder.

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
    """Reason why it is not the one that was asked for; None if it is."""


def find(path: Path) -> Found:
    """Find the checkpoint of `path`, which is a checkpoint's folder or a run directory. Of a run directory it is the
    last, or if that is damaged the newest that is whole. `last` and `best` below a run directory are its links of that
    name; below a folder of run directories, those of the run that saved last.

    Raises:
        CheckpointError: there is none, or a file is missing or altered (each is named).
    """
    if not path.exists() and path.name in (LAST, BEST):
        path = _of_newest_run(path)
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


def _of_newest_run(path: Path) -> Path:
    """Resolve `<run directory>/last` or `<folder of run directories>/last`; returns `path` if there is no such link."""
    name = path.name
    links = [run_dir / CHECKPOINTS / name for run_dir in (path.parent, *path.parent.glob("*/"))]
    links = [link for link in links if (link / MANIFEST).is_file()]
    if not links:
        return path
    newest = max(links, key=lambda link: (link / MANIFEST).stat().st_mtime)
    return newest.parents[1] if name == LAST else newest  # of a run: the newest that is whole


def find_and_tell(path: Path) -> Path:
    """Find the checkpoint of `path`, see `find`, and print the warning if there is one."""
    found = find(path)
    if found.warning is not None:
        say(found.warning)
    return found.place


def _find_in_run(run_dir: Path) -> Found:
    """Find the last checkpoint of a run directory, or the newest that is whole."""
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
    raise DamageError(
        f"no checkpoint of {run_dir} is whole. {'. '.join(faults)}: put back what this run saved there, or start a new "
        "one"
    )


def published(run_dir: Path) -> list[tuple[int, Path]]:
    """Return iteration and folder of every checkpoint of a run, the newest last, without verifying them."""
    folder = run_dir / CHECKPOINTS
    places = folder.iterdir() if folder.is_dir() else ()
    numbered = [(match, place) for place in places if (match := _NAME.fullmatch(place.name)) and place.is_dir()]
    return sorted((int(match[1]), place) for match, place in numbered)


def verify(place: Path) -> Manifest:
    """Compare every file with the manifest; returns the manifest. Nothing outside the folder is read.

    Raises:
        DamageError: names every file that is missing, added, cut short or altered, and every entry that is no file.
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
    """Return a description of a file's damage; None if it is whole."""
    size, expected = path.stat().st_size, facts.get("size")
    if size != expected:
        return f"has {size} bytes instead of {expected}"
    return None if digest(path) == facts.get("sha256") else "is altered"


def files_in(folder: Path) -> list[Path]:
    """Return every file below a folder; links are no files."""
    return [path for path in entries_in(folder) if is_file(path)]


def entries_in(folder: Path) -> list[Path]:
    """Return all entries below a folder except folders, without following links."""
    found = [Path(base) / name for base, folders, names in os.walk(folder) for name in (*folders, *names)]
    return sorted(path for path in found if not stat.S_ISDIR(path.lstat().st_mode))


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file and no link."""
    return stat.S_ISREG(path.lstat().st_mode)


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    kinds = {stat.S_ISLNK: "a link", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_one, name in kinds.items() if is_one(mode)), "a device")


def _is_below(name: str) -> bool:
    """Return whether a name in a manifest can be that of a file in its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == name


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Checkpoints of a run to keep."""

    last: int = 0
    """Number of the newest; 0: all."""
    best: str | None = None
    """Metric by which the best one is kept as well (the larger, the better); None: there is no best one."""


@dataclass(kw_only=True)
class Publication:
    """A checkpoint that is being written."""

    folder: Path
    """Temporary folder for its files."""
    place: Path
    """Its final path."""


@contextmanager
def writing(
    run_dir: Path, iteration: int, *, metrics: Mapping[str, float], retention: Retention
) -> Iterator[Publication]:
    """Yield a folder that becomes the checkpoint of `iteration`, and `last`, when the block ends without an exception.

    Args:
        run_dir: of the run; this process must be the only one that saves there.
        iteration: iterations done.
        metrics: of the evaluation after that iteration, if there was one.
        retention: checkpoints to keep.
    """
    parent = run_dir / CHECKPOINTS
    if not parent.exists():
        parent.mkdir()
        _sync(run_dir)
    _clear(parent)
    publication = Publication(folder=parent / f".{iteration:06d}.tmp", place=_free_place(parent, iteration))
    publication.folder.mkdir()
    try:
        yield publication
        _write_manifest(publication.folder, iteration, metrics)
    except BaseException:
        shutil.rmtree(publication.folder, ignore_errors=True)
        raise
    # Every step is synced before the next one relies on it: a rename may reach the disk before the data it names.
    publication.folder.rename(publication.place)
    _sync(parent)
    _point(LAST, publication.place)
    if _is_best(publication.place, retention.best):
        _point(BEST, publication.place)
    _sync(parent)
    _prune(run_dir, publication.place, retention.last)


def _free_place(parent: Path, iteration: int) -> Path:
    """Return the path of the new checkpoint: beside the one of the same iteration, if there is one, which is removed
    afterwards."""
    names = itertools.chain([f"{iteration:06d}"], (f"{iteration:06d}-{count}" for count in itertools.count(2)))
    return next(place for name in names if not (place := parent / name).exists())


def _write_manifest(folder: Path, iteration: int, metrics: Mapping[str, float]) -> None:
    files = {}
    last = folder.parent / LAST
    known = Manifest.read(last.resolve()).files if last.exists() else {}
    for path in files_in(folder):
        _sync(path)
        name = str(path.relative_to(folder))
        # The same file as in the checkpoint before, which has read it; if it was altered since, its hash tells.
        is_known = name in known and path.stat().st_nlink > 1 and (last / name).exists() and path.samefile(last / name)
        sha256 = known[name]["sha256"] if is_known else digest(path)
        files[name] = {"size": path.stat().st_size, "sha256": sha256}
    (folder / MANIFEST).write_text(Manifest(iteration=iteration, metrics=metrics, files=files).to_json())
    _sync(folder / MANIFEST)
    for directory in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(directory)


def _point(name: str, place: Path) -> None:
    """Make the link `name` lead to a checkpoint, atomically."""
    link = place.with_name(f".{name}.tmp")
    link.symlink_to(place.name)
    link.replace(place.with_name(name))


def _is_best(place: Path, metric: str | None) -> bool:
    """Return whether a new checkpoint is better than the best one so far; on a tie, only if it is of the same
    iteration."""
    new = Manifest.read(place)
    if metric is None or metric not in new.metrics:
        return False
    try:
        best = Manifest.read(place.with_name(BEST).resolve())
    except DamageError:
        return True
    value = best.metrics.get(metric, float("-inf"))
    return new.metrics[metric] > value or (new.metrics[metric] == value and new.iteration == best.iteration)


def _prune(run_dir: Path, newest: Path, last: int) -> None:
    """Remove checkpoints that the newest replaces, and all but the `last` newest; keep those that a link leads to."""
    numbered = published(run_dir)
    iteration = next(number for number, place in numbered if place == newest)
    older = [place for number, place in numbered if number < iteration]
    superseded = [place for number, place in numbered if number == iteration and place != newest]
    linked = {(run_dir / CHECKPOINTS / name).resolve() for name in (LAST, BEST)}
    excess = older[: max(len(older) - (last - 1), 0)] if last else []
    for place in [*superseded, *excess]:
        if place.resolve() not in linked:
            hidden = place.with_name(f".{place.name}.old")
            place.rename(hidden)  # atomic, so that no reader finds half of it
            shutil.rmtree(hidden)


def _clear(parent: Path) -> None:
    """Remove unfinished files of a process that was killed."""
    for path in [*parent.glob(".*.tmp"), *parent.glob(".*.old")]:
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
