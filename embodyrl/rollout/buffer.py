"""Columns that fill up row by row while a rollout runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class RolloutBuffer:
    """Columns `[K, B, ...]`, allocated when they are first written; what is never written stays zero.

    They are numpy arrays while they fill up, because writing a few numbers costs numpy a tenth of what it costs torch.

    Args:
        chunks: `K`. columns: `B`.
    """

    def __init__(self, chunks: int, columns: int) -> None:
        self._size = (chunks, columns)
        self._columns: dict[str, NDArray[Any]] = {}

    def write(self, rows: NDArray[np.int64], slots: NDArray[np.int64], values: Mapping[str, NDArray[Any]]) -> None:
        """Write several columns: row `rows[i]` of slot `slots[i]`; every value is `[len(slots), ...]`."""
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = np.zeros((*self._size, *value.shape[1:]), value.dtype)
            column[rows, slots] = value

    def columns(self, chunks: int) -> dict[str, Tensor]:
        """All columns as tensors, cut to the first `chunks` rows."""
        return {name: torch.from_numpy(column[:chunks]) for name, column in self._columns.items()}
