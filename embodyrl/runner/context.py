"""What the loop, its evaluations and its checkpoints share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from embodyrl.config import LoadedConfig
from embodyrl.errors import without_controls
from embodyrl.methods.learner import Learner
from embodyrl.rollout.replay import Replay
from embodyrl.rollout.rollouts import Rollouts
from embodyrl.runner.callbacks import SimulatorHealth, Warnings
from embodyrl.runner.rundir import RunDir
from embodyrl.runner.state import (
    Progress,
)
from embodyrl.tracking import Sink
from embodyrl.tracking.clock import Phase, divide_waiting

if TYPE_CHECKING:  # needs pyarrow, and only runs on demonstrations need it
    pass


class RunContext:
    """The parts of a run.

    Args:
        loaded: the whole config, and where it came from.
        directory: of the run.
        rollouts, learner, sinks: built from the config by `opening.open_runner`.
        progress: counters of the run so far.
        started: `time.monotonic()` when the program began, for wall-clock figures.
        replay: to learn from, or None.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        directory: RunDir,
        *,
        rollouts: Rollouts,
        learner: Learner,
        sinks: Sequence[Sink],
        progress: Progress,
        started: float,
        replay: Replay | None = None,
    ) -> None:
        self.loaded, self.config = loaded, loaded.config
        self.directory, self.run_dir = directory, directory.path
        self.rollouts, self.learner, self.replay = rollouts, learner, replay
        self.engine, self.ranks, self.clock = learner.engine, learner.engine.ranks, learner.engine.clock
        self.sinks, self.progress = sinks, progress
        precision = str(self.engine.precision).removeprefix("torch.")
        self.warnings = Warnings(self.config, precision, self.message)
        self.simulators = SimulatorHealth(rollouts, progress, self.config.env.name, self.message)
        self._earlier_s, self._started = progress.wall_s, started

    @property
    def wall_s(self) -> float:
        """Seconds since the run began, summed over its resumes."""
        return self._earlier_s + time.monotonic() - self._started

    def take_times(self, what: str = "time/unlogged") -> dict[str, float]:
        """Return the seconds since the last call: the total as `what`, and those of each phase under its prefix."""
        taken = divide_waiting(self.clock.take(), self.rollouts.take_rendering())
        for phase in Phase:
            self.progress.phases_s[phase] = self.progress.phases_s.get(phase, 0.0) + taken[phase]
        prefix = "time" if what == "time/iteration" else what
        split = {f"{prefix}/{name}": seconds for name, seconds in taken.items()}
        return {what: sum(taken[phase] for phase in Phase)} | split

    def message(self, text: str) -> None:
        """Write a line for people to run.log, and to the sinks that show messages."""
        if not self.ranks.is_first:
            return
        text = without_controls(text)  # parts of it come from simulators
        self.directory.note(text)
        for sink in self.sinks:
            sink.message(text)
