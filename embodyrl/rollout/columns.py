"""The columns of a TrajectoryBatch: name, shape, type and meaning, in one table.

Shapes: `K` decisions, `B` slots, `C` actions in a chunk, `D` action dims, `N` log-prob entries, `S` proprio dims,
`V` cameras, `H`, `W` pixels. A letter stands for the same number in every column of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


class BatchError(ValueError):
    """Raised when columns are missing from a TrajectoryBatch, do not fit its table or do not fit each other."""


@dataclass(frozen=True)
class Column:
    """What a column must be like."""

    shape: str
    """Letters, one per dimension; a number stands for itself."""
    dtype: torch.dtype
    meaning: str
    required: bool = False
    """Whether every rollout has it."""

    def describe(self, sizes: Mapping[str, int]) -> str:
        """Type and shape in words, with the sizes that are known: `float32 [K, B, C] with K = 2, B = 3`."""
        letters = self.shape.split()
        known = ", ".join(f"{letter} = {sizes[letter]}" for letter in letters if letter in sizes)
        return f"{type_name(self.dtype)} [{', '.join(letters)}]" + (f" with {known}" if known else "")

    def sizes(self, column: Tensor) -> dict[str, int]:
        """What each letter stands for in a tensor with this many dimensions."""
        return dict(zip(self.shape.split(), column.shape, strict=True))

    def accepts(self, column: Tensor, sizes: Mapping[str, int]) -> bool:
        """Whether a tensor has the right type and shape, given the sizes that are known."""
        letters = self.shape.split()
        if column.dtype != self.dtype or column.dim() != len(letters):
            return False
        return all(size == (int(x) if x.isdigit() else sizes.get(x, size)) for x, size in self.sizes(column).items())


F32, I64, U8, FLAG = torch.float32, torch.int64, torch.uint8, torch.bool

COLUMNS: Mapping[str, Column] = {
    "proprio": Column("K B S", F32, "state observation decided on"),
    "images": Column("K B V H W 3", U8, "pictures decided on"),
    "step_images": Column("K B C V H W 3", U8, "pictures after every action, zeros where none was executed"),
    "step_proprio": Column("K B C S", F32, "state observation after every action, zeros where none was executed"),
    "task": Column("K B", I64, "index into the batch's sentences", required=True),
    "actions": Column("K B C D", F32, "in the simulator's units", required=True),
    "logprobs": Column("K B N", F32, "when the decision was taken [nats]", required=True),
    "values": Column("K B", F32, "critic, when the decision was taken; absent without one"),
    "next_values": Column("K B", F32, "critic at the following observation, before any reset; absent without one"),
    "rewards": Column("K B C", F32, "0 for actions not executed", required=True),
    "success": Column("K B C", FLAG, "the task's condition held after the action", required=True),
    "terminated": Column("K B", FLAG, "the episode reached a final state in this decision", required=True),
    "truncated": Column("K B", FLAG, "the time limit cut it off in this decision", required=True),
    "steps": Column("K B", I64, "actions executed", required=True),
    "valid": Column("K B", FLAG, "a decision was taken; True also for the one that ends the episode", required=True),
    "episode": Column("K B", I64, "number of the episode within its slot", required=True),
    "group": Column("K B", I64, "group of the episode", required=True),
    "start_state": Column("K B", I64, "start state of the episode"),
    "seed": Column("K B", I64, "seed of what is random in the simulator during the episode"),
    "version": Column("K B", I64, "engine version that decided", required=True),
}
"""Columns with a fixed meaning. Beside them there is `trace`, a table `[K, B, ...]` of what `Policy.evaluate` needs.
Stages of a pipeline may add further columns, which begin with `[K, B]`."""


def type_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


def found(column: Tensor) -> str:
    """Type and shape of a tensor in words: `float32 [2, 3, 5]`."""
    return f"{type_name(column.dtype)} {list(column.shape)}"
