"""The iteration loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from embodyrl.errors import RewardError, shell_command
from embodyrl.pipelines.pipeline import Iteration, Pipeline
from embodyrl.rollout.episodes import newest_means, newest_with
from embodyrl.runner.callbacks import Callbacks
from embodyrl.runner.checkpointing import Checkpoints, is_due
from embodyrl.runner.context import RunContext
from embodyrl.runner.ending import summary_of, write_ending
from embodyrl.runner.evaluating import Evaluations
from embodyrl.runner.memory import OutOfMemoryError, is_out_of_memory, less_memory, reason_of, release
from embodyrl.runner.stopping import Stopper, end_program
from embodyrl.screen import task
from embodyrl.tracking.clock import Phase

if TYPE_CHECKING:  # needs pyarrow, and only runs on demonstrations need it
    from embodyrl.data.batches import Demonstrations
    from embodyrl.data.transitions import Transitions


class Runner:
    """Runs iterations, evaluates, saves.

    Args:
        context: the parts of the run.
        pipeline: its iteration.
        demonstrations: to learn from, or None.
        transitions: the same as decisions for critics, or None.
        callbacks: see `callbacks.Callback`.
        leave: see `stopping.Stopper`.
    """

    def __init__(
        self,
        context: RunContext,
        pipeline: Pipeline,
        *,
        demonstrations: Demonstrations | None = None,
        transitions: Transitions | None = None,
        callbacks: Sequence[object] = (),
        leave: Callable[[int], NoReturn] = end_program,
    ) -> None:
        self.context, self.config, self.progress = context, context.config, context.progress
        self.learner, self.engine, self.rollouts = context.learner, context.engine, context.rollouts
        self.ranks, self.clock, self.message = context.ranks, context.clock, context.message
        self.pipeline = pipeline.loaded()
        self.demonstrations, self.transitions = demonstrations, transitions
        self.stopper = Stopper(self.ranks, leave=leave)
        self._callbacks = Callbacks(callbacks, self.stopper)
        self.evaluations = Evaluations(context, self._callbacks)
        self.checkpoints = Checkpoints(context)

    def run(self) -> int:
        """Train to the end, or until stopped; returns the exit code.

        Raises:
            RunError: the run cannot continue.
            BaseException: the error of a callback, once the run is saved.
        """
        with self.stopper, self.checkpoints.saver:
            self._prepare()
            if self._owes_evaluation():
                self._log(self.evaluations.evaluate())
                # A signal left this evaluation out after the checkpoint was saved: save again with its metrics, as if
                # it had been in time.
                if self.progress.iteration:
                    self._save()
            self.context.take_times()
            while self._goes_on():
                # The order matters: evaluation before saving, so that a checkpoint holds its metrics and `best` can be
                # chosen; all ranks come to every line, since each may exchange something.
                self.checkpoints.refuse_offload(self.evaluations.records)
                metrics = self._iterate_or_rescue()
                if self._is_evaluation_due():
                    metrics |= self.evaluations.evaluate()
                self._log(metrics | self.context.simulators.report())
                self.checkpoints.report_saved()
                if self.checkpoints.is_due:
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
            RewardError: rewards cannot be had. The same.
        """
        try:
            return self._iterate()
        except RewardError as error:
            raise RewardError(
                f"{error}. {self.checkpoints.rescue()}. Continue with {shell_command('resume', self.context.run_dir)}"
            ) from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            reason = reason_of(error)
        fate = self.checkpoints.rescue()  # outside of the handler, which would hold on to what the iteration used
        raise OutOfMemoryError(
            f"memory ran out in iteration {self.progress.iteration + 1}: {reason}. {fate}. Less memory is needed with "
            f"{less_memory(self.config)}: {shell_command('resume', self.context.run_dir)} KEY=VALUE"
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
            replay=self.context.replay,
            warn=self.context.warnings.warn,
        )
        start = time.perf_counter()
        self.rollouts.iteration = self.progress.iteration
        self.rollouts.iterations_left = self.config.run.iterations - self.progress.iteration
        with task(f"iteration {iteration.number}"), self.clock.measure(Phase.train):
            self.pipeline.run(iteration)  # time that no inner phase claims counts as learning
        self.rollouts.forget_batch()
        if self.rollouts.warning is not None:
            self.context.warnings.warn("graphs", self.rollouts.warning)
        seconds = time.perf_counter() - start
        finished = [episode for rollout in iteration.rollouts for episode in rollout.finished]
        metrics = iteration.metrics | newest_means(self.progress.newest, finished)
        metrics |= self.rollouts.take_metrics() | self.context.take_times("time/iteration")
        self.progress.newest = newest_with(self.progress.newest, finished)
        self.progress.iteration += 1
        steps = metrics.get("env/steps", 0.0)  # supervised learning takes none
        self.progress.env_steps += int(steps)
        self.progress.train_s += seconds
        self.context.warnings.on_iteration(self._row(metrics))
        return metrics | {
            "env/total_steps": float(self.progress.env_steps),
            "time/env_steps_per_s": steps / seconds,
        }

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

    def _is_evaluation_due(self) -> bool:
        """Return whether an evaluation follows the last iteration: as often as the config says, and at the end."""
        last = self.progress.iteration == self.config.run.iterations
        return not self.stopper.agree() and (last or is_due(self.progress.iteration, self.config.run.eval_every))

    def _save(self) -> None:
        self.checkpoints.save(self.evaluations.records)

    def _finish(self) -> None:
        """Save the last iterations if they are not saved yet, and write summary and report."""
        if not self.checkpoints.is_saved:
            self._save()
        with task("saving"), self.clock.measure(Phase.save):
            self.checkpoints.report_saved(wait=True)
        self.stopper.agree()
        self.context.take_times()
        if self.ranks.is_first:
            write_ending(self.context, self.summary())

    def summary(self) -> dict[str, Any]:
        """Return the contents of `summary.json`."""
        return summary_of(self.context, self.stopper.stopped_by)

    def _log(self, metrics: dict[str, float]) -> None:
        self.context.directory.keep()
        for sink in self.context.sinks:
            sink.log(self.progress.iteration, metrics)
        if "time/iteration" in metrics:  # not for an evaluation before training
            self._callbacks.on_iteration(self._row(metrics))

    def _row(self, metrics: dict[str, float]) -> Mapping[str, float]:
        return {"iteration": self.progress.iteration} | metrics
