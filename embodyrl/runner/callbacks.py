"""Callbacks: objects that are called after iterations and evaluations, and may stop the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from embodyrl.errors import UserError, near_match

if TYPE_CHECKING:  # both import torch, which a module that only defines callbacks need not
    from embodyrl.runner.evaluation import Evaluation
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


METHODS = ("on_iteration", "on_evaluation")


def check_callbacks(callbacks: object) -> None:
    """Check the callbacks before anything starts.

    Raises:
        CallbackError: `callbacks` is no sequence, or one of them has none of the methods, or a misspelt one.
    """
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise CallbackError(f"callbacks is a {type(callbacks).__name__}: give a list of objects")
    for index, callback in enumerate(callbacks):
        who = f"callbacks[{index}]"
        if isinstance(callback, type):
            raise CallbackError(f"{who} is the class {callback.__name__}: give an object, {callback.__name__}()")
        own = [name for name in dir(callback) if name.startswith("on_") and name not in METHODS]
        for name in own:
            if near := near_match(name, METHODS):
                raise CallbackError(
                    f"{who} ({type(callback).__name__}) has a method {name!r}, which is never called - "
                    f"did you mean {near!r}?"
                )
        if not any(callable(getattr(callback, name, None)) for name in METHODS):
            raise CallbackError(
                f"{who} is a {type(callback).__name__} without {' or '.join(METHODS)}: give an object that has one of "
                "them (embodyrl.Callback is a base class)"
            )


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
            "nothing to go on"
        )
