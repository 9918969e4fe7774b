"""TrajectoryBatch: what a rollout hands to the learner, with every shape checked.

Shapes: `K` decisions, `B` slots, `C` actions in a chunk, `D` action dims, `N` log-prob entries, `S` proprio dims.

| column | shape | type | meaning |
|---|---|---|---|
| proprio | [K, B, S] | float32 | state observation decided on |
| images | [K, B, V, H, W, 3] | uint8 | pictures decided on |
| task | [K, B] | int64 | index into `sentences` |
| actions | [K, B, C, D] | float32 | in the simulator's units |
| logprobs | [K, B, N] | float32 | when the decision was taken [nats] |
| values | [K, B] | float32 | critic, when the decision was taken; absent without one |
| next_values | [K, B] | float32 | critic at the following observation, before any reset; absent without one |
| rewards | [K, B, C] | float32 | 0 for actions not executed |
| success | [K, B, C] | bool | the task's condition held after the action |
| terminated | [K, B] | bool | the episode reached a final state in this decision |
| truncated | [K, B] | bool | the time limit cut it off in this decision |
| steps | [K, B] | int64 | actions executed |
| valid | [K, B] | bool | a decision was taken; True also for the one in which the episode ends |
| episode | [K, B] | int64 | number of the episode within its slot |
| group | [K, B] | int64 | group of the episode |
| version | [K, B] | int64 | engine version that decided |
| trace | [K, B, ...] | | what `Policy.evaluate` needs |

Nodes of a pipeline add columns such as `advantages` and `returns` `[K, B]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

RANKS = {"actions": 4, "logprobs": 3, "rewards": 3, "success": 3, "proprio": 3, "images": 6}
"""Dimensions of each column; 2 for all others, any for `trace`."""
REQUIRED = (
    "task",
    "actions",
    "logprobs",
    "rewards",
    "success",
    "terminated",
    "truncated",
    "steps",
    "valid",
    "episode",
    "group",
    "version",
)


class BatchError(ValueError):
    """Raised when a column of a TrajectoryBatch is missing or has the wrong shape."""


class TrajectoryBatch:
    """A table of `[K, B]` decisions, held in a TensorDict.

    Args:
        columns: tensors by name, see the table above; `trace` is a mapping.
        sentences: task sentences that the column `task` indexes.

    Raises:
        BatchError: a column is missing or has the wrong shape; names it, what was found and what was expected.
    """

    def __init__(self, columns: Mapping[str, Tensor | Mapping[str, Tensor]], sentences: Sequence[str]) -> None:
        missing = [name for name in REQUIRED if name not in columns]
        if missing:
            raise BatchError(f"columns are missing from the batch: {', '.join(missing)}")
        valid = columns["valid"]
        if not isinstance(valid, Tensor) or valid.dim() != 2:
            raise BatchError("column 'valid' must be a tensor [K, B]")
        self.size = torch.Size(valid.shape)
        self.sentences = list(sentences)
        self.data = TensorDict({}, batch_size=self.size)
        for name, column in columns.items():
            self[name] = column

    def __setitem__(self, name: str, column: Tensor | Mapping[str, Tensor]) -> None:
        if isinstance(column, Tensor):
            rank = RANKS.get(name, 2)
            if column.shape[:2] != self.size or column.dim() != rank:
                raise BatchError(
                    f"column {name!r} has shape {tuple(column.shape)}, expected {rank} dimensions starting with "
                    f"{tuple(self.size)}"
                )
            self.data[name] = column
        else:
            self.data[name] = TensorDict(dict(column), batch_size=self.size)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise BatchError(f"the batch has no column {name!r} (has: {', '.join(sorted(self.columns()))})")
        column: Tensor = self.data[name]
        return column

    def __contains__(self, name: str) -> bool:
        return name in self.columns()

    def columns(self) -> list[str]:
        """Names of all columns."""
        return [str(name) for name in self.data.keys()]  # noqa: SIM118 - a TensorDict iterates over its rows

    def decisions(self, *names: str) -> TensorDict:
        """The named columns with `[K, B]` flattened to `[K*B]`."""
        return self.data.select(*names).reshape(-1)
