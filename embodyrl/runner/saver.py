"""Saves checkpoints: while the run waits, or in the background while it goes on."""

from __future__ import annotations

import copy
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError
from torch import nn

from embodyrl.config import LoadedConfig
from embodyrl.engine.lora import save_policy
from embodyrl.errors import RunError
from embodyrl.models.policy import Policy
from embodyrl.runner.checkpoint import CHECKPOINTS, LAST, POLICY, TRAINER, Manifest, Retention, writing
from embodyrl.runner.rundir import write_config
from embodyrl.runner.state import TrainerState, cloned


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

    def write(self, folder: Path) -> None:
        """Write everything into an existing folder."""
        for name in (POLICY, TRAINER):
            (folder / name).mkdir()
        save_policy(self.policy, folder / POLICY, self.loaded.config.model)
        self.trainer.save(folder / TRAINER)
        write_config(folder, self.loaded)

    def apart(self) -> Snapshot:
        """Return a copy on the CPU that shares no memory, so that the run can continue while it is written."""
        return replace(self, policy=copy_to_cpu(self.policy), trainer=self.trainer.apart())

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
        snapshot = snapshot.apart()
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
                snapshot.write(publication.folder)
        except (OSError, SafetensorError) as error:
            raise SaveError(self._explain(snapshot, error)) from error
        seconds = time.perf_counter() - start
        return Saved(place=publication.place, waited_s=seconds if waited_s is None else waited_s, seconds=seconds)

    def _explain(self, snapshot: Snapshot, error: Exception) -> str:
        free = shutil.disk_usage(self._run_dir).free
        last = self._run_dir / CHECKPOINTS / LAST
        needed = snapshot.nbytes
        older = "there is none before it"
        if last.exists():
            older = f"{last.resolve()} is whole and remains the last"
            needed = sum(facts["size"] for facts in Manifest.read(last.resolve()).files.values())
        return (
            f"the checkpoint of iteration {snapshot.iteration} could not be written to {self._run_dir}: {error}. It "
            f"takes about {needed} bytes, {free} are free there; {older}. Make room, then go on: "
            f"embodyrl resume {self._run_dir}"
        )


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
