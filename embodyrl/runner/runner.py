"""The iteration loop, and its end when memory runs out."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import platform
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from embodyrl.config import LoadedConfig, config_hash
from embodyrl.config.schema import Config, KeepBest, Offload
from embodyrl.engine.compute import noise_in
from embodyrl.envs.states import changes, simulator_versions
from embodyrl.errors import RunError, UserError, shell_command, without_controls
from embodyrl.files import write_whole
from embodyrl.methods.learner import Learner
from embodyrl.pipelines.pipeline import Iteration, Pipeline
from embodyrl.placement.launcher import RemoteError
from embodyrl.registry import SupportedModel
from embodyrl.rollout.episodes import EARLY_SUCCESS, newest_means, newest_with
from embodyrl.rollout.replay import Replay, ReplayError, ReplayState
from embodyrl.rollout.rollouts import PlayState, Rollouts
from embodyrl.rollout.watching import RecordedStart
from embodyrl.runner.callbacks import Callbacks, SimulatorHealth, Warnings
from embodyrl.runner.checkpoint import REPLAY, DamageError, Retention
from embodyrl.runner.evaluation import EpisodeRecord, Evaluation, held_out_episodes
from embodyrl.runner.reproduction import Lock, lock_of, seen_before, without_record
from embodyrl.runner.rundir import RunDir
from embodyrl.runner.state import (
    Progress,
    Saved,
    Saver,
    Snapshot,
    TrainerState,
    check_alike,
)
from embodyrl.runner.stopping import Stopper, end_program
from embodyrl.runs import REPORT_FILE, SUMMARY_FILE, VIDEOS, episodes_file
from embodyrl.runs.record import RunRecord
from embodyrl.screen import counted, task
from embodyrl.tracking import Sink
from embodyrl.tracking.clock import Phase, divide_waiting
from embodyrl.tracking.machine import machine_facts, memory_mib
from embodyrl.tracking.report import write_report
from embodyrl.version import __version__

if TYPE_CHECKING:  # needs pyarrow, and only runs on demonstrations need it
    from embodyrl.data.batches import Demonstrations
    from embodyrl.data.transitions import Transitions


class Runner:
    """Runs iterations, evaluates, saves.

    Args:
        loaded: the whole config, and where it came from.
        directory: of the run.
        rollouts, learner, pipeline, sinks: built from the config by `opening.open_runner`.
        progress: counters of the run so far.
        started: `time.monotonic()` when the program began, for wall-clock figures.
        demonstrations: to learn from, or None.
        transitions: the same as decisions for critics, or None.
        replay: to learn from, or None.
        callbacks: see `callbacks.Callback`.
        leave: see `stopping.Stopper`.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        directory: RunDir,
        *,
        rollouts: Rollouts,
        learner: Learner,
        pipeline: Pipeline,
        sinks: Sequence[Sink],
        progress: Progress,
        started: float,
        demonstrations: Demonstrations | None = None,
        transitions: Transitions | None = None,
        replay: Replay | None = None,
        callbacks: Sequence[object] = (),
        leave: Callable[[int], NoReturn] = end_program,
    ) -> None:
        self.loaded = loaded
        self.config = loaded.config
        self.directory = directory
        self.run_dir = directory.path
        self.rollouts = rollouts
        self.learner = learner
        engine = self.engine = learner.engine
        self.ranks = engine.ranks
        self.clock = engine.clock
        self.pipeline = pipeline.loaded()
        self.demonstrations, self.transitions = demonstrations, transitions
        self.replay = replay
        self.sinks = sinks
        self.progress = progress
        self.stopper = Stopper(self.ranks, leave=leave)
        self._callbacks = Callbacks(callbacks, self.stopper)
        precision = str(engine.precision).removeprefix("torch.")
        self._warnings = Warnings(self.config, precision, self.message)
        self._simulators = SimulatorHealth(rollouts, progress, self.config.env.name, self.message)
        self._keep_best = None if self.config.run.keep_best is KeepBest.none else self.config.run.keep_best.value
        self._saver = Saver(
            self.run_dir,
            Retention(last=self.config.run.keep_last, best=self._keep_best),
            in_background=self.config.run.save_async,
        )
        self._earlier_s = progress.wall_s
        self._started = started
        self._versions = simulator_versions(self.config.env.name)
        self._has_evaluated = False
        self._recorded: tuple[int, Sequence[EpisodeRecord]] = (-1, ())
        """The iteration of the last evaluation, and its episodes."""
        self._seen_before: RecordedStart | None = None
        """What an evaluation before a resume showed."""
        self._saved_at = progress.iteration or -1  # a run that never got to an iteration has saved nothing

    def run(self) -> int:
        """Train to the end, or until stopped; returns the exit code.

        Raises:
            RunError: the run cannot continue.
            BaseException: the error of a callback, once the run is saved.
        """
        with self.stopper, self._saver:
            self._prepare()
            if self._owes_evaluation():
                self._log(self._evaluate())
                # A signal left this evaluation out after the checkpoint was saved: save again with its metrics, as if
                # it had been in time.
                if self.progress.iteration:
                    self._save()
            self._take_times()
            while self._goes_on():
                # The order matters: evaluation before saving, so that a checkpoint holds its metrics and `best` can be
                # chosen; all ranks come to every line, since each may exchange something.
                self._refuse_offload()
                metrics = self._iterate_or_rescue()
                if self._is_evaluation_due():
                    metrics |= self._evaluate()
                self._log(metrics | self._simulators.report())
                self._report_saved(self._saver.poll())
                if self._is_to_be_saved():
                    self._save()
            self._finish()
        self._callbacks.raise_fault()
        return self.stopper.exit_code

    def _prepare(self) -> None:
        """Learn before anything is collected, if the method begins so. A run that is stopped meanwhile continues with
        the next step."""
        steps = self.learner.prepare(self.demonstrations, self.transitions, self.progress.imitated, self.message)
        while not self.stopper.agree():
            made = next(steps, None)
            if made is None:
                break
            self.progress.imitated = made

    def _iterate_or_rescue(self) -> dict[str, float]:
        """Run one iteration; returns its metrics.

        Raises:
            OutOfMemoryError: memory ran out. The iterations before are saved, if that was possible.
        """
        try:
            return self._iterate()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            reason = reason_of(error)
        fate = self._rescue()  # outside of the handler, which would hold on to what the iteration used
        raise OutOfMemoryError(
            f"memory ran out in iteration {self.progress.iteration + 1}: {reason}. {fate}. Less memory is needed with "
            f"{less_memory(self.config)}: {shell_command('resume', self.run_dir)} KEY=VALUE"
        )

    def _iterate(self) -> dict[str, float]:
        """Run one iteration of the pipeline; returns its metrics."""
        iteration = Iteration(
            config=self.config,
            number=self.progress.iteration + 1,
            learner=self.learner,
            collector=self.rollouts,
            engine=self.engine,
            demonstrations=self.demonstrations,
            transitions=self.transitions,
            replay=self.replay,
            warn=self._warnings.warn,
        )
        start = time.perf_counter()
        self.rollouts.iterations_left = self.config.run.iterations - self.progress.iteration
        with task(f"iteration {iteration.number}"), self.clock.measure(Phase.train):
            self.pipeline.run(iteration)  # time that no inner phase claims counts as learning
        self.rollouts.forget_batch()
        if self.rollouts.warning is not None:
            self._warnings.warn("graphs", self.rollouts.warning)
        seconds = time.perf_counter() - start
        finished = [episode for rollout in iteration.rollouts for episode in rollout.finished]
        metrics = iteration.metrics | newest_means(self.progress.newest, finished)
        metrics |= self.rollouts.take_metrics() | self._take_times("time/iteration")
        self.progress.newest = newest_with(self.progress.newest, finished)
        self.progress.iteration += 1
        steps = metrics.get("env/steps", 0.0)  # supervised learning takes none
        self.progress.env_steps += int(steps)
        self.progress.train_s += seconds
        self._warnings.on_iteration(self._row(metrics))
        return metrics | {
            "env/total_steps": float(self.progress.env_steps),
            "time/env_steps_per_s": steps / seconds,
        }

    def _evaluate(self) -> dict[str, float]:
        """Evaluate on held-out start states, in the training simulators; training episodes continue afterwards
        unchanged."""
        start, (recorded, video) = time.perf_counter(), self._video()
        if not self._has_evaluated:
            before = "" if self.progress.iteration else " before training"
            episodes = counted(self.config.eval.episodes, "episode")
            self.message(f"evaluating{before}: {episodes} on held-out start states ...")
            self._has_evaluated = True
        with task("evaluating"):
            finished = self.rollouts.evaluate(recorded, video)
        seconds = time.perf_counter() - start
        result = Evaluation.of_episodes(
            finished, held_out_episodes(self.config), seconds=seconds, sampled=self.config.eval.sample
        )
        if recorded:
            self.message(f"recorded {video}")
        self._recorded = self.progress.iteration, result.records
        metrics = result.metrics()
        self.progress.evaluations[str(self.progress.iteration)] = {
            name: value for name, value in metrics.items() if name.startswith("eval/")
        }
        self._keep_episodes(result)
        self.message(result.line())
        self._warn_of_success(result)
        metrics |= self._beside_baseline(result)
        self._callbacks.on_evaluation(result)
        return metrics | self._take_times("time/eval")

    def _warn_of_success(self, result: Evaluation) -> None:
        """Warn, once in a run, if success says nothing, or is unknown where settings need it."""
        if result.doubt is not None:
            self._warnings.warn(EARLY_SUCCESS, result.doubt)
        run = self.config.run
        needs = {"run.stop_at_success": run.stop_at_success, "run.keep_best": run.keep_best is KeepBest.success_once}
        if result.success_once is None and (named := [name for name, value in needs.items() if value]):
            self._warnings.warn(
                "success_unknown",
                f"{' and '.join(named)} can do nothing: simulator {self.config.env.name!r} does not say whether "
                f"{', '.join(self.config.env.tasks)} is solved. Set env.success_return where the simulator has it, or "
                f"leave {'it' if len(named) == 1 else 'them'} out",
            )

    def _keep_episodes(self, result: Evaluation) -> None:
        """Write the episodes of an evaluation into the run directory."""
        if self.ranks.is_first:
            path = episodes_file(self.run_dir, self.progress.iteration)
            path.parent.mkdir(exist_ok=True)
            lines = [json.dumps(dataclasses.asdict(each)) + "\n" for each in result.records]
            write_whole(path, "".join(lines))

    def _beside_baseline(self, result: Evaluation) -> dict[str, float]:
        """Show the success of what the run began with beside that of what it has learned; returns it as a metric."""
        begun, baseline = self.progress.evaluations.get("0"), self.learner.baseline
        if baseline is None or begun is None:
            return {}
        alone = Evaluation.of(begun, result.seconds)
        if self.progress.iteration:
            self.message(f"of {baseline.name} alone: success {alone.success_text}")
        else:
            self.message(f"this is {baseline.name} alone, before any rollout")
            if alone.success_once is not None and (doubt := baseline.would_do(alone.success_once)) is not None:
                self._warnings.warn("cloning_would_do", doubt)
        return {} if alone.success_once is None else {baseline.metric: alone.success_once}

    def _video(self) -> tuple[int, Path]:
        """Return the number of episodes of this evaluation that are recorded, and the file for them."""
        video, number = self.config.tracking.video, len(self.progress.evaluations)
        recorded = 0 if number % video.every else min(video.episodes, self.config.eval.episodes)
        return recorded, self.run_dir / VIDEOS / f"iteration_{self.progress.iteration:06d}.mp4"

    def _refuse_offload(self) -> None:
        """End a run with `env.offload` whose simulators do not restore their states bit for bit.

        Raises:
            RunError: they do not; the run is saved.
        """
        if self.progress.comes_back or not self.config.env.offload:
            return
        if not self._is_saved:
            self._save()
        self._report_saved(self._saver.wait())
        raise RunError(
            f"env.offload is true, but simulator {self.config.env.name!r} does not restore its saved states bit for "
            f"bit, so no episode would outlast an iteration. The run is saved. Continue with the simulators kept "
            f"running: {shell_command('resume', self.run_dir, 'env.offload=false')}"
        )

    def _goes_on(self) -> bool:
        """Return whether there is another iteration: not at the end, not asked to stop, not good enough yet."""
        # `agree` first and always: it is an exchange between ranks, which all of them must join.
        unfinished = self.progress.iteration < self.config.run.iterations
        return not self.stopper.agree() and unfinished and not self._is_good_enough()

    def _owes_evaluation(self) -> bool:
        """Return whether an evaluation is due before the first iteration: the one before training, or one that a signal
        left out."""
        iteration, config = self.progress.iteration, self.config.run
        if self.progress.latest:
            return False
        if iteration == 0 and self.learner.baseline is not None and not self.stopper.agree():
            return True  # what it learns is to be compared with
        return is_due(iteration, config.eval_every) or iteration == config.iterations

    def _is_good_enough(self) -> bool:
        target = self.config.run.stop_at_success
        success = self.progress.latest.get("eval/success_once")
        return target is not None and success is not None and success >= target

    def _finish(self) -> None:
        """Save the last iterations if they are not saved yet, and write summary and report."""
        if not self._is_saved:
            self._save()
        with task("saving"), self.clock.measure(Phase.save):
            self._report_saved(self._saver.wait())
        self.stopper.agree()
        self._take_times()
        if self.ranks.is_first:
            write_whole(self.run_dir / SUMMARY_FILE, json.dumps(self.summary(), indent=2) + "\n")
            (self.run_dir / REPORT_FILE).unlink(missing_ok=True)  # of a run that ended earlier
            if self.config.tracking.report:
                self._write_report()

    def _write_report(self) -> None:
        try:
            write_report(self.run_dir)
        except (UserError, OSError) as error:  # what was learned is saved
            self.message(
                f"warning: no {REPORT_FILE}: {error}. Once that is fixed: {shell_command('report', self.run_dir)}"
            )

    def _is_evaluation_due(self) -> bool:
        """Return whether an evaluation follows the last iteration: as often as the config says, and at the end."""
        last = self.progress.iteration == self.config.run.iterations
        return not self.stopper.agree() and (last or is_due(self.progress.iteration, self.config.run.eval_every))

    def _is_to_be_saved(self) -> bool:
        best = self._keep_best is not None and self.progress.is_best_yet(self._keep_best)
        return best or is_due(self.progress.iteration, self.config.run.save_every)

    def _take_times(self, what: str = "time/unlogged") -> dict[str, float]:
        """Return the seconds since the last call: the total as `what`, and those of each phase under its prefix."""
        taken = divide_waiting(self.clock.take(), self.rollouts.take_rendering())
        for phase in Phase:
            self.progress.phases_s[phase] = self.progress.phases_s.get(phase, 0.0) + taken[phase]
        prefix = "time" if what == "time/iteration" else what
        split = {f"{prefix}/{name}": seconds for name, seconds in taken.items()}
        return {what: sum(taken[phase] for phase in Phase)} | split

    def _save(self) -> None:
        """Write a checkpoint of this moment."""
        with task("saving"), self.clock.measure(Phase.save):
            if (snapshot := self._snapshot()) is not None:
                self._report_saved(self._saver.save(snapshot))
        self._saved_at = self.progress.iteration

    def _rescue(self) -> str:
        """Save outside of the usual turn, in as little memory as possible and without the episodes in progress; returns
        the outcome for people. The last iteration may have made some of its optimiser steps, which does no harm."""
        if self._is_saved:
            return "The iteration before it is saved"
        if self.ranks.size > 1:
            return "What was learned since the last checkpoint is lost, because the other ranks cannot be asked for it"
        self.rollouts.give_up_episodes()
        try:
            self._saver.wait()
            if (snapshot := self._snapshot(with_lock=False)) is not None:
                self._report_saved([self._saver.save_now(snapshot)])
        except (RunError, RuntimeError, MemoryError) as error:
            return f"What was learned since the last checkpoint is lost, because saving failed as well ({error})"
        return "What was learned before it is saved"

    @property
    def _is_saved(self) -> bool:
        """True if the last iteration is in a checkpoint."""
        return self._saved_at >= self.progress.iteration

    def _snapshot(self, *, with_lock: bool = True) -> Snapshot | None:
        """Return the state of all ranks to be saved, on the first rank; None on the others. All ranks must call it.
        `with_lock=False` computes nothing."""
        self.progress.wall_s = self.wall_s
        policy, state = self.engine.full_policy(), self._whole_state()
        if policy is None or state is None:
            return None
        return Snapshot(
            iteration=self.progress.iteration,
            metrics=self.progress.latest,
            policy=policy,
            loaded=self.loaded,
            trainer=state,
            lock=self._lock() if with_lock else None,
        )

    def _lock(self) -> Lock | None:
        """Return what the simulators and the policy of this moment give, on the first rank."""
        seen = self.rollouts.seen or self._seen_before
        if seen is None:
            return None
        iteration, records = self._recorded
        is_of_now = iteration == self.progress.iteration
        try:
            with self.clock.measure(Phase.save):
                return lock_of(self.config, self.engine, seen, self.progress.iteration, records if is_of_now else ())
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
            whole = self.ranks.broadcast_from_rank0(self._saver.lost_last)
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
            self.progress.comes_back = True  # the new version has not failed to restore anything yet
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
        self._saver.continue_from(checkpoint)

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

    @property
    def wall_s(self) -> float:
        """Seconds since the run began, summed over its resumes."""
        return self._earlier_s + time.monotonic() - self._started

    def summary(self) -> dict[str, Any]:
        """Return the contents of `summary.json`."""
        evaluations, baseline = self.progress.evaluations, self.learner.baseline
        final = evaluations[max(evaluations, key=int)] if evaluations else {}
        return {
            "name": self.loaded.written.run.name,
            **final,
            "iterations": self.progress.iteration,
            "env_steps": self.progress.env_steps,
            "wall_s": round(self.wall_s, 3),
            "phases_s": {phase: round(seconds, 3) for phase, seconds in self.progress.phases_s.items()},
            "env_steps_per_s": round(self.progress.env_steps / max(self.progress.train_s, 1e-9), 1),
            "seed": self.config.seed,
            "stopped_by": self.stopper.stopped_by,
            **({} if baseline is None else {baseline.key: evaluations.get("0")}),
            "evaluations": evaluations,
            "config_hash": config_hash(self.loaded.written),
            "versions": {"embodyrl": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "machine": machine_facts(),
            "memory_mib": memory_mib(),
        }

    def _log(self, metrics: dict[str, float]) -> None:
        self.directory.keep()
        for sink in self.sinks:
            sink.log(self.progress.iteration, metrics)
        if "time/iteration" in metrics:  # not for an evaluation before training
            self._callbacks.on_iteration(self._row(metrics))

    def _row(self, metrics: dict[str, float]) -> Mapping[str, float]:
        return {"iteration": self.progress.iteration} | metrics

    def message(self, text: str) -> None:
        """Write a line for people to run.log, and to the sinks that show messages."""
        if not self.ranks.is_first:
            return
        text = without_controls(text)  # parts of it come from simulators
        self.directory.note(text)
        for sink in self.sinks:
            sink.message(text)


def is_due(iteration: int, every: int) -> bool:
    """Return whether something that happens every `every` iterations (0: never) happens after `iteration`."""
    return every > 0 and iteration % every == 0


# ---- running out of memory


class OutOfMemoryError(RunError):
    """Raised when memory of the machine or of the GPU runs out; its text names settings that need less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out. Torch has a class for it only on GPUs."""
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    in_worker = isinstance(error, RemoteError) and error.type_name in ("MemoryError", "OutOfMemoryError")
    return on_cpu or in_worker or isinstance(error, MemoryError | torch.OutOfMemoryError)


def release(error: BaseException) -> None:
    """Free the locals of the functions that failed, so that there is memory to save with."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def less_memory(config: Config) -> str:
    """Return the settings that need less memory and are not in use yet, for people."""
    engine, helps = config.engine, []
    if (size := _samples_at_once(config)) > 1:
        helps.append(f"engine.micro_batch_size={size // 2}")
    if engine.gradient_checkpointing is not True and SupportedModel.entry(config.model.name).blocks is not False:
        helps.append("engine.gradient_checkpointing=true")
    if engine.offload is not Offload.all:
        helps.append("engine.offload=all")
    if not config.env.offload:
        helps.append("env.offload=true")
    if config.run.save_async:
        helps.append("run.save_async=false")
    return ", ".join(helps)


def _samples_at_once(config: Config) -> int:
    """Return the number of chunks or demonstrated samples that go through the model together in learning."""
    if config.engine.micro_batch_size is not None:
        return config.engine.micro_batch_size
    if config.data.path is not None:
        return config.data.batch_size
    return config.algorithm.batches(config).minibatch
