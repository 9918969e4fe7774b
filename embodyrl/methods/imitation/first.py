"""Imitation of demonstrations with which a run begins, before anything is collected: behaviour cloning."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from embodyrl.methods.imitation.imitation import Imitation
from embodyrl.methods.learner import Baseline
from embodyrl.screen import counted

if TYPE_CHECKING:
    from embodyrl.data.batches import Demonstrations

HELD_OUT_MINIBATCHES = 50
"""Most minibatches of demonstrations that an imitation error is the mean of."""
AT_ONCE = 50
"""Steps of imitation between two looks at signals."""
CLONING_SUCCESS = 0.95
"""Success of behaviour cloning from which on a run says that it has little to learn."""


def _would_do(success: float) -> str | None:
    if success < CLONING_SUCCESS:
        return None
    return (
        f"behaviour cloning alone has {success:.2f}: there is little left to learn. "
        "algorithm=sft needs no rollouts, and a comparison needs fewer demonstrations or a harder task"
    )


CLONING = Baseline("behaviour cloning", "eval/cloned_success", "behaviour_cloning", _would_do)


class FirstImitation:
    """Imitates demonstrations for a number of steps, a few at a time.

    Args:
        imitation: makes the steps.
        demonstrations: in minibatches.
        wanted: steps in all.
        message: shows a line to people.
    """

    def __init__(
        self, imitation: Imitation, demonstrations: Demonstrations, wanted: int, message: Callable[[str], None]
    ) -> None:
        self._imitation, self._demonstrations = imitation, demonstrations
        self._wanted, self._message = wanted, message

    def steps(self, done: int) -> Iterator[int]:
        """Imitate; yields how many steps have been made."""
        demonstrations, begun = self._demonstrations, time.perf_counter()
        metrics: dict[str, float] = {}
        for count in self._few_at_once(done):
            metrics = self._imitation.learn_first(demonstrations.batches(done, count))
            done += count
            yield done
        self._message(
            f"imitation: {counted(done, 'step')} on {counted(demonstrations.chunks, 'chunk')} of "
            f"{counted(len(demonstrations.store), 'demonstration')}, "
            f"loss {metrics.get('train/loss', math.nan):.4g} ({time.perf_counter() - begun:.1f} s)"
        )

    def measure(self, share: float) -> Iterator[int]:
        """Show how well a policy that has imitated some of the demonstrations knows the others, and forget it again.
        Yields 0, since none of its steps stays.

        Args:
            share: of the demonstrations that are held out; 0: nothing is measured.
        """
        parts, begun, done = self._demonstrations.split(share) if share else None, time.perf_counter(), 0
        if parts is None:
            return
        held_out, others = parts
        with self._imitation.rolled_back():
            for count in self._few_at_once(0):
                self._imitation.learn_first(others.batches(done, count))
                done += count
                yield 0
            most = min(-(-held_out.chunks // self._demonstrations.batch_size), HELD_OUT_MINIBATCHES)
            error, spread = self._imitation.errors(held_out.batches(0, most))
        self._message(
            f"held out: a policy that has imitated the other demonstrations has an error of {error:.3g} on "
            f"{held_out.chunks:,} chunks of {held_out.episodes} of them; their mean has {spread:.3g} "
            f"({time.perf_counter() - begun:.1f} s)"
        )

    def _few_at_once(self, done: int) -> Iterator[int]:
        """Yield numbers of steps that are made together, until there are as many as wanted."""
        while done < self._wanted:
            count = min(AT_ONCE, self._wanted - done)
            yield count
            done += count
