"""TrajectoryBatch: the data of a rollout, and the table of its columns: name, shape, type and meaning.

Shapes: `K` chunks, `B` slots, `C` actions in a chunk, `D` action dims, `N` log-probs of a chunk, `S` proprio dims,
`V` cameras, `H`, `W` pixels. A letter stands for the same number in every column of a batch.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from embodyrl.config.renames import COLUMNS as RENAMED
from embodyrl.config.renames import newest_name
from embodyrl.engine.exchange import ADDRESS
from embodyrl.engine.large import APART
from embodyrl.engine.minibatch import Columns, mapped, nested


class BatchError(ValueError):
    """Raised when columns are missing from a TrajectoryBatch, do not fit its table or do not fit each other."""


@dataclass(frozen=True)
class Column:
    """Shape, type and meaning of a column."""

    shape: str
    """Letters, one per dimension; a number stands for itself."""
    dtype: torch.dtype
    meaning: str
    required: bool = False
    """True if every rollout has it."""

    def describe(self, sizes: Mapping[str, int]) -> str:
        """Describe type and shape, with the sizes that are known: `float32 [K, B, C] with K = 2, B = 3`."""
        letters = self.shape.split()
        known = ", ".join(f"{letter} = {sizes[letter]}" for letter in letters if letter in sizes)
        return f"{type_name(self.dtype)} [{', '.join(letters)}]" + (f" with {known}" if known else "")

    def sizes(self, column: Tensor) -> dict[str, int]:
        """Return the size that each letter has in a tensor with this many dimensions."""
        return dict(zip(self.shape.split(), column.shape, strict=True))

    def accepts(self, column: Tensor, sizes: Mapping[str, int]) -> bool:
        """Return whether a tensor has the right type and shape, given the sizes that are known."""
        letters = self.shape.split()
        if column.dtype != self.dtype or column.dim() != len(letters):
            return False
        return all(size == (int(x) if x.isdigit() else sizes.get(x, size)) for x, size in self.sizes(column).items())


F32, I64, U8, FLAG = torch.float32, torch.int64, torch.uint8, torch.bool

COLUMNS: Mapping[str, Column] = {
    "proprio": Column("K B S", F32, "state observation decided on"),
    "images": Column("K B V H W 3", U8, "images decided on; absent if traces hold what the policy sees in them"),
    "step_images": Column("K B C V H W 3", U8, "images after every action, zeros where none was executed"),
    "step_proprio": Column("K B C S", F32, "state observation after every action, zeros where none was executed"),
    "task_index": Column("K B", I64, "index into the batch's task descriptions", required=True),
    "actions": Column("K B C D", F32, "in the simulator's units", required=True),
    "logprobs": Column("K B N", F32, "of the chunk that the policy sampled [nats]", required=True),
    "counted": Column("K B N", FLAG, "log-probs that the chunk has, where none belongs to a single action"),
    "invalid_actions": Column("K B", FLAG, "what was chosen means no chunk; the nearest one is in `actions`"),
    "values": Column("K B", F32, "the critic's, when the chunk was chosen; absent without one"),
    "next_values": Column("K B", F32, "critic at the following observation, before any reset; absent without one"),
    "rewards": Column("K B C", F32, "0 for actions not executed", required=True),
    "success": Column("K B C", FLAG, "the task's condition held after the action", required=True),
    "terminated": Column("K B", FLAG, "the episode reached a final state in this chunk", required=True),
    "truncated": Column("K B", FLAG, "the time limit cut it off in this chunk", required=True),
    "steps": Column("K B", I64, "actions executed", required=True),
    "valid": Column("K B", FLAG, "a chunk was chosen; True also for the one that ends the episode", required=True),
    "episode": Column("K B", I64, "number of the episode within its slot", required=True),
    "group": Column("K B", I64, "group of the episode", required=True),
    "start_state": Column("K B", I64, "start state of the episode"),
    "seed": Column("K B", I64, "seed of what is random in the simulator during the episode"),
    "version": Column("K B", I64, "engine version that decided", required=True),
    "judged": Column("K B C", FLAG, "with a classifier of success: the action after which it says that it is solved"),
    "progress": Column("K B C", F32, "with a predictor of progress: what is paid for it, at a chunk's last action"),
    "answers": Column("K B C", F32, "with somebody who is asked: the answer about an episode, at its last action"),
    "source": Column("K B", U8, "with an expert beside the policy: who decided, see `rollout.interventions.Source`"),
    "labels": Column("K B C D", F32, "what the expert would execute, in the simulator's units; 0 where unknown"),
    "labelled": Column("K B", FLAG, "labels are known"),
    ADDRESS: Column("K B", I64, "with several ranks: of the large columns of this row, see `engine.exchange`"),
}
"""Columns with a fixed meaning. Beside them there is `trace`, a table `[K, B, ...]` of what `Policy.evaluate` needs.
Stages of a pipeline may add further columns, which begin with `[K, B]`."""


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type: `float32`."""
    return str(dtype).removeprefix("torch.")


def found(column: Tensor) -> str:
    """Describe type and shape of a tensor: `float32 [2, 3, 5]`."""
    return f"{type_name(column.dtype)} {list(column.shape)}"


Along = Literal["K", "B"]
"""The dimension along which batches are cut or joined: `K` chunks or `B` slots."""
AXES: Mapping[Along, int] = {"K": 0, "B": 1}


class TrajectoryBatch:
    """A table of `[K, B]` chunks: a dictionary of columns, and of dictionaries of them.

    Methods that cut or join name the dimension. Columns are copied only where that is necessary.

    Args:
        columns: tensors by name, see `COLUMNS`; `trace` is a mapping.
        task_descriptions: those that the column `task_index` refers to.

    Raises:
        BatchError: a column is missing, or has the wrong type or shape; names it, what was found and what was expected.
    """

    def __init__(self, columns: Mapping[str, Tensor | Mapping[str, Tensor]], task_descriptions: Sequence[str]) -> None:
        missing = [name for name, column in COLUMNS.items() if column.required and name not in columns]
        if missing:
            raise BatchError(f"columns are missing from the batch: {', '.join(missing)}")
        valid = columns["valid"]
        if not isinstance(valid, Tensor) or valid.dim() != 2:
            raise BatchError("column 'valid' must be a tensor [K, B]")
        self.task_descriptions = list(task_descriptions)
        self.data: Columns = {}
        self.size: tuple[int, int] = (valid.shape[0], valid.shape[1])
        """`K, B`."""
        for name, column in columns.items():
            self[name] = column

    @classmethod
    def _of(cls, data: Columns, size: Sequence[int], task_descriptions: Sequence[str]) -> TrajectoryBatch:
        """Make a batch of columns that were checked before; required ones may be missing."""
        batch = cls.__new__(cls)
        batch.data, batch.task_descriptions = data, list(task_descriptions)
        batch.size = (size[0], size[1])
        return batch

    def _mapped(self, function: Callable[[Tensor], Tensor], along: Along, whole: int) -> TrajectoryBatch:
        """Return a batch of a function of every tensor, which changes the size along a dimension."""
        size = (whole, self.size[1]) if along == "K" else (self.size[0], whole)
        return self._of(mapped(self.data, function), size, self.task_descriptions)

    def __setitem__(self, name: str, column: Tensor | Mapping[str, Tensor]) -> None:
        if not isinstance(column, Tensor):
            for inner, part in column.items():
                self._require_size(f"{name}/{inner}", part)
            self.data[name] = dict(column)
            return
        rule, sizes = COLUMNS.get(name), self._sizes(name)
        if rule is not None and not rule.accepts(column, sizes):
            raise BatchError(f"column {name!r} is {found(column)}, expected {rule.describe(sizes)}")
        self._require_size(name, column)
        self.data[name] = column

    def _require_size(self, name: str, column: Tensor) -> None:
        if column.shape[:2] != self.size:
            raise BatchError(f"column {name!r} is {found(column)}, expected a shape that begins with {list(self.size)}")

    def _sizes(self, but: str) -> dict[str, int]:
        """Return the sizes of the shape letters in all columns except `but`."""
        sizes = {"K": self.size[0], "B": self.size[1]}
        for name in self.columns():
            if name != but and name in COLUMNS:
                sizes |= COLUMNS[name].sizes(self.data[name])
        return sizes

    def __getitem__(self, name: str) -> Tensor:
        if name not in self and self.may_lie_apart(name):
            raise BatchError(
                f"column {name!r} lies with the ranks that collected it: a stage gets it if it declares it in `reads`"
            )
        if name not in self:
            raise BatchError(f"the batch has no column {name!r} (has: {', '.join(sorted(self.columns())) or 'none'})")
        column: Tensor = self.data[name]
        return column

    def __contains__(self, name: str) -> bool:
        return name in self.columns()

    def may_lie_apart(self, name: str) -> bool:
        """Return whether a column that is not here may lie with the ranks that collected it."""
        return ADDRESS in self and name in APART

    def columns(self) -> list[str]:
        """Names of all columns."""
        return list(self.data)

    def decisions(self, *names: str) -> Columns:
        """Return the named columns with `[K, B]` flattened to `[K*B]`."""
        return mapped(self.select(*names).data, lambda column: column.flatten(0, 1))

    def select(self, *names: str) -> TrajectoryBatch:
        """Return a batch with only the named columns, which share their memory.

        Raises:
            BatchError: there is no such column.
        """
        return self._of({name: self[name] for name in names}, self.size, self.task_descriptions)

    def split(self, sizes: Sequence[int], along: Along) -> list[TrajectoryBatch]:
        """Return consecutive parts of these sizes, which must add up to the whole."""
        whole = self.size[AXES[along]]
        if sum(sizes) != whole or min(sizes, default=0) < 0:
            raise BatchError(f"parts of {list(sizes)} do not make up {along} = {whole}")
        firsts = itertools.accumulate([0, *sizes[:-1]])
        return [
            self._mapped(functools.partial(Tensor.narrow, dim=AXES[along], start=first, length=size), along, size)
            for first, size in zip(firsts, sizes, strict=True)
        ]

    def chunk(self, parts: int, along: Along) -> list[TrajectoryBatch]:
        """Return `parts` consecutive parts of equal size.

        Raises:
            BatchError: they cannot be equal.
        """
        whole = self.size[AXES[along]]
        if parts < 1 or whole % parts:
            raise BatchError(f"{along} = {whole} cannot be split into {parts} equal parts")
        return self.split([whole // parts] * parts, along)

    def take(self, numbers: Tensor, along: Along) -> TrajectoryBatch:
        """Return the chunks or slots with these numbers `[M]`, in this order (or where a mask is True)."""
        count = int(numbers.sum()) if numbers.dtype is torch.bool else len(numbers)
        return self._mapped(lambda column: column[numbers] if along == "K" else column[:, numbers], along, count)

    def pad(self, size: int, along: Along) -> TrajectoryBatch:
        """Append zeros up to this size; they do not count, since `valid` is False there."""
        more = size - self.size[AXES[along]]
        if more < 0:
            raise BatchError(f"{along} = {self.size[AXES[along]]} is more than the {size} to pad to: use split")
        shape = list(self.size)
        shape[AXES[along]] = more

        def padded(column: Tensor) -> Tensor:
            return torch.cat([column, column.new_zeros(*shape, *column.shape[2:])], AXES[along])

        return self._mapped(padded, along, size)

    def to(self, device: torch.device | str) -> TrajectoryBatch:
        """Return the batch on another device."""
        return self._of(mapped(self.data, lambda column: column.to(device)), self.size, self.task_descriptions)

    def save(self, path: Path) -> None:
        """Write one safetensors file; its header holds the task descriptions and the size, as JSON."""
        header = {"task_descriptions": json.dumps(self.task_descriptions), "size": json.dumps(list(self.size))}
        save_file({name: column.contiguous() for name, column in leaves(self).items()}, path, metadata=header)

    @classmethod
    def load(cls, path: Path) -> TrajectoryBatch:
        """Read what `save` wrote, also in an earlier version."""
        with safe_open(path, framework="pt") as file:
            header = {newest_name(name, RENAMED): value for name, value in file.metadata().items()}
            names = file.keys()
            found = {newest_name(name, RENAMED): file.get_tensor(name) for name in names}
        return cls.from_leaves(found, json.loads(header["size"]), json.loads(header["task_descriptions"]))

    @classmethod
    def from_leaves(
        cls, tensors: Mapping[str, Tensor], size: Sequence[int], task_descriptions: Sequence[str]
    ) -> TrajectoryBatch:
        """Return the batch of `size` `[K, B]` with these `leaves`."""
        return cls._of(nested(tensors), size, task_descriptions)


def leaves(batch: TrajectoryBatch) -> dict[str, Tensor]:
    """Return all tensors of a batch by name; nested ones are called `trace/sample`."""
    found: dict[str, Tensor] = {}
    for name, column in batch.data.items():
        found |= (
            {name: column}
            if isinstance(column, Tensor)
            else {f"{name}/{inner}": part for inner, part in column.items()}
        )
    return found


def concat(batches: Sequence[TrajectoryBatch], along: Along) -> TrajectoryBatch:
    """Concatenate batches along `K` (more chunks) or `B` (more slots).

    The column `task_index` is renumbered where the batches have different task descriptions.

    Raises:
        BatchError: the batches have different columns, or columns that do not fit; names them.
    """
    task_descriptions = list(
        dict.fromkeys(task_description for batch in batches for task_description in batch.task_descriptions)
    )
    first, *others = renumbered = [_with_task_descriptions(batch, task_descriptions) for batch in batches]
    for other in others:
        _check_joint(first, other, along)
    parts = [leaves(batch) for batch in renumbered]
    joined = {name: torch.cat([part[name] for part in parts], AXES[along]) for name in parts[0]}
    size = list(first.size)
    size[AXES[along]] = sum(batch.size[AXES[along]] for batch in renumbered)
    return TrajectoryBatch._of(nested(joined), size, task_descriptions)


def _with_task_descriptions(batch: TrajectoryBatch, task_descriptions: list[str]) -> TrajectoryBatch:
    """Return the batch with `task_index` referring to other task descriptions, which include its own."""
    if batch.task_descriptions == task_descriptions or "task_index" not in batch:
        return batch
    numbers = torch.tensor(
        [task_descriptions.index(task_description) for task_description in batch.task_descriptions],
        device=batch["task_index"].device,
    )
    renumbered = TrajectoryBatch._of(dict(batch.data), batch.size, task_descriptions)
    renumbered["task_index"] = numbers[batch["task_index"]]
    return renumbered


def _check_joint(one: TrajectoryBatch, other: TrajectoryBatch, along: Along) -> None:
    """Raise `BatchError` if two batches cannot be concatenated."""
    left, right = leaves(one), leaves(other)
    if left.keys() != right.keys():
        raise BatchError(f"not all batches have the columns {', '.join(sorted(left.keys() ^ right.keys()))}")
    axis = AXES[along]
    for name, column in left.items():
        shapes = [[*each.shape[:axis], *each.shape[axis + 1 :]] for each in (column, right[name])]
        if shapes[0] != shapes[1] or column.dtype != right[name].dtype:
            raise BatchError(
                f"batches cannot be joined along {along}: column {name!r} is {found(column)} in one and "
                f"{found(right[name])} in another"
            )
