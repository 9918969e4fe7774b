"""Signals that ask to stop: finish what is under way, save, leave with 128 + number (129, 130, 138, 143)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import Signals
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from embodyrl.placement.signals import heard, ignore_from_now_on

if TYPE_CHECKING:  # imports torch
    from embodyrl.engine.parallel import Ranks

ONE_WISH_S = 2.0
"""Signals within this time of the first are the same request: GNU timeout and batch systems signal the program and then
its process group, and people press Ctrl-C twice [s]."""

AGAIN_S = 0.5
"""Interval after which an `Interrupted` that was swallowed is raised again [s]."""

NO_READER = "nobody reads stdout any more"

CALLBACK = 0
"""Stands for a callback among the numbers of signals that asked to stop."""
NO_SIGNAL = (None, CALLBACK)
"""Requests over which a signal takes precedence."""

_active: list[Stopper] = []
"""Those that turn signals into requests now, the innermost last."""

_ending: list[None] = []
"""Has an entry for each `ending_without_reader`."""

_fulfilled: list[float] = []
"""Time (`time.monotonic`) of the request that a `Stopper` of this process received first. From then on the program
closes, which a repetition of the request must not interrupt."""


class Interrupted(BaseException):
    """Raised by a signal in a command that has nothing to save, so that it releases its resources.

    Attributes:
        exit_code: 128 + number of the signal.
    """

    def __init__(self, number: Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.exit_code = 128 + number.value


class LastingScreen:
    """stdout whose reader may go away (`| head`, a `tee` that dies, or that the same Ctrl-C ends before this process
    knows of it) while a `Stopper` is active or after its request: what is printed then is dropped, and the work under
    way is finished and saved, as after SIGHUP. Within `ending_without_reader` the program ends so. At other times,
    `BrokenPipeError` is raised as ever.

    Args:
        stream: stdout.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text; returns its length."""
        with _no_reader_needed():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is still in Python's buffer."""
        with _no_reader_needed():
            self._stream.flush()


@contextmanager
def _no_reader_needed() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        if not (_active or _ending or _fulfilled):
            raise
        _leave_dead_screens()  # also for what is still in Python's buffer
        if _active:
            _active[-1].hang_up()
        elif not _fulfilled and signal.SIGHUP in heard():
            _say(NO_READER)
            os.kill(os.getpid(), signal.SIGHUP)  # to the main thread, whichever one prints


@contextmanager
def ending_without_reader() -> Iterator[None]:
    """Have a block end as after SIGHUP once nobody reads stdout any more, while no `Stopper` is active; not if the
    program is deaf to SIGHUP (nohup)."""
    _ending.append(None)
    try:
        yield
    finally:
        _ending.pop()


@contextmanager
def interruptible() -> Iterator[None]:
    """Run the program from here to its end; a signal ends it by an exception. Signals that follow within `ONE_WISH_S`
    are ignored, so that closing is not disturbed; a later one ends the program at once. After a `Stopper` has received
    one, only a later Ctrl-C does.

    Python drops exceptions raised in a `__del__` or in the callback of a weak reference, of which imports have many,
    and libraries have bare `except:` clauses: an exception that is not being handled any more is raised again.

    Raises:
        Interrupted: a signal came.
    """
    raised: list[Interrupted] = []
    first_at: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if earlier := first_at or _fulfilled:
            if now - earlier[0] > ONE_WISH_S and (first_at or number == signal.SIGINT):
                os._exit(128 + number)
            return
        first_at.append(now)
        _leave_dead_screens()
        raised.append(Interrupted(Signals(number)))
        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
        raise raised[0]

    def again(number: int, frame: FrameType | None) -> None:
        if not _is_handled(raised[0]):
            raise raised[0].with_traceback(None)

    hook = sys.unraisablehook
    sys.unraisablehook = lambda dropped: None if dropped.exc_value in raised else hook(dropped)
    for each in heard():
        signal.signal(each, interrupt)
    stdout, sys.stdout = sys.stdout, cast(TextIO, LastingScreen(sys.stdout))
    try:
        yield
    finally:
        sys.stdout = stdout
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        ignore_from_now_on()
        sys.unraisablehook = hook


def _is_handled(wanted: BaseException) -> bool:
    """Return whether an `except` or a `finally` of this thread is handling an exception, also while it handles another
    one."""
    error = sys.exc_info()[1]
    while error is not None and error is not wanted:
        error = error.__context__
    return error is not None


def end_program(number: int) -> NoReturn:
    """End this process at once. Simulator processes die with it (parent-death signal), so nothing is left over."""
    os._exit(128 + number)


def raise_interrupt(number: int) -> NoReturn:
    """Raise `KeyboardInterrupt`, as Python does by default on Ctrl-C."""
    raise KeyboardInterrupt


class Stopper:
    """While active, turns a signal into a request to stop. Further signals change nothing, except a second Ctrl-C later
    than `ONE_WISH_S` after the first: that is a person who does not want to wait.

    Python delivers signals only to the main thread, so in another thread none is received, and no handler is changed.

    Args:
        ranks: those of the run, which stop together; None: there is only this process.
        unit: the work that is finished first, for people.
        leave: called on that second Ctrl-C with its number.
    """

    def __init__(
        self,
        ranks: Ranks | None = None,
        unit: str = "this iteration",
        leave: Callable[[int], NoReturn] = end_program,
    ) -> None:
        self._ranks = ranks if ranks is not None and ranks.size > 1 else None
        self._unit = unit
        self._leave = leave
        self._agreed: int | None = None
        self._wish: int | None = None
        """Number of the signal that asks to stop, or `CALLBACK`."""
        self._first_at: dict[int, float] = {}
        """Time (`time.monotonic`) of the first signal of each kind."""
        self._previous: dict[Signals, Any] = {}

    @property
    def stopped_by(self) -> str | None:
        """Cause of a stop that the last `agree` found: the name of a signal, `callback`, or None."""
        if self._agreed is None:
            return None
        return "callback" if self._agreed == CALLBACK else Signals(self._agreed).name

    @property
    def exit_code(self) -> int:
        """128 + number of the signal that asked to stop; 0 if none did."""
        return 128 + self._agreed if self._agreed else 0

    def ask(self) -> None:
        """Request to stop on behalf of a callback; a signal's request takes precedence."""
        if self._wish is None:
            self._wish = CALLBACK

    def hang_up(self) -> None:
        """Request to stop because nobody reads stdout any more; not if the program is deaf to SIGHUP (nohup)."""
        if self._wish in NO_SIGNAL and signal.SIGHUP in heard():
            self._accept(signal.SIGHUP, why=f"{NO_READER}: ")

    def agree(self) -> bool:
        """Agree on the request of the first rank that has one; returns whether there is any. All ranks must call it."""
        # Signals reach ranks at different moments; if each acted on its own, some would begin an iteration that the
        # others have left.
        wishes = [self._wish] if self._ranks is None else self._ranks.gather_values(self._wish)
        self._agreed = next((wish for wish in wishes if wish is not None), None)
        if self._agreed is not None:
            _leave_dead_screens()
        return self._agreed is not None

    def __enter__(self) -> Stopper:
        _active.append(self)
        if threading.current_thread() is threading.main_thread():
            self._previous = {each: signal.signal(each, self._handle) for each in heard()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _restore(self._previous)
        _active.remove(self)
        if self._wish is not None:
            _leave_dead_screens()
        if error is not None and self._ranks is not None:
            # torchrun ends all ranks as soon as one has died; this one must print its error first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._first_at.get(number, now) > ONE_WISH_S:
            self._leave(number)
        # Noted before anything is done: another signal may arrive while this one is handled.
        self._first_at.setdefault(number, now)
        if self._wish in NO_SIGNAL:
            self._accept(number)
        elif now - min(self._first_at.values()) > ONE_WISH_S:
            _say(f"still finishing {self._unit}, then saving{_hint(number)}")

    def _accept(self, number: int, why: str = "") -> None:
        self._wish = number
        _fulfilled[:] = [time.monotonic()]
        _leave_dead_screens()
        _say(f"{why}stopping after {self._unit}, then saving{_hint(number)}")


def _hint(number: int) -> str:
    again = f"; Ctrl-C once more, after {ONE_WISH_S:g} s, to leave at once without saving"
    return again if number == signal.SIGINT else ""


def _say(text: str) -> None:
    """Write a line to stderr, past Python's buffer, which may be in use when a signal arrives."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def _leave_dead_screens() -> None:
    """Redirect stdout or stderr to /dev/null if it has no reader any more (a terminal that was closed, a `tee` that the
    same Ctrl-C has ended), so that printing a line does not keep a program from saving."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _restore(handlers: dict[Signals, Any]) -> None:
    """Restore the handlers of signals. One that Python did not set cannot be restored; the system's default is set."""
    for each, handler in handlers.items():
        signal.signal(each, signal.SIG_DFL if handler is None else handler)
