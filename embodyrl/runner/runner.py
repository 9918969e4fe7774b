"""The iteration loop."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from embodyrl.config import LoadedConfig, config_hash
from embodyrl.config.schema import KeepBest, OldLogprobs
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import EpisodeSpec
from embodyrl.envs.manager import EnvManager
from embodyrl.envs.states import changes, simulator_versions
from embodyrl.errors import RunError, without_controls
from embodyrl.files import write_whole
from embodyrl.pipelines.pipeline import Iteration, Pipeline
from embodyrl.rollout.collector import Collector
from embodyrl.runner.evaluation import borrowed, evaluate, evaluation_noise, held_out_episodes
from embodyrl.runner.film import Film
from embodyrl.runner.memory import OutOfMemoryError, is_out_of_memory, reason_of, release, remedies
from embodyrl.runner.publishing import Retention
from embodyrl.runner.rundir import RunDir
from embodyrl.runner.saver import Saved, Saver, Snapshot
from embodyrl.runner.state import TrainerState, check_alike
from embodyrl.runner.stopping import Stopper
from embodyrl.tracking import Sink
from embodyrl.tracking.clock import Phase, divide_waiting
from embodyrl.tracking.report import SUMMARY_FILE, VIDEOS, write_report
from embodyrl.version import __version__

if TYPE_CHECKING:  # needs pyarrow, and only runs on demonstrations need it
    from embodyrl.data.batches import Demonstrations

OFFLOADED = {
    "simulators": "the simulators are gone while the policy learns",
    "optimizer": "the optimiser's state is away while the policy acts",
    "reference": "the reference policy is away but for scoring a batch",
}
"""What leaves its place for a while, by the name in `memory/<name>_freed_mib`."""
RATIO_ERROR = 1e-2
"""A probability ratio that is farther from 1 before any weight changed is worth a warning: a clip is some 0.2 wide."""
IDLE_ITERATIONS = 3
"""So many iterations in a row with nothing to learn from are worth a warning."""

ADDED = {"restore_mismatches": 0, "comes_back": True}
"""Counters that checkpoints did not have from the beginning."""
SHOWN_SLOTS = 8
"""So many slots are named in a message."""


@dataclass(kw_only=True)
class Progress:
    """Counters of a run; part of every checkpoint."""

    iteration: int = 0
    env_steps: int = 0
    """Control steps of training."""
    train_s: float = 0.0
    """Seconds in iterations, without evaluation and saving."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, over iterations, evaluations and checkpoints; see `tracking.clock.Phase`."""
    wall_s: float = 0.0
    """Seconds altogether, over all processes that worked on the run."""
    restarts: int = 0
    """Simulator processes that died and were replaced."""
    restore_mismatches: int = 0
    """Slots that did not come back from their saved states as they were, each time one did not."""
    comes_back: bool = True
    """Whether slots come back as they were, so far as was seen; what another version of the simulator explains does not
    count."""
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics of every evaluation, by iteration."""

    @classmethod
    def of(cls, state: TrainerState) -> Progress:
        """The counters in a checkpoint.

        Raises:
            DamageError: they are not those of a run.
        """
        found = state.counters.get("progress")
        if isinstance(found, dict):
            found = ADDED | found
        check_alike(found, vars(cls()), "the checkpoint's progress")
        return cls(**found)  # type: ignore[arg-type]

    @property
    def latest(self) -> dict[str, float]:
        """Metrics of the evaluation after the latest iteration; empty if there was none."""
        return self.evaluations.get(str(self.iteration), {})

    def is_best_yet(self, metric: str) -> bool:
        """Whether this iteration's evaluation beats those after all earlier ones."""
        earlier = [found[metric] for key, found in self.evaluations.items() if 0 < int(key) < self.iteration]
        return metric in self.latest and all(self.latest[metric] > value for value in earlier)


class Runner:
    """Runs iterations, evaluates, saves.

    Args:
        loaded: the whole config, and where it came from.
        directory: where everything goes.
        manager, engine, collector, pipeline, sinks: what the config asks for, built by `build_runner`.
        demonstrations: to learn from, or None.
        started: `time.monotonic()` when the program began, for wall-clock figures.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        directory: RunDir,
        *,
        manager: EnvManager,
        engine: HybridEngine,
        collector: Collector,
        pipeline: Pipeline,
        sinks: Sequence[Sink],
        progress: Progress,
        started: float,
        demonstrations: Demonstrations | None = None,
    ) -> None:
        self.loaded = loaded
        self.config = loaded.config
        self.directory = directory
        self.run_dir = directory.path
        self.manager = manager
        self.engine = engine
        self.ranks = engine.ranks
        self.clock = engine.clock
        self.collector = collector
        self.pipeline = pipeline
        self.demonstrations = demonstrations
        self.sinks = sinks
        self.progress = progress
        self.stopper = Stopper(self.ranks)
        self._keep_best = None if self.config.run.keep_best is KeepBest.none else self.config.run.keep_best.value
        self._saver = Saver(
            self.run_dir,
            Retention(last=self.config.run.keep_last, best=self._keep_best),
            in_background=self.config.run.save_async,
        )
        self._earlier_s = progress.wall_s
        self._started = started
        self._said_offloaded: set[str] = set()
        self._warned: set[str] = set()
        self._versions = simulator_versions(self.config.env.name)
        manager.count_restarts(progress.restarts)
        self._idle = 0
        self._saved_at = progress.iteration or -1  # a run that never got to an iteration has saved nothing

    def run(self) -> int:
        """Train to the end, or until stopped; returns the exit code."""
        config = self.config.run
        with self.stopper, self._saver:
            if self._owes_evaluation():
                self._log(self._evaluate())
                if self.progress.iteration:
                    self._save()  # with what was found, as if it had been in time
            self._take_times()
            while self._goes_on():
                self._refuse_offload()
                metrics = self._iterate_or_rescue()
                last = self.progress.iteration == config.iterations
                if self.stopper.agree() is None and (last or is_due(self.progress.iteration, config.eval_every)):
                    metrics |= self._evaluate()
                self._log(metrics | self._report_deaths() | self._report_mismatches())
                self._report_saved(self._saver.poll())
                if self._is_to_be_saved():
                    self._save()
            if self._saved_at < self.progress.iteration:
                self._save()
            with self.clock.measure(Phase.save):
                self._report_saved(self._saver.wait())
            self.stopper.agree()
            self._take_times()
            if self.ranks.is_first:
                self._write_summary()
        return self.stopper.exit_code

    def _iterate_or_rescue(self) -> dict[str, float]:
        """One iteration; if memory runs out in it, save what was learned before it ends the run."""
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
            f"{remedies(self.config)}: embodyrl resume {self.run_dir} KEY=VALUE"
        )

    def _rescue(self) -> str:
        """Save outside of the usual turn, without the episodes in progress; says what became of it. The last iteration
        may have learned in part, which is no harm."""
        if self._saved_at == self.progress.iteration:
            return "The iteration before it is saved"
        if self.ranks.size > 1:
            return "What was learned since the last checkpoint is lost, because the other ranks cannot be asked for it"
        self.collector.give_up_episodes()
        try:
            self._saver.wait()
            if (snapshot := self._snapshot()) is not None:
                self._report_saved([self._saver.save_now(snapshot)])
        except (RunError, RuntimeError, MemoryError) as error:
            return f"What was learned since the last checkpoint is lost, because saving failed as well ({error})"
        return "What was learned before it is saved"

    def _iterate(self) -> dict[str, float]:
        """One iteration of the pipeline."""
        iteration = Iteration(
            config=self.config,
            collector=self.collector,
            engine=self.engine,
            demonstrations=self.demonstrations,
            warn=self._warn_once,
        )
        start = time.perf_counter()
        with self.clock.measure(Phase.train):  # what is neither deciding nor simulating serves learning
            self.pipeline.run(iteration)
        seconds = time.perf_counter() - start
        metrics = iteration.metrics | self._take_times("time/iteration")
        self.progress.iteration += 1
        steps = metrics.get("env/steps", 0.0)  # supervised learning takes none
        self.progress.env_steps += int(steps)
        self.progress.train_s += seconds
        self._say_what_is_offloaded(metrics)
        self._warn_if_nothing_is_learned(metrics)
        self._warn_if_ratios_start_elsewhere(metrics)
        return metrics | {
            "env/total_steps": float(self.progress.env_steps),
            "time/env_steps_per_s": steps / seconds,
        }

    def _say_what_is_offloaded(self, metrics: dict[str, float]) -> None:
        """Say once of everything that is offloaded what that frees."""
        for name, text in OFFLOADED.items():
            freed = metrics.get(f"memory/{name}_freed_mib")
            if freed is not None and name not in self._said_offloaded:
                self._said_offloaded.add(name)
                self._message(f"offload: {text}, which frees {freed:.0f} MiB")

    def _warn_if_nothing_is_learned(self, metrics: dict[str, float]) -> None:
        """Say once when iteration after iteration has nothing to learn from."""
        self._idle = self._idle + 1 if metrics.get("train/passes") == 0 else 0
        if self._idle == IDLE_ITERATIONS:
            self._message(
                f"warning: nothing was learned in {IDLE_ITERATIONS} iterations, because the episodes of each group end "
                f"alike (success {metrics.get('env/success_once', 0.0):.2f}): start from a policy that sometimes "
                f"succeeds (model.checkpoint), choose easier tasks, or a reward that tells episodes apart "
                f"(algorithm.reward=dense)"
            )

    def _warn_if_ratios_start_elsewhere(self, metrics: dict[str, float]) -> None:
        """Say once that the update's forward passes do not give the log-probs of the rollout's."""
        error = metrics.get("train/ratio_error_first_minibatch", 0.0)
        if error <= RATIO_ERROR:
            return
        remedy = (
            "algorithm.old_logprobs=recompute computes them again as the update does (one forward pass more), "
            "engine.precision=float32 rounds less"
        )
        if self.config.algorithm.old_logprobs is OldLogprobs.recompute:
            remedy = "they were computed again, so the policy's `evaluate` gives other log-probs for the same decisions"
        self._warn_once(
            "ratio_error",
            f"probability ratios are off 1 by up to {error:.2g} in iteration {self.progress.iteration}, before any "
            f"weight changed, because the update computes other log-probs than the rollout "
            f"({str(self.engine.precision).removeprefix('torch.')}): {remedy}",
        )

    def _warn_once(self, kind: str, text: str) -> None:
        """Say a warning, of each kind the first one alone."""
        if kind not in self._warned:
            self._warned.add(kind)
            self._message(f"warning: {text}")

    def _evaluate(self) -> dict[str, float]:
        """Evaluate on held-out start states; the training episodes go on afterwards as if nothing had happened."""
        episodes = held_out_episodes(self.config)
        noise = evaluation_noise(self.config, self.engine)
        with borrowed(self.manager, self.clock, self.collector.in_progress), self._film(episodes) as film:
            result = evaluate(self.manager, self.engine, episodes, film, noise)
        metrics = result.metrics()
        self.progress.evaluations[str(self.progress.iteration)] = {
            name: value for name, value in metrics.items() if name.startswith("eval/")
        }
        self._message(result.line())
        return metrics | self._take_times("time/eval")

    @contextmanager
    def _film(self, episodes: Sequence[EpisodeSpec]) -> Iterator[Film | None]:
        """A film of this evaluation, if it is one of those that are filmed."""
        video, number = self.config.tracking.video, len(self.progress.evaluations)
        if not video.episodes or number % video.every or not self.ranks.is_first:
            yield None
            return
        path = self.run_dir / VIDEOS / f"iteration_{self.progress.iteration:06d}.mp4"
        with Film(self.manager, path, episodes[: video.episodes]) as film:
            yield film
        self._message(f"filmed {path}")

    def _report_deaths(self) -> dict[str, float]:
        """Say which simulator processes died and were replaced."""
        deaths = [str(death) for death in self.manager.take_deaths()]
        deaths = [death for each in self.ranks.gather_values(deaths) for death in each]
        for death in deaths:
            self._message(f"replaced a simulator process; what it was playing is void. {death}")
        self.progress.restarts += len(deaths)
        self.manager.count_restarts(self.progress.restarts)
        return {"env/restarts": float(self.progress.restarts)} if self.progress.restarts else {}

    def _report_mismatches(self, changed: str = "") -> dict[str, float]:
        """Say once that slots do not come back from their states as they were.

        Args:
            changed: how the simulators differ from those that the states are of, where they do.
        """
        first = self.ranks.rank * self.manager.num_envs
        own = [first + slot for slot in self.manager.take_mismatches()]
        slots = [slot for each in self.ranks.gather_values(own) for slot in each]
        self.progress.restore_mismatches += len(slots)
        if slots and self.progress.comes_back:
            why = (
                f"They were saved with other simulators: {changed}"
                if changed
                else "Its episodes depend on more than start state, seed and actions. Until they do not, evaluations "
                "and resumes void what is in progress (see 'The one rule' in docs/simulators.md); "
                "env/restore_mismatches counts, workers/env-*.log names the episodes"
            )
            self._message(
                f"warning: simulator {self.config.env.name!r} did not come back from its saved states as it was, in "
                f"{len(slots)} slots ({_some(slots)}). What they were playing is void: nothing is learned from it. "
                + why
            )
            self.progress.comes_back = bool(changed)
        count = self.progress.restore_mismatches
        return {"env/restore_mismatches": float(count)} if count else {}

    def _refuse_offload(self) -> None:
        """End a run whose simulators are to be ended and brought back, if they do not come back as they were.

        Raises:
            RunError: that is so; what was learned is saved.
        """
        if self.progress.comes_back or not self.config.env.offload:
            return
        if self._saved_at < self.progress.iteration:
            self._save()
        self._report_saved(self._saver.wait())
        raise RunError(
            f"env.offload is true, but simulator {self.config.env.name!r} does not come back from its saved states as "
            f"it was, so that no episode would outlast an iteration. What was learned is saved. Go on with the "
            f"simulators left where they are: embodyrl resume {self.run_dir} env.offload=false"
        )

    def _goes_on(self) -> bool:
        """Whether there is another iteration: not at the end, not asked to stop, not good enough yet."""
        unfinished = self.progress.iteration < self.config.run.iterations
        return self.stopper.agree() is None and unfinished and not self._is_good_enough()

    def _owes_evaluation(self) -> bool:
        """Whether an evaluation is due before anything else: the one before training, or one that a signal left out."""
        iteration, config = self.progress.iteration, self.config.run
        if self.progress.latest:
            return False
        return is_due(iteration, config.eval_every) or iteration == config.iterations

    def _is_good_enough(self) -> bool:
        target = self.config.run.stop_at_success
        success = self.progress.latest.get("eval/success_once")
        return target is not None and success is not None and success >= target

    def _is_to_be_saved(self) -> bool:
        best = self._keep_best is not None and self.progress.is_best_yet(self._keep_best)
        return best or is_due(self.progress.iteration, self.config.run.save_every)

    def _take_times(self, what: str = "time/unlogged") -> dict[str, float]:
        """Seconds since the last call: all of them under `what`, and how they are split beside it."""
        taken = divide_waiting(self.clock.take(), self.manager.take_work().drawing)
        for phase in Phase:
            self.progress.phases_s[phase] = self.progress.phases_s.get(phase, 0.0) + taken[phase]
        prefix = "time" if what == "time/iteration" else what
        split = {f"{prefix}/{name}": seconds for name, seconds in taken.items()}
        return {what: sum(taken[phase] for phase in Phase)} | split

    def _save(self) -> None:
        """Write a checkpoint of this moment."""
        with self.clock.measure(Phase.save):
            if (snapshot := self._snapshot()) is not None:
                self._report_saved(self._saver.save(snapshot))
        self._saved_at = self.progress.iteration

    def _snapshot(self) -> Snapshot | None:
        """What all ranks hold, on the first one, which saves it."""
        self.progress.wall_s = self.wall_s
        policy, state = self.engine.whole_policy(), self._whole_state()
        if policy is None:
            return None
        return Snapshot(
            iteration=self.progress.iteration,
            metrics=self.progress.latest,
            policy=policy,
            loaded=self.loaded,
            trainer=state,
        )

    def _whole_state(self) -> TrainerState:
        """The state of all ranks; it does not show how many there are."""
        slots = list(range(self.manager.num_envs))
        simulators = self.manager.get_state(slots) if self.collector.in_progress else []
        return TrainerState(
            counters={
                "progress": vars(self.progress),
                "collector": self._collector_state(),
                "simulator": self._versions,
            },
            engine=self.engine.state_dict(),
            simulators=self.ranks.gather_lists(simulators),
            surplus=self.collector.surplus,
        )

    def _collector_state(self) -> dict[str, Any]:
        """The state of all ranks' collectors, as if there was one."""
        state: dict[str, Any] = join_slots(self.ranks.gather_values(self.collector.state_dict()))
        return state

    def _report_saved(self, published: Sequence[Saved]) -> None:
        for saved in published:
            meanwhile = f", {saved.waited_s:.1f} s of them waiting" if self.config.run.save_async else ""
            self._message(f"saved {saved.place}  ({saved.seconds:.1f} s{meanwhile})")

    def restore(self, state: TrainerState) -> None:
        """Continue from a checkpoint's trainer state (the policy's weights and `progress` are there already).

        Raises:
            DamageError: the state is not that of such a run.
        """
        check_alike(state.counters.get("collector"), self._collector_state(), "the checkpoint's collector")
        check_alike(dict.fromkeys(state.engine), dict.fromkeys(self.engine.state_dict()), "the checkpoint's engine")
        self.engine.load_state_dict(state.engine)
        slots = self.manager.num_envs
        own = range(self.ranks.rank * slots, (self.ranks.rank + 1) * slots)
        if state.simulators:
            self.manager.set_state(list(range(slots)), [state.simulators[slot] for slot in own])
        self.collector.load_state_dict(own_slots(state.counters["collector"], own))
        self.collector.surplus = state.surplus
        changed = "; ".join(changes(state.counters.get("simulator", {}), self._versions))
        if changed:
            self._message(f"simulators have changed since the checkpoint was saved: {changed}")
            self.progress.comes_back = True  # so far as these are concerned
        self._report_mismatches(changed)

    @property
    def wall_s(self) -> float:
        """Seconds since the run began, over all processes that worked on it."""
        return self._earlier_s + time.monotonic() - self._started

    def _write_summary(self) -> None:
        write_whole(self.run_dir / SUMMARY_FILE, json.dumps(self.summary(), indent=2) + "\n")
        write_report(self.run_dir)

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        evaluations = self.progress.evaluations
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
            "stopped_by": None if self.stopper.signal is None else self.stopper.signal.name,
            "evaluations": evaluations,
            "config_hash": config_hash(self.loaded.written),
            "versions": {"embodyrl": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def _log(self, metrics: dict[str, float]) -> None:
        for sink in self.sinks:
            sink.log(self.progress.iteration, metrics)

    def _message(self, text: str) -> None:
        if not self.ranks.is_first:
            return
        text = without_controls(text)  # some of it is said by simulators
        self.directory.note(text)
        for sink in self.sinks:
            sink.message(text)


def _some(slots: Sequence[int]) -> str:
    """The first of these slots, in words."""
    return ", ".join(map(str, slots[:SHOWN_SLOTS])) + (", ..." if len(slots) > SHOWN_SLOTS else "")


def join_slots(states: Sequence[Any]) -> Any:
    """What ranks say about their slots as what one would say about all: lists have an entry per slot."""
    first = states[0]
    if isinstance(first, list):
        return [entry for state in states for entry in state]
    if isinstance(first, dict):
        return {key: join_slots([state[key] for state in states]) for key in first}
    return first


def own_slots(state: Any, slots: range) -> Any:
    """What a state says about some of the slots; the inverse of `join_slots`."""
    if isinstance(state, list):
        return state[slots.start : slots.stop]
    if isinstance(state, dict):
        return {key: own_slots(value, slots) for key, value in state.items()}
    return state


def is_due(iteration: int, every: int) -> bool:
    """Whether something that happens every `every` iterations (0: never) happens after `iteration`."""
    return every > 0 and iteration % every == 0
