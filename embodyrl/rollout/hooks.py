"""Hooks of a rollout: what is executed in place of what the policy has chosen, and what becomes of the results.

Shapes: `B` slots, `C` actions in a chunk, `D` action dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import Observation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from embodyrl.envs.manager import StepResult
    from embodyrl.rollout.episodes import EpisodeTracker


@dataclass(kw_only=True)
class Decision:
    """Chunks that a policy has chosen for some slots, before they are executed."""

    slots: NDArray[np.int64]
    """`[B]`."""
    numbers: NDArray[np.int64]
    """Of the episode of each slot, `[B]`."""
    observation: Observation
    """Of these slots, with what an expert sees."""
    actions: NDArray[np.float32]
    """`[B, C, D]`, in the simulator's units."""
    random: bool
    """Whether they are random ones, from before anything was learned."""
    tracker: EpisodeTracker
    """Of the episodes in progress."""
    noise: torch.Generator
    """Random stream of these slots' block."""


class Hook:
    """Changes actions before they are executed, or results before they are recorded. This one changes nothing; a
    subclass overrides what it needs."""

    state_name = ""
    """Of its state in checkpoints; empty: it has none."""

    def begin(self, slots: NDArray[np.int64]) -> None:
        """Forget earlier episodes of these slots `[B]`: new ones begin, whatever became of those."""

    def decide(self, decision: Decision) -> dict[str, NDArray[Any]]:
        """Return columns `[B, ...]` of the rollout: `actions`, if others are executed, and what tells of them."""
        return {}

    def judge(self, slots: NDArray[np.int64], result: StepResult) -> tuple[StepResult, dict[str, NDArray[Any]]]:
        """Return the results of chunks in these slots `[B]`, among which it may end episodes, and columns `[B, ...]` of
        the rollout. The collector begins the next episodes."""
        return result, {}

    def complete(self, columns: dict[str, Tensor]) -> None:
        """Fill in, in place, what has become known by the end of a rollout, of whose columns `[K, B, ...]` those of
        slot `i` are `i`, `i + num_envs`, ..."""

    def state(self, numbers: NDArray[np.int64]) -> list[Any]:
        """Return its state as JSON, an entry for each slot; `numbers` `[B]` are those of the episodes in progress."""
        return []

    def restore(self, numbers: NDArray[np.int64], state: Sequence[Any]) -> None:
        """Continue the episodes with these numbers `[B]`, one in each slot, from `state`."""
