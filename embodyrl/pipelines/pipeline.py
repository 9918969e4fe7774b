"""An iteration as a list of stages: what a stage is, and running them.

A stage is a function with a name. It declares the columns of the batch and the resources that it reads, writes and
changes; a name with a question mark (`values?`) is optional. Stages run in order, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config
from embodyrl.errors import UserError, listed
from embodyrl.pipelines.checks import certain, check_stages, plain
from embodyrl.registry import STAGES

if TYPE_CHECKING:  # the stages of a config can be looked at without torch
    from embodyrl.data.batches import Demonstrations
    from embodyrl.data.transitions import Transitions
    from embodyrl.engine.hybrid import HybridEngine
    from embodyrl.rollout.batch import TrajectoryBatch
    from embodyrl.rollout.episodes import Rollout
    from embodyrl.rollout.replay import Replay
    from embodyrl.rollout.rollouts import Rollouts


@dataclass(kw_only=True)
class Iteration:
    """Resources and data of the stages of one iteration."""

    config: Config
    learner: Any
    """The method (`methods.learner.Learner`)."""
    collector: Rollouts
    """The resource `simulators`."""
    engine: HybridEngine
    """The resource `policy`."""
    number: int = 1
    """Of the iteration in the run, from 1."""
    demonstrations: Demonstrations | None = None
    """The resource `demonstrations`, if the config names some."""
    transitions: Transitions | None = None
    """The same as decisions for critics, if the algorithm has both."""
    replay: Replay | None = None
    """The resource `replay`, if the algorithm learns from one."""
    batch: TrajectoryBatch | None = None
    """Set by the stage that collects; others add columns to it or put another one in its place."""
    rollouts: list[Rollout] = field(default_factory=list)
    """All that was collected."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the stages."""
    warn: Callable[[str, str], None] = lambda kind, text: None
    """Shows a warning (kind, text) on the screen and in run.log, once for each kind."""


StageFunction = Callable[[Iteration], None]


class PipelineError(UserError):
    """Raised with all issues of a list of stages at once, before any of them runs."""

    exit_code = 2

    def __init__(self, issues: Sequence[ConfigIssue]) -> None:
        self.issues = tuple(issues)
        super().__init__("the iteration's stages are wrong:\n" + "\n".join(f"  {issue}" for issue in issues))


class StageError(UserError):
    """Raised when a stage does not write a column that it declares."""


@dataclass(frozen=True)
class Stage:
    """A step of an iteration.

    A function from the registry declares its columns where it is registered; those given here are added.
    """

    name: str
    function: str | StageFunction
    """A function, or its name in the registry."""
    reads: tuple[str, ...] = ()
    """Columns of the batch, or resources, that it reads."""
    writes: tuple[str, ...] = ()
    """Columns that it adds."""
    changes: tuple[str, ...] = ()
    """Columns that it replaces, or resources that it uses up or alters; it may read them too."""
    when: Callable[[Iteration], bool] | None = None
    """Says of every iteration whether the stage runs; None: it does in all."""
    apart: bool = False
    """True if it does without large columns that lie with other ranks, or fetches them itself."""

    def declared(self) -> Stage:
        """Return the stage with all columns that its function declares.

        Raises:
            UnknownNameError: no such function is registered.
        """
        if not isinstance(self.function, str):
            return self
        entry = STAGES.entry(self.function)
        reads, writes, changes = ((*getattr(entry, key), *getattr(self, key)) for key in ("reads", "writes", "changes"))
        return replace(self, reads=reads, writes=writes, changes=changes, apart=entry.apart)

    def load(self) -> StageFunction:
        """Return the function, imported if need be."""
        found: StageFunction = STAGES.load(self.function) if isinstance(self.function, str) else self.function
        return found

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of all that it reads, without question marks."""
        return plain((*self.reads, *self.changes))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all that it adds or replaces, without question marks."""
        return plain((*self.writes, *self.changes))


class Pipeline:
    """An iteration that can be run.

    Args:
        stages: in order.

    Raises:
        PipelineError: the stages do not fit together; lists all issues.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        if issues := list(check_stages(stages)):
            raise PipelineError(issues)
        self.stages = tuple(stage.declared() for stage in stages)

    def loaded(self) -> Pipeline:
        """Return the pipeline with its functions imported, so that what is missing is found before the first iteration.
        See `registry.Entry.load` for what is raised."""
        return Pipeline([replace(stage, function=stage.load()) for stage in self.stages])

    def run(self, iteration: Iteration) -> None:
        """Run every stage; fills `iteration.batch`, and `iteration.metrics` with theirs and `time/stage/<name>` [s].

        An exception of a stage ends the iteration; a note in it names the stage.

        Raises:
            StageError: a stage leaves out a column that it declares to write.
        """
        # Errors are not translated here: only a note is added, so that a debugger stops at what failed.
        for stage in self.stages:
            if stage.when is not None and not stage.when(iteration):
                continue
            start = time.perf_counter()
            try:
                # Images that other ranks hold come only for the stages that declare them.
                with _large_columns(iteration, stage):
                    stage.load()(iteration)
                if missing := list(_missing(iteration.batch, certain(stage.writes))):
                    raise StageError(f"stage {stage.name!r} declares that it writes {listed(missing)}, but did not")
            except BaseException as error:
                error.add_note(f"(in stage {stage.name!r} of the iteration)")
                raise
            iteration.metrics[f"time/stage/{stage.name}"] = time.perf_counter() - start


def _missing(batch: TrajectoryBatch | None, names: Iterable[str]) -> Iterator[str]:
    """Find columns that are on no rank."""
    return (name for name in names if batch is None or not (name in batch or batch.may_lie_apart(name)))


@contextmanager
def _large_columns(iteration: Iteration, stage: Stage) -> Iterator[None]:
    """Give a stage the large columns that it declares, for the length of a block, where they lie with other ranks. One
    that it changes stays."""
    if stage.apart or iteration.batch is None or not any(map(iteration.batch.may_lie_apart, stage.inputs)):
        yield
        return
    from embodyrl.rollout.batch import leaves
    from embodyrl.rollout.spread import bring_large, leave_out

    exchange, before = iteration.engine.exchange, leaves(iteration.batch).keys()
    iteration.batch = bring_large(iteration.batch, exchange, [True] * exchange.ranks.size, stage.inputs)
    brought = leaves(iteration.batch).keys() - before
    yield
    kept = plain(stage.changes)
    iteration.batch = leave_out(iteration.batch, [name for name in brought if name.partition("/")[0] not in kept])
