"""Evaluations within a run: on held-out start states, beside what the run began with."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.config.schema import KeepBest
from embodyrl.envs.perturb.kinds import perturbed
from embodyrl.files import write_whole
from embodyrl.rollout.episodes import EARLY_SUCCESS
from embodyrl.runner.callbacks import Callbacks
from embodyrl.runner.context import RunContext
from embodyrl.runner.evaluation import EpisodeRecord, Evaluation, held_out_episodes
from embodyrl.runs import VIDEOS, episodes_file
from embodyrl.screen import counted, task

if TYPE_CHECKING:  # needs pyarrow, and only runs on demonstrations need it
    pass


class Evaluations:
    """Evaluates, and keeps, shows and compares the results.

    Args:
        context: of the run.
        callbacks: called after each.
    """

    def __init__(self, context: RunContext, callbacks: Callbacks) -> None:
        self.config, self.run_dir, self.progress = context.config, context.run_dir, context.progress
        self.rollouts, self.learner, self.ranks = context.rollouts, context.learner, context.ranks
        self.message, self.take_times = context.message, context.take_times
        self._callbacks, self._warnings = callbacks, context.warnings
        self._has_evaluated = False
        self._recorded: tuple[int, Sequence[EpisodeRecord]] = (-1, ())
        """The iteration of the last evaluation, and its episodes."""

    @property
    def records(self) -> Sequence[EpisodeRecord]:
        """Episodes of the evaluation after this iteration; none if there was none."""
        iteration, records = self._recorded
        return records if iteration == self.progress.iteration else ()

    def evaluate(self) -> dict[str, float]:
        """Evaluate on held-out start states, in the training simulators; training episodes continue afterwards
        unchanged."""
        start, (recorded, video) = time.perf_counter(), self._video()
        if not self._has_evaluated:
            before = "" if self.progress.iteration else " before training"
            episodes = counted(self.config.eval.episodes, "episode")
            how = perturbed(self.config.eval.perturb)
            self.message(f"evaluating{before}: {episodes} on held-out start states{how} ...")
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
        for line in result.lines():
            self.message(line)
        self._warn_of_success(result)
        metrics |= self._beside_baseline(result)
        self._callbacks.on_evaluation(result)
        return metrics | self.take_times("time/eval")

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
