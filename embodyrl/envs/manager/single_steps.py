"""A chunk executed as single actions, for those who want to look after each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.types import ChunkResult, Observation, Simulator, nothing_executed

Look = Callable[[int, list[int], Observation], None]
"""Called after action `number` with the rows that executed it and what they show now."""


def step_singly(simulator: Simulator, slots: Sequence[int], actions: NDArray[np.float32], look: Look) -> ChunkResult:
    """The same as `simulator.step_chunk(slots, actions)`, with `look` called after every action.

    Args:
        simulator: whose slots are stepped.
        slots: which, `B`.
        actions: `[B, C, D]`.
        look: see `Look`. Slots whose episode has ended execute nothing more and are not shown again.
    """
    batch, chunk = actions.shape[:2]
    result = nothing_executed(batch, chunk)
    rows = list(range(batch))
    for number in range(chunk):
        single = simulator.step_chunk([slots[row] for row in rows], actions[rows, number : number + 1])
        result.rewards[rows, number], result.success[rows, number] = single.rewards[:, 0], single.success[:, 0]
        result.terminated[rows], result.truncated[rows] = single.terminated, single.truncated
        result.steps[rows] += single.steps
        look(number, rows, single.observation)
        rows = [row for row in rows if not (result.terminated[row] or result.truncated[row])]
        if not rows:
            break
    result.observation = simulator.observe(slots)
    return result
