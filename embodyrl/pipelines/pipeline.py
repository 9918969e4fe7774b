"""An iteration as a list of stages: building it from a config, checking it before anything runs, running, drawing.

A stage is a function with a name. It declares the columns of the batch and the resources that it reads, writes and
changes; a name with a question mark (`values?`) is optional. Stages run in order, one after the other.
"""

from __future__ import annotations

import html
import itertools
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config, InsertedStage
from embodyrl.errors import UnknownNameError, UserError, did_you_mean, listed
from embodyrl.registry import ALGORITHMS, STAGES

if TYPE_CHECKING:  # the stages of a config can be looked at without torch
    from embodyrl.data.batches import Demonstrations
    from embodyrl.data.transitions import Transitions
    from embodyrl.engine.hybrid import HybridEngine
    from embodyrl.rollout.batch import TrajectoryBatch
    from embodyrl.rollout.episodes import Rollout
    from embodyrl.rollout.replay import Replay
    from embodyrl.rollout.rollouts import Rollouts

RESOURCES = ("simulators", "policy", "demonstrations", "replay")
"""Available before the first stage: `Iteration.collector`, `Iteration.engine`, `Iteration.demonstrations` and
`Iteration.replay`."""

NAME = re.compile(r"[A-Za-z]\w*")


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


def plain(names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once, without its question mark."""
    return tuple(dict.fromkeys(name.removesuffix("?") for name in names))


def certain(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that have no question mark."""
    return tuple(name for name in names if not name.endswith("?"))


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

    def to_mermaid(self) -> str:
        """Draw the stages as a Mermaid flow chart, which Markdown viewers show; edges carry columns."""
        lines = ["flowchart TD"]
        lines += [f'  {each.name}["<b>{each.name}</b><br/>{"<br/>".join(_notes(each))}"]' for each in self.stages]
        for (source, target), columns in self._edges().items():
            link = f'-- "{", ".join(columns)}" -->' if columns else "-.->"
            lines.append(f"  {source} {link} {target}")
        return "\n".join(lines) + "\n"

    def _edges(self) -> dict[tuple[str, str], list[str]]:
        """Return the columns from stage to stage, each from the last that wrote or changed it; none between stages that
        only follow each other."""
        edges: dict[tuple[str, str], list[str]] = {}
        last: dict[str, str] = {}
        for before, stage in zip((None, *self.stages), self.stages, strict=False):
            # An edge starts where the column was changed last, not where it was first written.
            for column in stage.inputs:
                if column in last:
                    edges.setdefault((last[column], stage.name), []).append(column)
            if before is not None:
                edges.setdefault((before.name, stage.name), [])
            last |= {column: stage.name for column in stage.outputs if column in last or column in plain(stage.writes)}
        return edges


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


def _notes(stage: Stage) -> list[str]:
    """Return the lines below a stage's name: its function, and the resources it uses."""
    changes = [name for name in RESOURCES if name in plain(stage.changes)]
    reads = [name for name in RESOURCES if name in plain(stage.reads) and name not in changes]
    notes = [stage.function if isinstance(stage.function, str) else stage.function.__name__]
    notes += [f"reads {', '.join(reads)}"] if reads else []
    notes += [f"changes {', '.join(changes)}"] if changes else []
    return [html.escape(note) for note in notes]


Where = Callable[[str], tuple[str, ...]]
"""Returns the settings that added a stage, by its name."""


def check_stages(stages: Sequence[Stage], where: Where = lambda name: ()) -> Iterator[ConfigIssue]:
    """Find issues that keep stages from running one after the other: of their names, and if there are none, of their
    columns."""
    issues = list(_check_names(stages, where))
    yield from issues or _check_columns([stage.declared() for stage in stages], where)


def _check_names(stages: Sequence[Stage], where: Where) -> Iterator[ConfigIssue]:
    """Find names that occur twice or are invalid, and functions that are not registered."""
    names = [stage.name for stage in stages]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield ConfigIssue(where(name), f"{names.count(name)} stages are called {name!r}", "rename all but one")
        if not NAME.fullmatch(name):
            yield ConfigIssue(where(name), f"{name!r} is no name for a stage", "use letters, digits and _")
    for stage in stages:
        try:
            stage.declared()
        except UnknownNameError as error:
            yield ConfigIssue(where(stage.name), f"stage {stage.name!r}: {error}", "name one of them")


def _check_columns(stages: Sequence[Stage], where: Where) -> Iterator[ConfigIssue]:
    """Find columns that are written twice, and those that are read and not written before."""
    for one, other in itertools.combinations(stages, 2):
        if both := [column for column in plain(one.writes) if column in plain(other.writes)]:
            what = f"stages {one.name!r} and {other.name!r} write the same column{'s' if len(both) > 1 else ''}"
            hint = "let one write and the others declare it under `changes`"
            yield ConfigIssue((*where(other.name), *where(one.name)), f"{what} {listed(both)}", hint)
    writers = {column: stage.name for stage in reversed(stages) for column in plain(stage.writes)}
    known, there = sorted({*writers, *RESOURCES}), set(RESOURCES)
    for stage in stages:
        for column in set(RESOURCES).intersection(plain(stage.writes)):
            message = f"stage {stage.name!r} writes {column!r}, which is a resource"
            yield ConfigIssue(where(stage.name), message, "declare it under `changes`")
        wanted = [*(("reads", name) for name in certain(stage.reads))]
        wanted += [("changes", name) for name in certain(stage.changes)]
        for verb, column in wanted:
            what, writer = f"stage {stage.name!r} {verb} column {column!r}", writers.get(column)
            if column not in there and writer is None:
                hint = did_you_mean(column, known, otherwise=f"one of {', '.join(known)}")
                yield ConfigIssue(where(stage.name), f"{what}, which no stage writes", hint)
            elif column not in there:
                yield ConfigIssue(where(stage.name), f"{what} before stage {writer!r} writes it", "change their order")
        there.update(plain(stage.writes))


def build_pipeline(config: Config) -> Pipeline:
    """Build the iteration that a config asks for: the algorithm's stages, or those of `pipeline.function`, with the
    changes of the section `pipeline`. Imports no stage.

    Raises:
        PipelineError: the stages do not fit together, or the config changes stages that are not there.
        UnknownNameError: there is no such algorithm.
    """
    changes = config.pipeline
    stages = _of_function(config) if changes.function else list(ALGORITHMS.load(config.algorithm.name)(config))
    unknown = list(_unknown_names(config, stages))
    # In this order: what was dropped cannot be replaced, and a new stage finds its place among those that are left.
    stages = [stage for stage in stages if stage.name not in changes.drop]
    stages = [Stage(each.name, changes.replace[each.name]) if each.name in changes.replace else each for each in stages]
    misplaced = [issue for number in range(len(changes.insert)) for issue in _insert(stages, number, changes.insert)]

    def where(name: str) -> tuple[str, ...]:
        return tuple(_settings(name, config))

    # With an unknown name stages are in the wrong place, so issues of their columns would only mislead.
    check = _check_names if unknown else check_stages
    if issues := [*unknown, *misplaced, *check(stages, where)]:
        raise PipelineError(issues)
    return Pipeline(stages)


def _of_function(config: Config) -> list[Stage]:
    """Call the user's own function for the stages; its module was imported when the config was loaded."""

    def wrong(message: str, hint: str) -> PipelineError:
        return PipelineError([ConfigIssue(("pipeline.function",), message, hint)])

    name = str(config.pipeline.function)
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise wrong(f"pipeline.function = {name!r} names no function", "write module:function")
    if module not in sys.modules:
        raise wrong(f"the module of {name} was not imported", "load the config with load_config")
    known = vars(sys.modules[module])
    if attribute not in known:
        functions = sorted(each for each, value in known.items() if callable(value) and not each.startswith("_"))
        hint = did_you_mean(attribute, functions, otherwise=f"one of {', '.join(functions) or 'none'}")
        raise wrong(f"module {module!r} has no {attribute!r}", hint)
    try:
        stages = known[attribute](config)
    except Exception as error:  # whatever a stranger's function raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{name} failed: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        raise wrong(what, "fix the function") from error
    if not isinstance(stages, list) or not all(isinstance(stage, Stage) for stage in stages):
        raise wrong(f"{name} returned a {type(stages).__name__}", "return a list of embodyrl.pipelines.Stage")
    return stages


def _unknown_names(config: Config, stages: Sequence[Stage]) -> Iterator[ConfigIssue]:
    """Find names in the section `pipeline` that no stage has."""
    changes, known = config.pipeline, [stage.name for stage in stages]
    left = [*(name for name in known if name not in changes.drop), *(each.name for each in changes.insert)]
    named = [(f"pipeline.drop.{place}", name, known) for place, name in enumerate(changes.drop)]
    named += [(f"pipeline.replace.{name}", name, known) for name in changes.replace]
    for number, inserted in enumerate(changes.insert):
        for key, names in (("after", inserted.after), ("before", inserted.before)):
            named += [(f"pipeline.insert.{number}.{key}.{place}", name, left) for place, name in enumerate(names)]
    for setting, name, there in named:
        if name not in there:
            hint = did_you_mean(name, there, otherwise=f"one of {', '.join(there) or 'none'}")
            yield ConfigIssue((setting,), f"the iteration has no stage {name!r}", hint)


def _insert(stages: list[Stage], number: int, insertions: Sequence[InsertedStage]) -> Iterator[ConfigIssue]:
    """Insert a stage where its `after` and `before`, and those of earlier insertions, allow; within these limits right
    after the last stage that writes or changes a column it names. Yields an issue if there is no such place."""
    inserted, earlier = insertions[number], insertions[:number]
    followed = {*inserted.after, *(each.name for each in earlier if inserted.name in each.before)}
    preceded = {*inserted.before, *(each.name for each in earlier if inserted.name in each.after)}
    low = max((place + 1 for place, stage in enumerate(stages) if stage.name in followed), default=0)
    high = min((place for place, stage in enumerate(stages) if stage.name in preceded), default=len(stages))
    if low > high:
        one, other = listed(sorted(followed)), listed(sorted(preceded))
        message = f"stage {inserted.name!r} cannot come after {one} and before {other}"
        names = ", ".join(stage.name for stage in stages)
        yield ConfigIssue((f"pipeline.insert.{number}",), message, f"the others run in the order {names}")
    columns = set(_declared(Stage(inserted.name, inserted.stage)).inputs) - set(RESOURCES)
    # Columns of the batch tell the place better than resources, which nearly every stage uses.
    behind = [place + 1 for place, stage in enumerate(stages) if columns & set(_declared(stage).outputs)]
    wanted = max(behind, default=low or high)
    stages.insert(max(low, min(wanted, high)), Stage(inserted.name, inserted.stage))


def _declared(stage: Stage) -> Stage:
    """Return the stage with the columns that its function declares, if that is registered."""
    return stage.declared() if stage.function in STAGES else stage


def _settings(name: str, config: Config) -> Iterator[str]:
    """Yield the settings that may have to be changed for a stage: those that added it, the section, the algorithm."""
    changes = config.pipeline
    yield from (f"pipeline.insert.{number}" for number, each in enumerate(changes.insert) if each.name == name)
    if name in changes.replace:
        yield f"pipeline.replace.{name}"
    if changes.drop:
        yield "pipeline.drop"
    if changes.function is not None:
        yield "pipeline.function"
    yield from ("pipeline", "algorithm.name")
