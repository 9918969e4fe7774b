"""Columns that fill up row by row while a rollout runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class RolloutBuffer:
    """Tensors `[K, B, ...]`, allocated when a column is first written; what is never written stays zero.

    Args:
        chunks: `K`. num_envs: `B`.
    """

    def __init__(self, chunks: int, num_envs: int) -> None:
        self._size = (chunks, num_envs)
        self._columns: dict[str, Tensor] = {}

    def write(self, k: int, slots: NDArray[np.int64], values: dict[str, Tensor | NDArray[Any]]) -> None:
        """Write row `k` of several columns for some slots; every value is `[len(slots), ...]`."""
        everywhere = len(slots) == self._size[1]
        for name, value in values.items():
            tensor = value if isinstance(value, Tensor) else torch.from_numpy(value)
            column = self._columns.get(name)
            if column is None:
                column = torch.zeros((*self._size, *tensor.shape[1:]), dtype=tensor.dtype)
                self._columns[name] = column
            if everywhere:
                column[k] = tensor
            else:
                column[k, torch.from_numpy(slots)] = tensor.to(column.device)

    def columns(self, chunks: int) -> dict[str, Tensor]:
        """All columns, cut to the first `chunks` rows."""
        return {name: column[:chunks] for name, column in self._columns.items()}
