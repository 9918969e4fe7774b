"""Temporal ensembling: what is executed is a mean of what several chunks say about the same step.

Zhao et al. (2023), "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware", arXiv:2304.13705, section 4.
Shapes: `B` slots, `C` actions in a chunk, `D` action dims.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        self._weights = np.exp(-coefficient * np.arange(chunk_size))
        self._totals = np.cumsum(self._weights)
        # Of each of the next C steps: how many chunks spoke of it, and the weighted sum of what they said. In float64,
        # so that a mean is that of all chunks at once to the last digits of float32.
        self._counts = np.zeros((num_slots, chunk_size), np.int64)
        self._sums = np.zeros((num_slots, chunk_size, action_dim))

    def begin(self, slots: Slots) -> None:
        """Forget the chunks of slots that begin an episode."""
        self._counts[slots], self._sums[slots] = 0, 0.0

    def act(self, slots: Slots, chunks: NDArray[np.float32]) -> NDArray[np.float32]:
        """Add a chunk `[B, C, D]` of each of some slots; returns their actions of this step, `[B, 1, D]`."""
        counts, sums = self._counts[slots], self._sums[slots]
        sums += self._weights[counts][..., None] * chunks
        actions: NDArray[np.float64] = sums[:, :1] / self._totals[counts[:, :1]][..., None]
        # The next step is the first of the steps to come; of the last of them no chunk has spoken yet.
        self._counts[slots] = np.concatenate([counts[:, 1:] + 1, np.zeros_like(counts[:, :1])], axis=1)
        self._sums[slots] = np.concatenate([sums[:, 1:], np.zeros_like(sums[:, :1])], axis=1)
        return actions.astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all slots' chunks, as arrays by name."""
        return {"counts": self._counts.copy(), "sums": self._sums.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._counts[:], self._sums[:] = state["counts"], state["sums"]
