"""The state of a run, and saving it: while the run waits, or in the background while it continues.

Besides the policy's weights it is counters, optimiser, random streams, simulators' states, and surplus groups. Nested
state is stored in two files that run no code when they are read: safetensors for the tensors, JSON for the rest. Where
the files of a checkpoint go is in `checkpoint.py`.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodyrl.config import LoadedConfig
from embodyrl.engine.lora import save_policy
from embodyrl.errors import DiskFull, RunError, shell_command
from embodyrl.models.policy import Policy
from embodyrl.rollout.batch import TrajectoryBatch, leaves
from embodyrl.rollout.episodes import FinalObservations, FinishedEpisode, Rollout
from embodyrl.rollout.replay import ReplayState
from embodyrl.runner.checkpoint import (
    POLICY,
    REPLAY,
    TRAINER,
    DamageError,
    Manifest,
    Retention,
    has_lost,
    writing,
)
from embodyrl.runner.reproduction import LOCK_FILE, Lock, weights_of, without_record
from embodyrl.runner.rundir import write_config
from embodyrl.runs import CHECKPOINTS, LAST

COUNTERS = "counters.json"
ENGINE = "engine"
SIMULATORS = "simulators"
SURPLUS = "surplus.safetensors"
WAITING = "waiting"
FOLLOWING = "following"
TENSORS, STRUCTURE = ".safetensors", ".json"
ADDED: dict[str, Any] = {"restore_mismatches": 0, "restores_exactly": True, "imitated": 0, "newest": {}}
"""Counters that the first checkpoints of this format lack, with the values that they get."""
FORMER = {"comes_back": "restores_exactly"}
"""Names of counters in earlier checkpoints."""


@dataclass(kw_only=True)
class Progress:
    """Counters of a run; part of every checkpoint."""

    iteration: int = 0
    env_steps: int = 0
    """Control steps of training."""
    train_s: float = 0.0
    """Seconds in iterations, without evaluation and saving."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, over iterations, evaluations and checkpoints; see `tracking.clock.Phase`."""
    wall_s: float = 0.0
    """Seconds altogether, over all processes that worked on the run."""
    restarts: int = 0
    """Simulator processes that died and were replaced."""
    restore_mismatches: int = 0
    """Number of times that a slot was not restored bit for bit from its saved state."""
    restores_exactly: bool = True
    """False once a slot was not restored bit for bit; mismatches that another version of the simulator explains do not
    count."""
    imitated: int = 0
    """Optimiser steps of imitation before the first iteration."""
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics of every evaluation, by iteration."""
    newest: dict[str, list[Any]] = field(default_factory=dict)
    """Of the newest training episodes, see `rollout.episodes.newest_with`."""

    @classmethod
    def of(cls, state: TrainerState) -> Progress:
        """Return the counters in a checkpoint.

        Raises:
            DamageError: some are missing, unknown or of a wrong type.
        """
        found = state.counters.get("progress")
        if isinstance(found, dict):
            found = ADDED | {FORMER.get(name, name): value for name, value in found.items()}
        check_alike(found, vars(cls()), "the checkpoint's progress")
        progress = cls(**found)  # type: ignore[arg-type]
        if not _are_episodes(progress.newest):
            raise DamageError("the checkpoint's newest episodes are no returns and successes. Use another checkpoint")
        return progress

    @property
    def latest(self) -> dict[str, float]:
        """Metrics of the evaluation after the latest iteration; empty if there was none."""
        return self.evaluations.get(str(self.iteration), {})

    def is_best_yet(self, metric: str) -> bool:
        """Return whether this iteration's evaluation beats those after all earlier ones."""
        evaluated = {int(key): found for key, found in self.evaluations.items() if metric in found}
        earlier = [found[metric] for iteration, found in evaluated.items() if 0 < iteration < self.iteration]
        return metric in self.latest and all(self.latest[metric] > value for value in earlier)


@dataclass(kw_only=True)
class TrainerState:
    """Everything that a run needs to continue, besides the policy's weights."""

    counters: dict[str, Any]
    """JSON: iteration, env steps, collector, first evaluation, ..."""
    engine: dict[str, Any]
    """`HybridEngine.state_dict`: optimiser and random streams."""
    simulators: list[bytes]
    """State of every slot; empty if no episode is in progress."""
    surplus: TrajectoryBatch | None = None
    """Groups that were collected and not learned from yet."""
    waiting: list[Rollout] = field(default_factory=list)
    """Rollouts that were collected ahead of learning, the oldest first."""
    replay: ReplayState | None = None
    """Past decisions that are learned from, if the algorithm does so."""

    def save(self, folder: Path, before: Path | None = None) -> None:
        """Write into an existing folder; `before` is that of the checkpoint before."""
        waiting = [
            {"finished": [asdict(episode) for episode in rollout.finished], "env_steps": rollout.env_steps}
            for rollout in self.waiting
        ]
        counters = self.counters | ({WAITING: waiting} if waiting else {})
        (folder / COUNTERS).write_text(json.dumps(counters, indent=2) + "\n")
        save_tree(self.engine, folder, ENGINE)
        (folder / SIMULATORS).mkdir()
        for slot, state in enumerate(self.simulators):
            (folder / SIMULATORS / f"slot_{slot:04d}.bin").write_bytes(state)
        if self.surplus is not None:
            self.surplus.save(folder / SURPLUS)
        if self.replay is not None:
            replay = Path(REPLAY).name
            (folder / replay).mkdir()
            self.replay.save(folder / replay, None if before is None else before / replay)
        for number, rollout in enumerate(self.waiting):
            rollout.batch.save(folder / f"{WAITING}_{number:04d}{TENSORS}")
            if rollout.following is not None:
                save_file(rollout.following.leaves(), folder / f"{FOLLOWING}_{number:04d}{TENSORS}")

    def detached_copy(self) -> TrainerState:
        """Return a copy on the CPU that shares no memory, so that the run can continue while it is written."""
        return TrainerState(
            counters=copy.deepcopy(self.counters),
            engine=map_tensors(cloned, self.engine),
            simulators=list(self.simulators),
            surplus=None if self.surplus is None else _copied(self.surplus),
            waiting=[replace(rollout, batch=_copied(rollout.batch)) for rollout in self.waiting],
            replay=self.replay,  # a copy already
        )

    @property
    def nbytes(self) -> int:
        """Approximate size of its files [bytes]."""
        batches = [rollout.batch for rollout in self.waiting] + ([] if self.surplus is None else [self.surplus])
        columns = [column for batch in batches for column in leaves(batch).values()]
        columns += [] if self.replay is None else self.replay.moments.values()
        tensors: int = sum(each.nbytes for each in [*tensors_in(self.engine), *columns])
        return tensors + sum(map(len, self.simulators))

    @classmethod
    def load(cls, folder: Path, *, with_replay: bool = True) -> TrainerState:
        """Read what `save` wrote; nothing that the files hold is executed.

        Args:
            folder: of a checkpoint, which has been verified.
            with_replay: read that of past decisions, too.

        Raises:
            DamageError: a file is missing or damaged.
        """
        replay = folder / Path(REPLAY).name
        try:
            counters = dict(json.loads((folder / COUNTERS).read_text()))
            waiting = counters.pop(WAITING, [])
            return cls(
                counters=counters,
                engine=dict(load_tree(folder, ENGINE)),
                simulators=[path.read_bytes() for path in sorted((folder / SIMULATORS).glob("slot_*.bin"))],
                surplus=TrajectoryBatch.load(folder / SURPLUS) if (folder / SURPLUS).exists() else None,
                waiting=[
                    Rollout(
                        batch=TrajectoryBatch.load(folder / f"{WAITING}_{number:04d}{TENSORS}"),
                        finished=[FinishedEpisode(**episode) for episode in each["finished"]],
                        env_steps=each["env_steps"],
                        following=_following_in(folder / f"{FOLLOWING}_{number:04d}{TENSORS}"),
                    )
                    for number, each in enumerate(waiting)
                ],
                replay=ReplayState.load(replay) if with_replay and replay.is_dir() else None,
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DamageError(
                f"{folder} does not hold the state of a run ({type(error).__name__}: {error}): use another checkpoint"
            ) from error


def _following_in(path: Path) -> FinalObservations | None:
    """Return what followed chunks of a rollout; None if nothing of it was saved."""
    return FinalObservations.from_leaves(load_file(path) if path.exists() else {})


def _copied(batch: TrajectoryBatch) -> TrajectoryBatch:
    return batch.take(torch.arange(batch.size[1]), "B")


def _are_episodes(newest: dict[str, Any]) -> bool:
    """Return whether a checkpoint's newest episodes have the form that `Progress.newest` has."""
    returns, successes = newest.get("returns", []), newest.get("successes", [])
    lists = isinstance(returns, list) and isinstance(successes, list) and len(returns) == len(successes)
    return lists and all(type(each) is float for each in returns) and {*map(type, successes)} <= {bool, type(None)}


def check_alike(found: Any, expected: Any, where: str) -> None:
    """Compare the structure of a checkpoint's state with that of a run of the same config at its start.

    Raises:
        DamageError: names every value that is missing, unknown, of another type, or of another length.
    """
    if faults := list(_differences(found, expected, "")):
        raise DamageError(f"{where} does not fit this run: {'; '.join(faults)}. Use another checkpoint")


def _differences(found: Any, expected: Any, name: str) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict) and expected:
        yield from (f"{name}{key} is missing" for key in expected.keys() - found.keys())
        yield from (f"{name}{key} is unknown" for key in found.keys() - expected.keys())
        for key in expected.keys() & found.keys():
            yield from _differences(found[key], expected[key], f"{name}{key}.")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            yield f"{name[:-1]} has {len(found)} entries instead of {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from _differences(one, other, f"{name}{index}.")
    elif not isinstance(found, int | float if isinstance(expected, float) else type(expected)):
        yield f"{name[:-1]} is {found!r} instead of a {type(expected).__name__}"


# ---- saving


class SaveError(RunError):
    """Raised when a checkpoint could not be written; earlier ones are unchanged."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Contents of a checkpoint."""

    iteration: int
    metrics: dict[str, float]
    """Of the evaluation after this iteration; empty if there was none."""
    policy: Policy
    loaded: LoadedConfig
    trainer: TrainerState
    lock: Lock | None = None
    """What the simulators and the policy give; None if no evaluation has shown it yet."""

    def write(self, folder: Path, before: Path | None) -> str | None:
        """Write everything into an existing folder; `before` is the checkpoint that this run saved before. Returns why
        there is no record of reproduction, if it could not be written: it is not needed to continue."""
        for name in (POLICY, TRAINER):
            (folder / name).mkdir()
        earlier = None if before is None or has_lost(before, POLICY) else before / POLICY
        save_policy(self.policy, folder / POLICY, self.loaded.config.model, earlier)
        self.trainer.save(folder / TRAINER, None if before is None else before / TRAINER)
        write_config(folder, self.loaded)
        try:
            if self.lock is not None:
                replace(self.lock, weights=weights_of(self.policy)).save(folder / LOCK_FILE)
        except Exception as error:
            return without_record(error)
        return None

    def detached_copy(self) -> Snapshot:
        """Return a copy on the CPU that shares no memory, so that the run can continue while it is written."""
        return replace(self, policy=copy_to_cpu(self.policy), trainer=self.trainer.detached_copy())

    @property
    def nbytes(self) -> int:
        """Approximate size of the checkpoint if the policy saves all of its weights [bytes]."""
        weights: int = sum(each.nbytes for each in self.policy.state_dict().values())
        return weights + self.trainer.nbytes


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was published."""

    place: Path
    waited_s: float
    """Seconds that the run stood still for it."""
    seconds: float
    """Seconds in total."""
    warning: str | None = None
    """What it lacks."""


class Saver:
    """Saves the checkpoints of one run, one at a time. As a context it waits at the end for the one under way.

    Args:
        run_dir: of the run.
        retention: checkpoints to keep.
        in_background: copy the state, and write it while the run continues.
    """

    def __init__(self, run_dir: Path, retention: Retention, *, in_background: bool) -> None:
        self._run_dir = run_dir
        self._retention = retention
        self._thread = ThreadPoolExecutor(1, "save") if in_background else None
        self._pending: Future[Saved] | None = None
        self._place: Path | None = None

    @property
    def lost_last(self) -> bool:
        """Whether the replay's files have been removed or cut short in the checkpoint that this saver wrote last, or
        continued from, or there is none."""
        return self._pending is None and (self._place is None or has_lost(self._place, REPLAY))

    def continue_from(self, place: Path) -> None:
        """Note the checkpoint that the run continues from: what has not changed since is linked to its files."""
        self._place = place

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._pending is not None and (fault := self._pending.exception()) is not None:
            if error is None:
                raise fault
            error.add_note(str(fault))

    def save(self, snapshot: Snapshot) -> list[Saved]:
        """Save; in the background, wait for the previous one first. Returns what was published since the last call.

        Raises:
            SaveError: this checkpoint, or in the background the previous one, could not be written.
        """
        if self._thread is None:
            return [self.save_now(snapshot)]
        start = time.perf_counter()
        finished = self.wait()
        snapshot = snapshot.detached_copy()
        self._pending = self._thread.submit(self._write, snapshot, start, time.perf_counter() - start)
        return finished

    def save_now(self, snapshot: Snapshot) -> Saved:
        """Save while the run waits, with no copy; nothing may be under way.

        Raises:
            SaveError: the checkpoint could not be written.
        """
        return self._write(snapshot, time.perf_counter(), waited_s=None)

    def poll(self) -> list[Saved]:
        """Return what was published in the background since the last call; does not wait.

        Raises:
            SaveError: it could not be written.
        """
        return self.wait() if self._pending is not None and self._pending.done() else []

    def wait(self) -> list[Saved]:
        """Wait for the checkpoint under way; returns what was published in the background since the last call."""
        pending, self._pending = self._pending, None
        return [] if pending is None else [pending.result()]

    def _write(self, snapshot: Snapshot, start: float, waited_s: float | None) -> Saved:
        keep = self._retention
        try:
            with writing(self._run_dir, snapshot.iteration, metrics=snapshot.metrics, retention=keep) as publication:
                warning = snapshot.write(publication.folder, self._place)
        except (OSError, SafetensorError) as error:
            raise SaveError(self._explain(snapshot, error)) from error
        self._place = publication.place
        seconds = time.perf_counter() - start
        waited_s = seconds if waited_s is None else waited_s
        return Saved(place=publication.place, waited_s=waited_s, seconds=seconds, warning=warning)

    def _explain(self, snapshot: Snapshot, error: Exception) -> str:
        free = shutil.disk_usage(self._run_dir).free
        last = self._run_dir / CHECKPOINTS / LAST
        needed = snapshot.nbytes
        older = "there is none before it"
        if last.exists():
            older = f"{last.resolve()} is whole and remains the last"
            needed = sum(facts["size"] for facts in Manifest.read(last.resolve()).files.values())
        again = f"continue: {shell_command('resume', self._run_dir)}"
        what = f"the checkpoint of iteration {snapshot.iteration} could not be written to {self._run_dir}: {error}"
        if free > needed and not DiskFull.is_why(error):
            return f"{what}; {older}. Once that is resolved, {again}"
        return f"{what}. It takes about {needed} bytes, {free} are free there; {older}. Make room, then {again}"


def copy_to_cpu(policy: Policy) -> Policy:
    """Return the policy on the CPU, without gradients: weights that learn are copied, frozen ones shared."""
    # Sharing frozen weights keeps a checkpoint of adapters from copying a whole model.
    copies: dict[int, object] = {}
    for parameter in policy.parameters():
        learns = parameter.requires_grad
        copies[id(parameter)] = nn.Parameter(cloned(parameter.data), requires_grad=False) if learns else parameter
    for buffer in policy.buffers():
        copies[id(buffer)] = cloned(buffer)
    return copy.deepcopy(policy, copies)


# ---- nested state in two files


def save_tree(tree: Any, folder: Path, name: str) -> None:
    """Write `<name>.safetensors` and `<name>.json` into an existing folder.

    Args:
        tree: dicts (keys: str or int), lists and tuples of numbers, strings, None and tensors, nested at will.
        folder: to write into.
        name: of the files.

    Raises:
        TypeError: it holds something else; names the key.
    """
    tensors: dict[str, Tensor] = {}
    structure = _encode(tree, name, tensors)
    save_file(_apart(tensors), folder / (name + TENSORS))
    (folder / (name + STRUCTURE)).write_text(json.dumps(structure) + "\n")


def load_tree(folder: Path, name: str) -> Any:
    """Read what `save_tree` wrote; tensors are on the CPU.

    Raises:
        OSError, ValueError, KeyError, safetensors.SafetensorError: the files are missing or damaged.
    """
    structure = json.loads((folder / (name + STRUCTURE)).read_text())
    return _decode(structure, load_file(folder / (name + TENSORS)))


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a tree with `function(tensor)` in place of each of its tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a tree."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, tree)  # type: ignore[func-returns-value]
    return iter(found)


def cloned(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def _encode(node: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a node as JSON, in which an object has one key that names its kind; its tensors go to `tensors`."""
    if isinstance(node, Tensor):
        if where in tensors:
            raise TypeError(f"two tensors of the state would be called {where}")
        tensors[where] = node.detach().cpu().contiguous()
        return {"tensor": where}
    if isinstance(node, dict):
        return {"dict": [[key, _encode(value, f"{where}/{key}", tensors)] for key, value in node.items()]}
    if isinstance(node, list | tuple):
        items = [_encode(value, f"{where}/{index}", tensors) for index, value in enumerate(node)]
        return {"tuple": items} if isinstance(node, tuple) else items
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"{where} is a {type(node).__name__}, which a checkpoint cannot hold")


def _decode(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "dict":
        return {key: _decode(value, tensors) for key, value in content}
    raise ValueError(f"{kind!r} stands for nothing")


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without shared memory, which safetensors refuses (weights that are used twice)."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return apart
