"""Chunks that overlap: what is executed where a policy decides before the last chunk is over.

A chunk that takes its time to be chosen begins late, and the one before it goes on until then. Temporal ensembling
(Zhao et al. 2023, "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware", arXiv:2304.13705, section 4)
executes a mean of what several chunks say about the same step.
Shapes: `B` slots, `C` actions in a chunk, `E` actions that are executed between two decisions, `D` action dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import Config
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import is_discrete
from embodyrl.errors import UserError

Slots = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How chunks overlap."""

    ensemble: float | None = None
    """`eval.ensemble`."""
    delay: int = 0
    """Control steps by which chunks are late."""

    @classmethod
    def of(cls, config: Config) -> Overlap:
        """Return that of a config's evaluation."""
        return cls(ensemble=config.eval.ensemble, delay=config.delay)


ONE_AFTER_ANOTHER = Overlap()


class ActionQueue:
    """Actions to come of the episodes in progress in `num_slots` slots. A policy decides every `executed` steps.

    The first `delay` steps after an observation pass before the chunk that was chosen for it is there: they belong to
    earlier chunks. The first chunk of an episode is waited for. From there on a chunk replaces what was queued; with a
    `coefficient`, the action of a step is the mean of those that all chunks predicted for it, weighted by
    exp(-coefficient * i), i = 0 the oldest.

    Args:
        num_slots: number of slots.
        chunk_size: `C`.
        action_dim: `D`.
        coefficient: above 0, older chunks count more; below 0, newer ones. None: only the newest counts.
        executed: `E`; with `delay` at most `C`.
        delay: control steps, at most `E`.
    """

    def __init__(
        self,
        num_slots: int,
        chunk_size: int,
        action_dim: int,
        coefficient: float | None = None,
        *,
        executed: int = 1,
        delay: int = 0,
    ) -> None:
        self._shares = np.ones(chunk_size) if coefficient is None else newest_shares(chunk_size, coefficient)
        self._executed = executed
        self._late = np.arange(chunk_size) < delay
        # Of each of the next C steps: how many chunks spoke of it, and the mean of what they said. In float64, so that
        # a mean is that of all chunks at once to the last digits of float32.
        self._counts = np.zeros((num_slots, chunk_size), np.int64)
        self._means = np.zeros((num_slots, chunk_size, action_dim))

    @classmethod
    def acting_in(
        cls,
        simulator: SimulatorSpec,
        num_slots: int,
        chunk_size: int,
        overlap: Overlap,
        *,
        executed: int,
    ) -> Self:
        """Build one for simulators with this spec.

        Raises:
            UserError: actions are choices, which have no mean.
        """
        mean = overlap.ensemble
        if mean is not None and is_discrete(simulator):
            raise UserError(
                f"eval.ensemble = {mean} averages actions, but those of this simulator are choices, and the "
                "mean of two choices is a third one: set eval.ensemble to null"
            )
        return cls(num_slots, chunk_size, simulator.action_dim, mean, executed=executed, delay=overlap.delay)

    def begin(self, slots: Slots) -> None:
        """Forget the chunks of slots that begin an episode."""
        self._counts[slots], self._means[slots] = 0, 0.0

    def act(self, slots: Slots, chunks: NDArray[np.float32]) -> NDArray[np.float32]:
        """Add a chunk `[B, C, D]` of each of some slots; returns the actions of their next steps, `[B, E, D]`."""
        counts, means = self._counts[slots], self._means[slots]
        there = ~(self._late & (counts[:, :1] > 0))
        share = np.where(there, self._shares[counts], 0.0)[..., None]
        # What counts alone is executed to the last bit.
        means = np.where(share == 1.0, chunks, means + share * (chunks - means))
        self._counts[slots] = _shifted(counts + there, self._executed)
        self._means[slots] = _shifted(means, self._executed)
        return means[:, : self._executed].astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all slots' chunks, as arrays by name."""
        return {"counts": self._counts.copy(), "means": self._means.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._counts[:], self._means[:] = state["counts"], state["means"]


def _shifted(entries: NDArray[Any], steps: int) -> NDArray[Any]:
    """Return entries `[B, C, ...]` as they stand after some steps; of the last ones no chunk has spoken yet."""
    moved = np.zeros_like(entries)
    moved[:, : entries.shape[1] - steps] = entries[:, steps:]
    return moved


def newest_shares(chunk_size: int, coefficient: float) -> NDArray[np.float64]:
    """Return what the newest of 1 to `C` chunks weighs in their mean, as a share of all their weights, `[C]`."""
    # By recurrence, not from the weights themselves: those of a long chunk may be too large for a number, or all zero.
    relative = np.ones(chunk_size)  # the sum of weights, divided by the newest one
    with np.errstate(over="ignore"):  # infinite where the newest chunk weighs nothing, which makes its share 0
        ratio = np.exp(np.float64(coefficient))
        for number in range(1, chunk_size):
            relative[number] = 1.0 + relative[number - 1] * ratio
    return 1.0 / relative
