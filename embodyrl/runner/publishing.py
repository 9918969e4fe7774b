"""Checkpoints that are whole or not there: written beside their place, synced, hashed in a manifest, then renamed.

Whatever happens at whatever moment, `last` leads to a whole checkpoint once one has been published: a folder gets its
name when it is complete, no name is ever taken from a folder that `last` leads to, and what is not wanted any more goes
after what replaces it has come.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from embodyrl.runner.checkpoint import (
    BEST,
    CHECKPOINTS,
    LAST,
    MANIFEST,
    DamageError,
    Manifest,
    digest,
    files_in,
    published,
)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints of a run are kept."""

    last: int = 0
    """So many of the newest; 0: all."""
    best: str | None = None
    """Metric by which the best one is kept as well (the larger, the better); None: there is no best one."""


@dataclass(kw_only=True)
class Publication:
    """A checkpoint that is being written."""

    folder: Path
    """Where its files go meanwhile."""
    place: Path
    """Where it will be."""


@contextmanager
def writing(
    run_dir: Path, iteration: int, *, metrics: Mapping[str, float], retention: Retention
) -> Iterator[Publication]:
    """A folder that becomes the checkpoint of `iteration`, and `last`, when the block ends without an exception.

    Args:
        run_dir: of the run; this process must be the only one that saves there.
        iteration: iterations done.
        metrics: what the evaluation after that iteration found, if there was one.
        retention: which checkpoints stay.
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
    publication.folder.rename(publication.place)
    _sync(parent)
    _point(LAST, publication.place)
    if _is_best(publication.place, retention.best):
        _point(BEST, publication.place)
    _sync(parent)
    _prune(run_dir, publication.place, retention.last)


def _free_place(parent: Path, iteration: int) -> Path:
    """Where the checkpoint goes: beside the one of the same iteration, if there is one, which is removed afterwards."""
    names = itertools.chain([f"{iteration:06d}"], (f"{iteration:06d}-{count}" for count in itertools.count(2)))
    return next(place for name in names if not (place := parent / name).exists())


def _write_manifest(folder: Path, iteration: int, metrics: Mapping[str, float]) -> None:
    files = {}
    for path in files_in(folder):
        _sync(path)
        files[str(path.relative_to(folder))] = {"size": path.stat().st_size, "sha256": digest(path)}
    (folder / MANIFEST).write_text(Manifest(iteration=iteration, metrics=metrics, files=files).to_json())
    _sync(folder / MANIFEST)
    for directory in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(directory)


def _point(name: str, place: Path) -> None:
    """Make the link `name` lead to a checkpoint; there is no moment without it."""
    link = place.with_name(f".{name}.tmp")
    link.symlink_to(place.name)
    link.replace(place.with_name(name))


def _is_best(place: Path, metric: str | None) -> bool:
    """Whether a new checkpoint is better than the best one so far; on a tie, only if it is of the same iteration."""
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
    """Remove what the newest one replaces, and all but so many of the last ones, but never where a link leads."""
    numbered = published(run_dir)
    iteration = next(number for number, place in numbered if place == newest)
    older = [place for number, place in numbered if number < iteration]
    superseded = [place for number, place in numbered if number == iteration and place != newest]
    linked = {(run_dir / CHECKPOINTS / name).resolve() for name in (LAST, BEST)}
    excess = older[: max(len(older) - (last - 1), 0)] if last else []
    for place in [*superseded, *excess]:
        if place.resolve() not in linked:
            hidden = place.with_name(f".{place.name}.old")
            place.rename(hidden)  # at once, so that nobody finds half of it
            shutil.rmtree(hidden)


def _clear(parent: Path) -> None:
    """Remove what a process that was killed has left unfinished."""
    for path in [*parent.glob(".*.tmp"), *parent.glob(".*.old")]:
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
