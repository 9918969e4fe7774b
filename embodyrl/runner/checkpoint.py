"""Checkpoints on the disk: finding, verifying, and writing them atomically.

Files are written to a temporary folder, synced, hashed in a manifest, and the folder is renamed. If the process or the
machine dies at any moment, `last` leads to a whole checkpoint once one has been published: a folder gets its name when
it is complete, a folder that `last` leads to is never renamed, and old checkpoints are removed after new ones exist.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.config.plugins import ORIGIN_FILE
from embodyrl.errors import UserError
from embodyrl.files import digest, entries_in, files_in, is_file, is_inside, replacing
from embodyrl.runs import BEST, CHECKPOINTS, CONFIG_FILE, LAST, published
from embodyrl.screen import say
from embodyrl.version import __version__

FORMAT = 3
"""Incremented with every change after which an older version could not read, or would misread, a checkpoint."""
MANIFEST = "manifest.json"
POLICY, TRAINER = "policy", "trainer"
"""Folders of a checkpoint: weights in the model's public layout, and everything else that a run needs to continue."""
REPLAY = f"{TRAINER}/replay"
"""Folder of past decisions."""
MOST_SHARED = 10
"""Most checkpoints that have a file in common where all are kept."""

Needs = Callable[[str], bool]
"""Whether a file of a checkpoint, given by its path in it, is read. Damage of the others is only reported."""


def everything(name: str) -> bool:
    """Need all files, as a run that continues does."""
    return True


def to_act(name: str) -> bool:
    """Need config and policy, as whoever only acts does."""
    return name.partition("/")[0] in (CONFIG_FILE, ORIGIN_FILE, POLICY)


def to_verify(name: str) -> bool:
    """Need config and policy, and what was recorded of them."""
    return to_act(name) or name == "lock.safetensors"


def all_but_replay(name: str) -> bool:
    """Need what a run does that continues with an empty replay."""
    return not name.startswith(f"{REPLAY}/")


class CheckpointError(UserError):
    """Raised when a checkpoint is missing, incomplete, altered, or of another version."""


class NoCheckpointError(CheckpointError):
    """Raised when a path leads to no checkpoint; nothing was started."""

    exit_code = 2


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
            f"reads format {FORMAT}): continue with that version, or start a run from its weights "
            f"(model.checkpoint={place / POLICY})"
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """A whole checkpoint."""

    place: Path
    warning: str | None = None
    """Reason why it is not the one that was asked for, or its damage where nothing is read; None if there is none."""
    with_replay: bool = True
    """Whether its past decisions are read by a run that continues from it."""


def find(path: Path, needs: Needs = everything) -> Found:
    """Find the checkpoint of `path`, which is a checkpoint's folder or a run directory. Of a run directory it is the
    last, or if that is damaged the newest that is whole. `last` and `best` below a run directory are its links of that
    name; below a folder of run directories, those of the run that saved last. A checkpoint counts as whole if the files
    that it is needed for are.

    Raises:
        CheckpointError: there is none, or a file is missing or altered (each is named).
    """
    if not path.exists() and path.name in (LAST, BEST):
        path = _of_newest_run(path)
    if not path.exists():
        raise NoCheckpointError(f"{path} does not exist: give a run directory, or one of its {CHECKPOINTS}/ folders")
    is_run = (path / CHECKPOINTS).is_dir() or (path / CONFIG_FILE).is_file()
    place = path.resolve()
    if is_run and not (place / MANIFEST).exists():
        return _find_in_run(path, needs)
    if not (place / MANIFEST).is_file():
        raise NoCheckpointError(
            f"{path} is not a checkpoint (no {MANIFEST}): give a run directory or one of its {CHECKPOINTS}/ folders"
        )
    try:
        unread = _refuse_damage(place, needs)
    except DamageError as error:
        raise DamageError(f"checkpoint {path} is damaged: {error}. Use another one of the run") from error
    return Found(place=place, warning=_warning(str(path), unread))


def _warning(name: str, unread: str) -> str | None:
    """Return the warning about damage to files of a checkpoint that are not read."""
    return f"warning: {name} is damaged: {unread}. Continuing, because nothing of that is read" if unread else None


def _of_newest_run(path: Path) -> Path:
    """Resolve `<run directory>/last` or `<folder of run directories>/last`; returns `path` if there is no such link."""
    name = path.name
    links = [run_dir / CHECKPOINTS / name for run_dir in (path.parent, *path.parent.glob("*/"))]
    links = [link for link in links if (link / MANIFEST).is_file()]
    if not links:
        return path
    newest = max(links, key=lambda link: (link / MANIFEST).stat().st_mtime)
    return newest.parents[1] if name == LAST else newest  # of a run: the newest that is whole


def find_and_tell(path: Path, needs: Needs = everything) -> Path:
    """Find the checkpoint of `path`, see `find`, and print the warning if there is one."""
    found = find(path, needs)
    if found.warning is not None:
        say(found.warning)
    return found.place


def _find_in_run(run_dir: Path, needs: Needs) -> Found:
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
        name = f"{CHECKPOINTS}/{place.name}"
        try:
            unread = _refuse_damage(place, needs)
        except DamageError as error:
            faults.append(f"{name} is damaged: {error}")
            continue
        warnings = [f"warning: {'. '.join(faults)}. Taking {place.name} instead, the newest that is whole"]
        warnings = [*(warnings if faults else []), *filter(None, [_warning(name, unread)])]
        return Found(place=place, warning="\n".join(warnings) or None)
    raise DamageError(
        f"no checkpoint of {run_dir} is whole. {'. '.join(faults)}: put back what this run saved there, or start a new "
        "one"
    )


def verify(place: Path) -> Manifest:
    """Compare every file with the manifest; returns the manifest. Nothing outside the folder is read.

    Raises:
        DamageError: names every file that is missing, added, cut short or altered, and every entry that is no file.
        VersionError: another version wrote it.
    """
    _refuse_damage(place, everything)
    return Manifest.read(place)


def _refuse_damage(place: Path, needs: Needs) -> str:
    """Compare every file with the manifest; returns the damage of files that are not needed, or an empty text.

    Raises:
        DamageError, VersionError: see `verify`; of files that are needed.
    """
    faults = sorted(_faults(place, Manifest.read(place)))
    if needed := [fault for name, fault in faults if needs(name)]:
        raise DamageError("; ".join(needed))
    return "; ".join(fault for _, fault in faults)


def _faults(place: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield name and description of each damage."""
    present = {str(path.relative_to(place)): path for path in entries_in(place)}
    yield from ((name, f"{name} is {_kind(path)}, not a file") for name, path in present.items() if not is_file(path))
    for name in present.keys() - manifest.files.keys() - {MANIFEST}:
        if is_file(present[name]):
            yield name, f"{name} is not in the manifest"
    for name, facts in manifest.files.items():
        if not is_inside(name):
            yield name, f"{name} is no name of a file in it"
        elif name not in present:
            yield name, f"{name} is missing"
        elif is_file(present[name]) and (fault := _fault(present[name], facts)) is not None:
            yield name, f"{name} {fault}"


def has_lost(place: Path, part: str) -> bool:
    """Return whether files of a part of a checkpoint are missing, or have another size than when they were saved."""
    try:
        files = Manifest.read(place).files
        return any(
            (place / name).lstat().st_size != facts.get("size")
            for name, facts in files.items()
            if name.startswith(f"{part}/") and is_inside(name)
        )
    except (OSError, CheckpointError):
        return True


def _fault(path: Path, facts: Mapping[str, Any]) -> str | None:
    """Return a description of a file's damage; None if it is whole."""
    size, expected = path.stat().st_size, facts.get("size")
    if size != expected:
        return f"has {size} bytes instead of {expected}"
    return None if digest(path) == facts.get("sha256") else "is altered"


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    kinds = {stat.S_ISLNK: "a link", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_one, name in kinds.items() if is_one(mode)), "a device")


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
        is_best = _is_best(parent, iteration, metrics, retention.best)
        most_shared = 1 if is_best else _most_shared(retention.last)
        _write_manifest(publication.folder, iteration, metrics, most_shared)
    except BaseException:
        shutil.rmtree(publication.folder, ignore_errors=True)
        raise
    # Every step is synced before the next one relies on it: a rename may reach the disk before the data it names.
    publication.folder.rename(publication.place)
    _sync(parent)
    _point(LAST, publication.place)
    if is_best:
        _point(BEST, publication.place)
    _sync(parent)
    _prune(run_dir, publication.place, retention.last)


def _free_place(parent: Path, iteration: int) -> Path:
    """Return the path of the new checkpoint: beside the one of the same iteration, if there is one, which is removed
    afterwards."""
    names = itertools.chain([f"{iteration:06d}"], (f"{iteration:06d}-{count}" for count in itertools.count(2)))
    return next(place for name in names if not (place := parent / name).exists())


def _most_shared(last: int) -> int:
    """Return how many checkpoints may have a file in common. Of three or more that are kept, damage to one file then
    leaves some whole."""
    return max(last - 1, 2) if last else MOST_SHARED


def _is_at(path: Path, other: Path) -> bool:
    """Return whether a file is linked to another place, too."""
    return path.stat().st_nlink > 1 and other.exists() and path.samefile(other)


def _write_manifest(folder: Path, iteration: int, metrics: Mapping[str, float], most_shared: int) -> None:
    """Write the manifest of a new checkpoint, and copy the files that more than `most_shared` checkpoints, or the best
    one, would have in common with it."""
    files = {}
    last, best = folder.parent / LAST, folder.parent / BEST
    known = Manifest.read(last.resolve()).files if last.exists() else {}
    for path in files_in(folder):
        _sync(path)
        name = str(path.relative_to(folder))
        # The same file as in the checkpoint before, which has read it; if it was altered since, its hash tells.
        is_known = name in known and _is_at(path, last / name)
        if path.stat().st_nlink > most_shared or _is_at(path, best / name):
            with replacing(path) as copied:
                shutil.copyfile(path, copied)
        files[name] = known[name] if is_known else {"size": path.stat().st_size, "sha256": digest(path)}
    (folder / MANIFEST).write_text(Manifest(iteration=iteration, metrics=metrics, files=files).to_json())
    _sync(folder / MANIFEST)
    for directory in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(directory)


def _point(name: str, place: Path) -> None:
    """Make the link `name` lead to a checkpoint, atomically."""
    link = place.with_name(f".{name}.tmp")
    link.symlink_to(place.name)
    link.replace(place.with_name(name))


def _is_best(parent: Path, iteration: int, metrics: Mapping[str, float], metric: str | None) -> bool:
    """Return whether a new checkpoint is better than the best one so far; on a tie, only if it is of the same
    iteration."""
    if metric is None or metric not in metrics:
        return False
    try:
        best = Manifest.read((parent / BEST).resolve())
    except DamageError:
        return True
    value = best.metrics.get(metric, float("-inf"))
    return metrics[metric] > value or (metrics[metric] == value and iteration == best.iteration)


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
