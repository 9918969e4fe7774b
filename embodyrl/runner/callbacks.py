"""Callbacks: objects that are called after iterations and evaluations, and may stop the run. Every run has one of its
own, which warns about metrics; beside it there are reports on the run's simulator processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from embodyrl.config.needs import Idleness
from embodyrl.config.schema import Config, OldLogprobs
from embodyrl.errors import UserError, near_match

if TYPE_CHECKING:  # these import torch, which a module that only defines callbacks need not
    from embodyrl.rollout.rollouts import Rollouts, SimulatorEvents
    from embodyrl.runner.evaluation import Evaluation
    from embodyrl.runner.state import Progress
    from embodyrl.runner.stopping import Stopper


class CallbackError(UserError):
    """Raised when an object is no callback, or returns something else than True, False or None."""


class Callback:
    """Base class of callbacks; any object with one of its methods is accepted too.

    A method that returns False stops the run: it is saved, and can be resumed. None and True continue it; anything else
    is a `CallbackError`. An exception stops the run in the same way, and is raised again once the run is saved and
    closed.
    """

    def on_iteration(self, metrics: Mapping[str, float]) -> bool | None:
        """Handle a finished iteration, which is logged and not yet saved.

        Args:
            metrics: its row of metrics.jsonl, `iteration` (1, 2, ...) included; with those of its evaluation, if any.
        """

    def on_evaluation(self, result: Evaluation) -> bool | None:
        """Handle an evaluation: the one before training, one in between, or the last."""


METHODS = {"on_iteration": "metrics", "on_evaluation": "result"}
"""The methods of a callback, with the argument of each."""


def check_callbacks(callbacks: object) -> None:
    """Check the callbacks before anything starts.

    Raises:
        CallbackError: `callbacks` is no sequence, or one of them is a class, has none of the methods, a misspelt one,
            or one that cannot be called with its argument.
    """
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise CallbackError(f"callbacks is a {type(callbacks).__name__}: give a list of objects")
    for index, callback in enumerate(callbacks):
        who = f"callbacks[{index}]"
        if isinstance(callback, type):
            raise CallbackError(f"{who} is the class {callback.__name__}: give an object, {callback.__name__}()")
        who += f" ({type(callback).__name__})"
        own = [name for name in dir(callback) if not name.startswith("_") and not hasattr(Callback, name)]
        for name in own:
            if name.startswith("on_") and (near := near_match(name, METHODS)):
                raise CallbackError(f"{who} has a method {name!r}, which is never called - did you mean {near!r}?")
        methods = {name: getattr(callback, name) for name in METHODS if _is_own(callback, name)}
        if not methods and type(callback) is not Callback:  # which stands for no callback
            near = next((near for name in own if (near := near_match(name, METHODS))), None)
            hint = f" - did you mean {near!r}?" if near else ""
            raise CallbackError(
                f"{who} has no method {' or '.join(METHODS)}{hint}: give an object that has one of them "
                "(embodyrl.Callback is a base class)"
            )
        for name, method in methods.items():
            _check_signature(f"{who}.{name}", method, METHODS[name])


def _is_own(callback: object, name: str) -> bool:
    """Return whether an object has a method other than the one of `Callback`, which does nothing."""
    method = getattr(callback, name, None)
    return method is not None and getattr(method, "__func__", None) is not getattr(Callback, name)


def _check_signature(who: str, method: object, argument: str) -> None:
    """Raise `CallbackError` for what cannot be called with one argument."""
    if not callable(method):
        raise CallbackError(f"{who} is a {type(method).__name__}: make it a method that takes {argument!r}")
    try:
        signature = inspect.signature(method)
    except ValueError:  # some functions of C have none
        return
    try:
        signature.bind(None)
    except TypeError:
        name = who.rpartition(".")[2]
        raise CallbackError(
            f"{who} takes {signature}, but is called with one argument: define it as {name}(self, {argument})"
        ) from None


class Callbacks:
    """The callbacks of a run, called one after the other.

    An exception in one of them stops the run as a result of False does, so that all ranks leave together and the run is
    saved; `raise_fault` then raises it.

    Args:
        callbacks: see `check_callbacks`.
        stopper: of the run.
    """

    def __init__(self, callbacks: Sequence[object], stopper: Stopper) -> None:
        self._callbacks = callbacks
        self._stopper = stopper
        self._fault: BaseException | None = None

    def on_iteration(self, metrics: Mapping[str, float]) -> None:
        """Call all of them after an iteration."""
        self._tell("on_iteration", metrics)

    def on_evaluation(self, result: Evaluation) -> None:
        """Call all of them after an evaluation."""
        self._tell("on_evaluation", result)

    def raise_fault(self) -> None:
        """Raise the exception of a callback, if there was one."""
        if self._fault is not None:
            raise self._fault

    def _tell(self, name: str, what: object) -> None:
        for callback in self._callbacks:
            if self._fault is not None:
                return
            method = getattr(callback, name, None)
            if method is None:
                continue
            try:
                answer = method(what)
                _check_answer(callback, name, answer)
            except BaseException as error:
                self._fault = error
                self._stopper.ask()
            else:
                if answer is False:
                    self._stopper.ask()


def _check_answer(callback: object, name: str, answer: object) -> None:
    if answer is not None and not isinstance(answer, bool):
        raise CallbackError(
            f"{type(callback).__name__}.{name} returned {answer!r:.60}: return False to stop the run, and True or "
            "nothing to continue"
        )


# ---- what every run warns about and reports

OFFLOADED = {
    "simulators": "the simulators are gone while the policy learns",
    "optimizer": "the optimiser's state is away while the policy acts",
    "reference": "the reference policy is away but for scoring a batch",
}
"""Messages about offloading, by the name in `memory/<name>_freed_mib`."""
RATIO_ERROR = 1e-2
"""Largest distance of a probability ratio from 1, before any weight changed, without a warning. A clip is about 0.2."""
IDLE_ITERATIONS = 3
"""Number of iterations in a row that learn nothing after which there is a warning."""
IDLE_AGAIN = (10, 30, 100, 300, 1000, 3000, 10000)
"""Such numbers at which it is said again."""
STEPPED = ("train/grad_norm", "train/loss", "train/critic_loss", "train/actor_loss")
"""Metrics that an iteration only has if it has made an optimiser step."""
SHOWN_SLOTS = 8
"""Number of envs that a message names at most."""


class Warnings(Callback):
    """Warns about an iteration's metrics; each warning is shown once.

    Args:
        config: of the run.
        precision: data type of forward passes, for people.
        message: shows a line.
    """

    def __init__(self, config: Config, precision: str, message: Callable[[str], None]) -> None:
        self._config = config
        self._precision = precision
        self._message = message
        self._said: set[str] = set()
        self._idle = 0

    def warn(self, kind: str, text: str) -> None:
        """Show a warning, unless one of this kind was shown before."""
        self._once(kind, f"warning: {text}")

    def on_iteration(self, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        for name, text in OFFLOADED.items():
            freed = metrics.get(f"memory/{name}_freed_mib")
            if freed is not None:
                self._once(f"offload {name}", f"offload: {text}, which frees {freed:.0f} MiB")
        self._tell_if_nothing_is_learned(metrics)
        self._warn_if_ratios_start_elsewhere(metrics)

    def _once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._message(text)

    def _tell_if_nothing_is_learned(self, metrics: Mapping[str, float]) -> None:
        """Say that an iteration learned nothing, and why; of many in a row ever fewer, after `IDLE_ITERATIONS` with a
        remedy."""
        if (idleness := idleness_of(metrics, self._config)) is None:
            self._idle = 0
            return
        self._idle += 1
        if self._idle == 1:
            self._message(f"iteration {metrics['iteration']:.0f} learned nothing: {idleness.why}")
        elif self._idle == IDLE_ITERATIONS and idleness.remedy:
            self._message(
                f"warning: nothing was learned in {IDLE_ITERATIONS} iterations: {idleness.why}: {idleness.remedy}"
            )
        elif self._idle in IDLE_AGAIN:
            self._message(f"nothing was learned in {self._idle} iterations in a row: {idleness.why}")

    def _warn_if_ratios_start_elsewhere(self, metrics: Mapping[str, float]) -> None:
        """Warn if the update's forward passes do not give the rollout's log-probs."""
        error = metrics.get("train/ratio_error_first_minibatch", 0.0)
        if error <= RATIO_ERROR:
            return
        remedy = (
            "algorithm.old_logprobs=recompute computes them again as the update does (one forward pass more), "
            "engine.precision=float32 rounds less"
        )
        if self._precision == "float32":  # whose rounding is a thousand times smaller
            remedy = "check that the policy's `evaluate` gives the log-probs of `act` for the same inputs and trace"
        if getattr(self._config.algorithm, "old_logprobs", None) is OldLogprobs.recompute:
            remedy = "they were computed again, so the policy's `evaluate` gives other log-probs for the same chunks"
        self.warn(
            "ratio_error",
            f"probability ratios are off 1 by up to {error:.2g} in iteration {metrics['iteration']:.0f}, before any "
            f"weight changed, because the update computes other log-probs than the rollout "
            f"({self._precision}): {remedy}",
        )


def idleness_of(metrics: Mapping[str, float], config: Config) -> Idleness | None:
    """Return why an iteration has made no optimiser step, as its metrics tell; None if it has made one."""
    if any(name in metrics for name in STEPPED):
        return None
    if "train/skipped_steps" in metrics and metrics.get("train/epochs") != 0:
        return Idleness(
            "none of its optimiser steps was finite, so all were skipped (their minibatches are in not_finite/)",
            "lower engine.optimizer.learning_rate, or read the saved minibatches",
        )
    return config.algorithm.why_idle(metrics)


class SimulatorHealth:
    """Reports simulator processes that died, and slots that were not restored bit for bit.

    Args:
        rollouts: have the simulators.
        progress: counts both.
        name: of the simulator.
        message: says a line.
    """

    def __init__(self, rollouts: Rollouts, progress: Progress, name: str, message: Callable[[str], None]) -> None:
        self._rollouts = rollouts
        self._progress = progress
        self._name = name
        self._message = message
        rollouts.count_restarts(progress.restarts)

    def report(self, changed: str = "") -> dict[str, float]:
        """Report the deaths and mismatches since the last call; returns metrics. All ranks must call it.

        Args:
            changed: differences of the simulators to those that saved the states, if there are any.
        """
        news = self._rollouts.take_events()
        return self._report_deaths(news) | self._report_mismatches(news, changed)

    def _report_deaths(self, news: SimulatorEvents) -> dict[str, float]:
        """Report the simulator processes that died and were replaced."""
        for death in news.deaths:
            self._message(f"replaced a simulator process; its episodes are invalid. {death}")
        self._progress.restarts += len(news.deaths)
        self._rollouts.count_restarts(self._progress.restarts)
        return {"env/restarts": float(self._progress.restarts)} if self._progress.restarts else {}

    def _report_mismatches(self, news: SimulatorEvents, changed: str) -> dict[str, float]:
        """Report once that slots are not restored bit for bit."""
        slots = news.mismatches
        self._progress.restore_mismatches += len(slots)
        if slots and self._progress.restores_exactly:
            # A mismatch that another version explains is no fault of the simulator, so the next one is reported too.
            why = (
                f"They were saved with other simulators: {changed}"
                if changed
                else "Its episodes depend on more than start state, seed and actions. Until they do not, evaluations "
                "and resumes invalidate what is in progress (see 'The one rule' in docs/simulators.md); "
                "env/restore_mismatches counts, workers/env-*.log names the episodes"
            )
            self._message(
                f"warning: simulator {self._name!r} did not restore its saved states bit for bit in {len(slots)} envs "
                f"({_some(slots)}). Their episodes are invalid: nothing is learned from them. " + why
            )
            self._progress.restores_exactly = bool(changed)
        count = self._progress.restore_mismatches
        return {"env/restore_mismatches": float(count)} if count else {}


def _some(slots: Sequence[int]) -> str:
    """Return the numbers of the first of these slots as text."""
    return ", ".join(map(str, slots[:SHOWN_SLOTS])) + (", ..." if len(slots) > SHOWN_SLOTS else "")
