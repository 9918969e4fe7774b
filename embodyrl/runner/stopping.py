"""Ctrl-C and SIGTERM: finish the iteration, save, leave with 130 or 143. A second one leaves at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any


class Stopper:
    """While active, turns the first SIGINT or SIGTERM into a wish to stop, and the second into an immediate exit."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that asked to stop, or None."""
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 + signal number: 130 for SIGINT, 143 for SIGTERM; 0 if nobody asked to stop."""
        return 0 if self.signal is None else 128 + self.signal.value

    def __enter__(self) -> Stopper:
        for each in (signal.SIGINT, signal.SIGTERM):
            self._previous[each] = signal.signal(each, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            # Simulator processes die with this one (parent-death signal), so nothing is left behind.
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        sys.stderr.write("\nstopping after this iteration, then saving; once more to leave at once without saving\n")
