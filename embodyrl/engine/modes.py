"""What the weights are used for at the moment: to decide, or to learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum

from embodyrl.tracking.clock import Clock, Phase

Preparation = Callable[[], AbstractContextManager[object]]
"""What to do before a mode begins, and to undo when it ends."""


class Mode(StrEnum):
    """What the weights are used for."""

    rollout = "rollout"
    train = "train"


class Modes:
    """Remembers the mode and gets things ready for it.

    `around` holds, for each mode, what its user needs: memory brought back, shards gathered. It is entered in this
    order when the mode begins, and left in the opposite one. Being in a mode already, entering it does nothing; inside
    the other one it lasts for its block.

    Args:
        clock: getting ready counts as `sync`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.around: dict[Mode, list[Preparation]] = {mode: [] for mode in Mode}
        self.current: Mode | None = None

    @contextmanager
    def enter(self, mode: Mode) -> Iterator[None]:
        """Be in a mode for the length of a block."""
        if self.current is mode:
            yield
            return
        before = self.current
        with ExitStack() as stack:
            with self._clock.measure(Phase.sync):
                for preparation in self.around[mode]:
                    stack.enter_context(preparation())
            self.current = mode
            try:
                yield
            finally:
                self.current = before
            with self._clock.measure(Phase.sync):
                stack.close()
