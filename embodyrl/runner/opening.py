"""Building a runner from a loaded config, and closing everything at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.config import LoadedConfig
from embodyrl.files import write_whole
from embodyrl.pipelines.build import build_pipeline
from embodyrl.pipelines.chart import to_mermaid
from embodyrl.placement.ranks import SINGLE_RANK, RankInfo, blocks_of
from embodyrl.placement.transport.line import Address
from embodyrl.rollout.interventions import expert_of, shown_to_policy
from embodyrl.runner.build import (
    PROGRAM,
    ProgramInfo,
    blocks_here,
    build_method,
    imported_meanwhile,
    open_demonstrations,
    open_replay,
    open_simulators,
    open_sinks,
    open_transitions,
    settings_of_torch_kept,
    simulator_config,
    worker_logs,
)
from embodyrl.runner.checkpoint import POLICY, TRAINER, Found
from embodyrl.runner.rundir import RunDir
from embodyrl.runner.workers import RolloutWorkers, share_spec
from embodyrl.runs import GRAPH_FILE
from embodyrl.tracking import Sink

if TYPE_CHECKING:
    from embodyrl.engine.parallel import Ranks
    from embodyrl.methods.learner import Learner
    from embodyrl.rollout.rollouts import Rollouts
    from embodyrl.runner.runner import Runner

WorkersStart = Callable[[], RolloutWorkers]


@contextmanager
def open_runner(
    loaded: LoadedConfig,
    directory: RunDir,
    *,
    started: float,
    checkpoint: Found | None = None,
    place: RankInfo = SINGLE_RANK,
    ranks: Ranks | None = None,
    simulators: Address | None = None,
    start_workers: WorkersStart | None = None,
    host: ProgramInfo = PROGRAM,
) -> Iterator[Runner]:
    """Start simulators and sinks, build policy, engine and pipeline, and close everything at the end.

    Args:
        loaded: the config.
        directory: of the run.
        started: `time.monotonic()` when the program began.
        checkpoint: verified checkpoint to continue from, or None.
        place: this rank and their number; only the first writes.
        ranks: of the run, if there are several.
        simulators: those of this rank on another machine; None: it starts them itself.
        start_workers: starts the rollout workers, on the first rank.
        host: settings of the program that the run is part of.
    """
    with ExitStack() as stack:
        config = loaded.config
        weights = None if checkpoint is None else checkpoint.place / POLICY
        learner, rollouts = stack.enter_context(
            disaggregated(loaded, directory, weights, place, ranks, start_workers)
            if config.placement.rollout.workers
            else collocated(loaded, directory, weights, place, ranks, simulators)
        )

        from embodyrl.runner.context import RunContext
        from embodyrl.runner.runner import Runner
        from embodyrl.runner.state import Progress, TrainerState

        saved = None if checkpoint is None else checkpoint.place / TRAINER
        with_replay = checkpoint is None or checkpoint.with_replay
        state = None if saved is None else TrainerState.load(saved, with_replay=with_replay)
        progress = Progress() if state is None else Progress.of(state)
        engine = learner.engine
        demonstrations = None if config.data.path is None else open_demonstrations(config, rollouts, engine)
        transitions = None if demonstrations is None else open_transitions(config, demonstrations, rollouts)
        pipeline = build_pipeline(config)
        if place.is_first:
            write_whole(directory.path / GRAPH_FILE, to_mermaid(pipeline.stages))
        shown = open_sinks(loaded, directory, progress.iteration, host) if place.is_first else nullcontext(())
        sinks: Sequence[Sink] = stack.enter_context(shown)
        replay = open_replay(config, rollouts, engine, directory.path)
        context = RunContext(
            loaded,
            directory,
            rollouts=rollouts,
            learner=learner,
            sinks=sinks,
            progress=progress,
            started=started,
            replay=replay,
        )
        runner = Runner(
            context,
            pipeline,
            demonstrations=demonstrations,
            transitions=transitions,
            callbacks=host.callbacks,
            leave=host.leave,
        )
        if replay is not None:
            context.message(f"replay: {replay.describe()}")
        if transitions is not None:
            context.message(f"demonstrations: {transitions.describe()}")
        if saved is not None and state is not None:
            runner.checkpoints.restore(state, saved, with_replay=with_replay)
        yield runner


@contextmanager
def collocated(
    loaded: LoadedConfig,
    directory: RunDir,
    weights: Path | None,
    place: RankInfo,
    ranks: Ranks | None,
    simulators: Address | None,
) -> Iterator[tuple[Learner, Rollouts]]:
    """Open a rank that plays its share of the envs itself. For the arguments see `open_runner`; `weights` is a folder
    of saved ones."""
    config = loaded.config
    logs = worker_logs(directory.path, place)
    expert = expert_of(config)
    # Simulators first: their processes start while torch is imported.
    with (
        open_simulators(simulator_config(loaded, expert), logs, place, simulators) as started,
        settings_of_torch_kept(),
    ):
        from embodyrl.runner.share import LocalEnvs, LocalRollouts

        blocks = blocks_here(config, place)
        manager = started if expert is None else shown_to_policy(started, expert)
        learner = build_method(config, manager, weights=weights, folder=directory.path, ranks=ranks, blocks=blocks)
        yield learner, LocalRollouts(LocalEnvs(config, manager, learner.engine, expert, directory.path))


@contextmanager
def disaggregated(
    loaded: LoadedConfig,
    directory: RunDir,
    weights: Path | None,
    place: RankInfo,
    ranks: Ranks | None,
    start_workers: WorkersStart | None,
) -> Iterator[tuple[Learner, Rollouts]]:
    """Open a rank that learns from what rollout workers play; the first starts these. For the arguments see
    `collocated`."""
    config = loaded.config
    with ExitStack() as stack:
        with imported_meanwhile(config.model.name):
            workers = None if start_workers is None else stack.enter_context(start_workers())
        stack.enter_context(settings_of_torch_kept())

        from embodyrl.engine.compute import Blocks
        from embodyrl.engine.parallel import SINGLE_PROCESS
        from embodyrl.runner.disaggregated import WorkersRollouts

        ranks = ranks or SINGLE_PROCESS
        offered = share_spec(workers, ranks, config.placement.rollout.timeout_s)
        blocks = Blocks(here=range(0), count=blocks_of(config, ranks.size))
        with nullcontext(None) if workers is None else workers.lent(weights) as lent:
            loading = [] if workers is None else workers.begin("load", weights, lent)
            learner = build_method(config, offered, weights=weights, folder=directory.path, ranks=ranks, blocks=blocks)
            if workers is not None:
                workers.finish(loading)
        yield learner, WorkersRollouts(config, learner.engine, offered.spec, workers, place.machine)
