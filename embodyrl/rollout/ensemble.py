"""Temporal ensembling: what is executed is a mean of what several chunks say about the same step.

Zhao et al. (2023), "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware", arXiv:2304.13705, section 4.
Shapes: `B` slots, `C` actions in a chunk, `D` action dims.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import is_discrete
from embodyrl.errors import UserError

Slots = NDArray[np.int64]


class TemporalEnsemble:
    """Chunks of the episodes in progress in `num_slots` slots. A policy decides before every action; the action of a
    step is the mean of those that chunks predicted for it, weighted by exp(-coefficient * i), i = 0 the oldest.

    Args:
        num_slots: number of slots.
        chunk_size: `C`.
        action_dim: `D`.
        coefficient: above 0, older chunks count more; below 0, newer ones.
    """

    def __init__(self, num_slots: int, chunk_size: int, action_dim: int, coefficient: float) -> None:
        self._shares = newest_shares(chunk_size, coefficient)
        # Of each of the next C steps: how many chunks spoke of it, and the mean of what they said. In float64, so that
        # a mean is that of all chunks at once to the last digits of float32.
        self._counts = np.zeros((num_slots, chunk_size), np.int64)
        self._means = np.zeros((num_slots, chunk_size, action_dim))

    @classmethod
    def acting_in(cls, simulator: SimulatorSpec, num_slots: int, chunk_size: int, coefficient: float) -> Self:
        """Build one for simulators with this spec.

        Raises:
            UserError: actions are choices, which have no mean.
        """
        if is_discrete(simulator):
            raise UserError(
                f"eval.ensemble = {coefficient} averages actions, but those of this simulator are choices, and the "
                "mean of two choices is a third one: set eval.ensemble to null"
            )
        return cls(num_slots, chunk_size, simulator.action_dim, coefficient)

    def begin(self, slots: Slots) -> None:
        """Forget the chunks of slots that begin an episode."""
        self._counts[slots], self._means[slots] = 0, 0.0

    def act(self, slots: Slots, chunks: NDArray[np.float32]) -> NDArray[np.float32]:
        """Add a chunk `[B, C, D]` of each of some slots; returns their actions of this step, `[B, 1, D]`."""
        counts, means = self._counts[slots], self._means[slots]
        means += self._shares[counts][..., None] * (chunks - means)
        actions: NDArray[np.float64] = means[:, :1]
        # The next step is the first of the steps to come; of the last of them no chunk has spoken yet.
        self._counts[slots] = np.concatenate([counts[:, 1:] + 1, np.zeros_like(counts[:, :1])], axis=1)
        self._means[slots] = np.concatenate([means[:, 1:], np.zeros_like(means[:, :1])], axis=1)
        return actions.astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all slots' chunks, as arrays by name."""
        return {"counts": self._counts.copy(), "means": self._means.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._counts[:], self._means[:] = state["counts"], state["means"]


def newest_shares(chunk_size: int, coefficient: float) -> NDArray[np.float64]:
    """Return what the newest of 1 to `C` chunks weighs in their mean, as a share of all their weights, `[C]`."""
    # By recurrence, not from the weights themselves: those of a long chunk may be too large for a number, or all zero.
    relative = np.ones(chunk_size)  # the sum of weights, divided by the newest one
    with np.errstate(over="ignore"):  # infinite where the newest chunk weighs nothing, which makes its share 0
        ratio = np.exp(np.float64(coefficient))
        for number in range(1, chunk_size):
            relative[number] = 1.0 + relative[number - 1] * ratio
    return 1.0 / relative
