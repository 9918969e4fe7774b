"""A demonstration in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodyrl.data.layout import DatasetSpec


@dataclass(frozen=True, kw_only=True)
class Episode:
    """`T` frames: what was seen, and what was done then."""

    task: str
    """The task's sentence."""
    actions: NDArray[np.float32]
    """`[T, D]` in the simulator's units: what is to be learned."""
    proprio: NDArray[np.float32] | None = None
    """`[T, S]` state observation."""
    images: NDArray[np.uint8] | None = None
    """`[T, V, H, W, 3]`"""
    rewards: NDArray[np.float32] | None = None
    """`[T]`: what the simulator paid for the action."""
    success: NDArray[np.bool_] | None = None
    """`[T]`: the task's condition held after the action."""
    perturbed: NDArray[np.bool_] | None = None
    """`[T]`: something else than the recorded action was executed. None: never."""

    def __len__(self) -> int:
        return len(self.actions)

    def check(self, spec: DatasetSpec) -> None:
        """Raise `ValueError` if it does not fit a dataset."""
        height, width = spec.image_size
        wanted: dict[str, tuple[int, ...] | None] = {
            "actions": (spec.action_dim,),
            "proprio": (spec.state_dim,) if spec.state_dim else None,
            "images": (len(spec.cameras), height, width, 3) if spec.cameras else None,
            "rewards": () if spec.outcome else None,
            "success": () if spec.outcome else None,
            "perturbed": () if spec.perturbed else None,
        }
        if not len(self):
            raise ValueError("an episode has at least one frame")
        for name, shape in wanted.items():
            array = getattr(self, name)
            if (array is None) != (shape is None):
                raise ValueError(f"{name} is {'missing' if array is None else 'there'}, but the dataset says otherwise")
            if array is not None and array.shape != (len(self), *(shape or ())):
                raise ValueError(f"{name} has shape {array.shape}, expected {(len(self), *(shape or ()))}")
            if array is not None and array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"{name} holds a number that is not finite")
