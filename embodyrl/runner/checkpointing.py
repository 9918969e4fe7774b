"""Checkpoints within a run: the state of all ranks is gathered, saved, and continued from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.config.schema import KeepBest
from embodyrl.engine.compute import noise_in
from embodyrl.envs.states import changes, versions_of_env
from embodyrl.errors import RunError, shell_command
from embodyrl.rollout.replay import Replay, ReplayError, ReplayState
from embodyrl.rollout.rollouts import PlayState
from embodyrl.rollout.watching import RecordedStart
from embodyrl.runner.checkpoint import REPLAY, DamageError, Retention
from embodyrl.runner.context import RunContext
from embodyrl.runner.evaluation import EpisodeRecord
from embodyrl.runner.reproduction import Lock, lock_of, seen_before, without_record
from embodyrl.runner.state import (
    Saved,
    Saver,
    Snapshot,
    TrainerState,
    check_alike,
)
from embodyrl.runs.record import RunRecord
from embodyrl.screen import task
from embodyrl.tracking.clock import Phase

if TYPE_CHECKING:  # needs pyarrow, and only runs on demonstrations need it
    pass


class Checkpoints:
    """Saves the state of a run, and restores it.

    Args:
        context: of the run.
    """

    def __init__(self, context: RunContext) -> None:
        self.loaded, self.config, self.run_dir = context.loaded, context.config, context.run_dir
        self.rollouts, self.learner, self.replay = context.rollouts, context.learner, context.replay
        self.engine, self.ranks, self.clock = context.engine, context.ranks, context.clock
        self.context, self.progress, self.message = context, context.progress, context.message
        self._warnings, self._simulators = context.warnings, context.simulators
        keep_best = self.config.run.keep_best
        self._keep_best = None if keep_best is KeepBest.none else keep_best.value
        self.saver = Saver(
            self.run_dir,
            Retention(last=self.config.run.keep_last, best=self._keep_best),
            in_background=self.config.run.save_async,
        )
        """Writes them."""
        self._versions = versions_of_env(self.config.env)
        self._seen_before: RecordedStart | None = None
        """What an evaluation before a resume showed."""
        self._saved_at = self.progress.iteration or -1  # a run that never got to an iteration has saved nothing

    @property
    def is_due(self) -> bool:
        """True if a checkpoint of this iteration is to be saved."""
        best = self._keep_best is not None and self.progress.is_best_yet(self._keep_best)
        return best or is_due(self.progress.iteration, self.config.run.save_every)

    def save(self, records: Sequence[EpisodeRecord]) -> None:
        """Write a checkpoint of this moment.

        Args:
            records: episodes of an evaluation of it, if there was one.
        """
        with task("saving"), self.clock.measure(Phase.save):
            if (snapshot := self._snapshot(lambda: self._lock(records))) is not None:
                self._report_saved(self.saver.save(snapshot))
        self._saved_at = self.progress.iteration

    def refuse_offload(self, records: Sequence[EpisodeRecord]) -> None:
        """End a run with `env.offload` whose simulators do not restore states bit for bit; `records` as for `save`.

        Raises:
            RunError: they do not; the run is saved.
        """
        if self.progress.restores_exactly or not self.config.env.offload:
            return
        if not self.is_saved:
            self.save(records)
        self.report_saved(wait=True)
        raise RunError(
            f"env.offload is true, but simulator {self.config.env.name!r} does not restore its saved states bit for "
            f"bit, so no episode would outlast an iteration. The run is saved. Continue with the simulators kept "
            f"running: {shell_command('resume', self.run_dir, 'env.offload=false')}"
        )

    def rescue(self) -> str:
        """Save outside of the usual turn, in as little memory as possible and without the episodes in progress; returns
        the outcome for people. The last iteration may have made some of its optimiser steps, which does no harm."""
        if self.is_saved:
            return "The iteration before it is saved"
        if self.ranks.size > 1:
            return "What was learned since the last checkpoint is lost, because the other ranks cannot be asked for it"
        self.rollouts.give_up_episodes()
        try:
            self.saver.wait()
            if (snapshot := self._snapshot()) is not None:
                self._report_saved([self.saver.save_now(snapshot)])
        except (RunError, RuntimeError, MemoryError) as error:
            return f"What was learned since the last checkpoint is lost, because saving failed as well ({error})"
        return "What was learned before it is saved"

    @property
    def is_saved(self) -> bool:
        """True if the last iteration is in a checkpoint."""
        return self._saved_at >= self.progress.iteration

    def _snapshot(self, lock: Callable[[], Lock | None] = lambda: None) -> Snapshot | None:
        """Return the state of all ranks to be saved, on the first rank; None on the others. All ranks must call
        it. `lock` computes what the moment gives."""
        self.progress.wall_s = self.context.wall_s
        policy, state = self.engine.full_policy(), self._whole_state()
        if policy is None or state is None:
            return None
        return Snapshot(
            iteration=self.progress.iteration,
            metrics=self.progress.latest,
            policy=policy,
            loaded=self.loaded,
            trainer=state,
            lock=lock(),
        )

    def _lock(self, records: Sequence[EpisodeRecord]) -> Lock | None:
        """Return what the simulators and the policy of this moment give, on the first rank."""
        seen = self.rollouts.seen or self._seen_before
        if seen is None:
            return None
        try:
            with self.clock.measure(Phase.save):
                return lock_of(self.config, self.engine, seen, self.progress.iteration, records)
        except Exception as error:  # a run continues without it, and must be saved
            self._warnings.warn("record", without_record(error))
            return None

    def _whole_state(self) -> TrainerState | None:
        """Return the state of all ranks and rollout workers, in a form that does not depend on their number, so that a
        run can be resumed with another; None on a rank that does not know it."""
        self.rollouts.wait_idle()
        played, surplus = self.rollouts.state(), self.rollouts.gather_surplus()
        engine = self.engine.state_dict() | self.learner.state_dict()
        waiting = self.rollouts.whole_waiting()
        replay = None
        if self.replay is not None:
            whole = self.ranks.broadcast_from_rank0(self.saver.lost_last)
            replay = self.replay.state(self.ranks, whole=whole)
        if played is None:
            return None
        return TrainerState(
            counters={
                "progress": vars(self.progress),
                "collector": played.collector,
                "simulator": self._versions,
            },
            engine=engine | {"streams": engine["streams"] | played.noise},
            simulators=played.simulators,
            surplus=surplus,
            waiting=waiting,
            replay=replay,
        )

    def _report_saved(self, published: Sequence[Saved]) -> None:
        for saved in published:
            meanwhile = f", {saved.waited_s:.1f} s of them waiting" if self.config.run.save_async else ""
            self.message(f"saved {saved.place}  ({saved.seconds:.1f} s{meanwhile})")
            if saved.warning is not None:
                self._warnings.warn("record", saved.warning)

    def restore(self, state: TrainerState, folder: Path, *, with_replay: bool = True) -> None:
        """Continue from a checkpoint's trainer state, which is in a folder; the policy's weights and `progress` have
        been loaded before. Without its replay the run continues with an empty one.

        Raises:
            DamageError: the state does not have the structure of this run's, or its replay is that of another one.
        """
        if (played := self.rollouts.state()) is not None:
            check_alike(state.counters.get("collector"), played.collector, "the checkpoint's collector")
        own = self.engine.state_dict() | self.learner.state_dict()
        check_alike(dict.fromkeys(state.engine), dict.fromkeys(own), "the checkpoint's engine")
        warning = self.engine.load_state_dict(state.engine)
        self.learner.load_state_dict(state.engine)
        if warning is not None:
            self._warnings.warn("streams", warning)
        noise = noise_in(state.engine["streams"])
        self.rollouts.restore(
            PlayState(collector=state.counters["collector"], simulators=state.simulators, noise=noise)
        )
        self.rollouts.take_surplus(state.surplus)
        self.rollouts.take_waiting(state.waiting)
        if self.replay is not None:
            if with_replay:
                self._restore_replay(self.replay, state.replay, folder.parent)
            else:
                self.replay.is_refilled = True
                self.message(
                    "warning: continuing with an empty replay: the policy acts, and learns again once there are "
                    f"algorithm.off_policy.replay.start_after = {self.replay.start_after:,} decisions"
                )
        self._tell_of_schedules(RunRecord(folder.parent).iterations)
        self._seen_before = seen_before(folder.parent, self.config)
        changed = "; ".join(changes(state.counters.get("simulator", {}), self._versions))
        if changed:
            self.message(f"simulators have changed since the checkpoint was saved: {changed}")
            self.progress.restores_exactly = True  # the new version has not failed to restore anything yet
        self._simulators.report(changed)

    def _restore_replay(self, replay: Replay, state: ReplayState | None, checkpoint: Path) -> None:
        if state is None:
            raise DamageError("the checkpoint holds no replay, from which this run learns: use another checkpoint")
        try:
            replay.restore(state, checkpoint / REPLAY)
        except ReplayError as error:
            raise DamageError(
                f"{checkpoint / REPLAY}: {error}: put back what this run saved there, or use another checkpoint"
            ) from error
        self.saver.continue_from(checkpoint)

    def _tell_of_schedules(self, before: int | None) -> None:
        """Warn where a run that continues with another length than `before` is at another point of its schedules."""
        now, version = self.config.run.iterations, self.engine.version
        if before in (None, now):
            return
        wanted, found = (self.engine.scheduled(version, length) for length in (before, now))
        last = self.engine.scheduled(max(version - 1, 0), before)
        jumps = [
            f"{name} continues at {found[name]:.3g}, after {last[name]:.3g}"
            for name in found
            if not math.isclose(found[name], wanted[name], rel_tol=1e-9)
        ]
        if jumps:
            self.message(
                f"warning: run.iterations is {now:,} now, after {before:,}, and schedules follow it: {', '.join(jumps)}"
            )

    def report_saved(self, *, wait: bool = False) -> None:
        """Show which checkpoints have been written since the last call; `wait` for those being written."""
        self._report_saved(self.saver.wait() if wait else self.saver.poll())


def is_due(iteration: int, every: int) -> bool:
    """Return whether something that happens every `every` iterations (0: never) happens after `iteration`."""
    return every > 0 and iteration % every == 0
