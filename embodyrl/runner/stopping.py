"""Ctrl-C and SIGTERM: finish the iteration, save, leave with 130 or 143. A second one leaves at once."""

from __future__ import annotations

import os
import signal
import sys
from signal import Signals
from types import FrameType, TracebackType
from typing import Any

from embodyrl.engine.parallel import ALONE, Ranks


class Stopper:
    """While active, turns the first SIGINT or SIGTERM into a wish to stop, and the second into an immediate exit.

    Args:
        ranks: those of the run, which stop together.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._agreed: Signals | None = None
        self._wish: Signals | None = None
        self._previous: dict[Signals, Any] = {}

    @property
    def signal(self) -> Signals | None:
        """The signal that asked to stop, or None; of several ranks what they agreed on last."""
        return self._wish if self._ranks.size == 1 else self._agreed

    @property
    def exit_code(self) -> int:
        """128 + signal number: 130 for SIGINT, 143 for SIGTERM; 0 if nobody asked to stop."""
        return 0 if self.signal is None else 128 + self.signal.value

    def agree(self) -> Signals | None:
        """Agree on the wish of the first rank that has one, and return it. All ranks must ask."""
        wishes = [wish for wish in self._ranks.gather_values(self._wish) if wish is not None]
        self._agreed = Signals(wishes[0]) if wishes else None
        return self.signal

    def __enter__(self) -> Stopper:
        for each in (signal.SIGINT, signal.SIGTERM):
            self._previous[each] = signal.signal(each, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)
        if error is not None and self._ranks.size > 1:
            # torchrun ends all ranks as soon as one has died; this one has something to say first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._wish is not None:
            # Simulator processes die with this one (parent-death signal), so nothing is left behind.
            os._exit(128 + number)
        self._wish = Signals(number)
        sys.stderr.write("\nstopping after this iteration, then saving; once more to leave at once without saving\n")
