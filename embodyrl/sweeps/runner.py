"""Runs the members of a sweep, each as a process of its own and so many at once, until all have ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from embodyrl.placement.process import SpawnedProcess, describe_exit, signal_name, spawn
from embodyrl.placement.signals import STOPPED_CODES
from embodyrl.runner.rundir import RunDir
from embodyrl.runner.stopping import Stopper, end_program
from embodyrl.screen import duration
from embodyrl.sweeps.progress import Screen, Task
from embodyrl.sweeps.sharing import Share, variables

TICK_S = 0.2
"""Interval at which processes and signals are checked [s]."""
TAIL = 20_000
"""Bytes of the end of a log in which the reason of a failure is looked for."""
LONGEST_REASON = 1000
"""Characters of a reason that are shown: room for two long paths and the remedy behind them."""
_MAIN = "from embodyrl.placement.child import take_place; take_place(); from embodyrl.cli.main import main; main()"


class SweepRunner:
    """Starts tasks in their order, one in each share of the machine at a time.

    Args:
        tasks: the runs.
        shares: CPUs and GPUs of the runs at once.
        screen: shows them.
        leave: called with the number of a second Ctrl-C, when all runs have been killed.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        shares: Sequence[Share],
        screen: Screen,
        leave: Callable[[int], NoReturn] = end_program,
    ) -> None:
        self._waiting = list(tasks)
        self._shares = list(shares)
        self._screen = screen
        self._end = leave
        self._running: dict[SpawnedProcess, tuple[Task, Share]] = {}
        self._stopper = Stopper(unit="the iterations of all runs", leave=self._leave)
        self.stopped_by: int | None = None
        """Number of the signal that stopped the sweep."""

    def run(self) -> None:
        """Return once all runs have ended, or have saved after a signal."""
        with self._stopper:
            try:
                while self._running or (self._waiting and self.stopped_by is None):
                    self._check_signals()
                    while self._waiting and self._shares and self.stopped_by is None:
                        self._start(self._waiting.pop(0), self._shares.pop(0))
                    self._collect()
                    self._screen.update()
                    time.sleep(TICK_S)
            finally:
                self._kill()  # if this fails; else there is none

    def _start(self, task: Task, share: Share) -> None:
        try:
            process = _launch(task, share)
        except OSError as error:  # a full disk, too many processes, a file where its folder should be
            task.reason, task.state = f"could not be started: {error}", "failed"
            self._shares.append(share)
            self._screen.say(f"{task.name}: {task.reason}")
            return
        self._running[process] = (task, share)
        task.started, task.state = time.monotonic(), "running"
        self._screen.say(f"{task.name}: {'continues' if task.arguments[0] == 'resume' else 'started'}")

    def _collect(self) -> None:
        for process in [each for each in self._running if each.poll()]:
            task, share = self._running.pop(process)
            self._shares.append(share)
            task.metrics.read()
            task.seconds, task.started = time.monotonic() - (task.started or 0.0), None
            code = process.status
            if code == 0:
                task.state = "done"
            elif code is not None and code in STOPPED_CODES:
                task.state, task.reason = "stopped", f"by {signal_name(code - 128)}"
            else:
                task.state, task.reason = "failed", reason_in(task.log) or describe_exit(code)
            said = f" ({task.reason}; log: {task.log})" if task.state == "failed" else ""
            self._screen.say(f"{task.name}: {task.state} after {duration(task.seconds)}{said}")

    def _check_signals(self) -> None:
        """Hand the first signal that asks to stop on to all runs, which then save and end."""
        if self.stopped_by is None and self._stopper.agree():
            self.stopped_by = self._stopper.exit_code - 128
            for process, (task, _) in self._running.items():
                task.state = "stopping"
                os.kill(process.pid, self.stopped_by)

    def _kill(self) -> None:
        """End all runs and their processes at once; these die with the run's first process."""
        for process in self._running:
            process.kill()
        self._running.clear()

    def _leave(self, number: int) -> NoReturn:
        """End everything at once: somebody does not want to wait."""
        self._kill()
        self._end(number)


def _launch(task: Task, share: Share) -> SpawnedProcess:
    """Start the process of a run."""
    if not task.run_dir.exists():
        RunDir.prepare(task.run_dir)
    with task.log.open("ab") as log:
        place = json.dumps([os.getpid(), *share.cpus])
        return spawn(_MAIN, ["run", place, *task.arguments], env=variables(share), output=log)


def reason_in(log: Path) -> str:
    """Return the error that a run wrote last, in one line; empty if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if not errors and lines and lines[-1].endswith("nothing was started."):  # below the faults of a config
        lines.pop()
    text = errors[-1] if errors else lines[-1] if lines else ""
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."
