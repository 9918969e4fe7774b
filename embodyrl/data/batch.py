"""A minibatch of demonstrations; in a module of its own, because reading data sets needs packages that learning does
not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import Observation


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A minibatch: observations, and the chunks of actions that follow them."""

    observation: Observation
    """Observations of `M` samples."""
    actions: NDArray[np.float32]
    """`[M, C, D]` in the simulator's units."""
    repeated: NDArray[np.bool_] | None = None
    """`[M, C]`, True for actions beyond the end of their episode, which repeat its last one; None: there are none."""
