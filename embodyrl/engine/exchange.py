"""Exchange: rows of large columns, which stay with the rank that collected them until another learns from them.

Small columns go to all ranks, because advantages and filters compare whole batches. Images and traces, nearly all of a
batch's bytes, would fill the memory of every rank and the network between them. A row of theirs has an address, which
all ranks know; whoever is dealt the row fetches it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodyrl.engine.parallel import Ranks

ADDRESS = "address"
"""Column of a batch that stands for the large ones."""


@dataclass(frozen=True)
class _Held:
    """Rows that this rank holds."""

    numbers: Tensor
    """`[M]`, ascending."""
    columns: Mapping[str, Tensor]
    """`[M, ...]`."""

    def rows(self, which: Tensor) -> _Held:
        """Return a copy of some rows."""
        return _Held(
            self.numbers[which], {name: column.index_select(0, which) for name, column in self.columns.items()}
        )


class Exchange:
    """The large columns of a run's batches, spread over its ranks.

    Args:
        ranks: those of the run.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._held: list[_Held] = []
        self._next = 0
        self.names: tuple[str, ...] = ()
        """Names of the columns: `images`, `trace/sample`."""
        self._empty: dict[str, Tensor] = {}
        """The columns without rows, for their types and shapes."""
        self.received = 0
        """Bytes that came from other ranks."""

    def put(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Hold rows for all ranks; returns their addresses, int64 `[M]`. Every rank puts the same columns.

        Args:
            columns: on the CPU, `[M, ...]`; their memory is kept, not copied.
        """
        count = len(next(iter(columns.values())))
        numbers = torch.arange(self._next, self._next + count)
        self._next += count
        if count:
            self._held.append(_Held(numbers, columns))
        self.names = tuple(columns)
        self._empty = {name: column[:0] for name, column in columns.items()}
        # An address says where its row is: with the rank that is left over when it is divided by their number.
        return numbers * self.ranks.size + self.ranks.rank

    def is_here(self, addresses: Tensor) -> Tensor:
        """Return a mask of the rows that this rank holds."""
        return addresses % self.ranks.size == self.ranks.rank

    def keep(self, addresses: Tensor) -> None:
        """Forget all rows but these; no rank needs to ask another."""
        numbers = self._numbers(addresses)
        kept = []
        for held in self._held:
            wanted = torch.isin(held.numbers, numbers)
            # What stays whole stays where it is; a copy of a part lets the rest of its memory go.
            if bool(wanted.all()):
                kept.append(held)
            elif bool(wanted.any()):
                kept.append(held.rows(torch.nonzero(wanted).squeeze(1)))
        self._held = kept

    def fetch(self, wanted: Sequence[Tensor], names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the rows that this rank wants, `[M, ...]` in the order of its addresses. All ranks must call it, with
        the same arguments.

        Args:
            wanted: addresses `[M]` that each rank wants, by rank.
            names: of the columns; None: all.
        """
        size, rank = self.ranks.size, self.ranks.rank
        # Every rank knows what all of them want, so nobody asks: each sends what it holds of it.
        given = torch.cat([each[self.is_here(each)] for each in wanted])
        parts = [int(self.is_here(each).sum()) for each in wanted]
        owners = wanted[rank] % size
        coming = torch.bincount(owners, minlength=size).tolist()
        # What comes is sorted by the rank that sends it.
        order = torch.argsort(torch.argsort(owners, stable=True))
        numbers, found = self._numbers(given), {}
        for name in self.names if names is None else names:  # one after the other, and no more memory than that takes
            arrived = self.ranks.exchange(self._rows(numbers, [name])[name], parts, coming)
            self.received += arrived.nbytes - arrived[: coming[rank]].nbytes
            found[name] = arrived.index_select(0, order)
        return found

    def rows_here(self, addresses: Tensor, names: Collection[str]) -> dict[str, Tensor]:
        """Return rows that this rank holds, without asking another."""
        return self._rows(self._numbers(addresses), names)

    def _numbers(self, addresses: Tensor) -> Tensor:
        """Return the numbers of those rows that this rank holds."""
        return addresses[self.is_here(addresses)] // self.ranks.size

    def _rows(self, numbers: Tensor, names: Collection[str]) -> dict[str, Tensor]:
        """Return rows by number."""
        found: dict[str, Tensor] = {}
        missing = torch.ones(len(numbers), dtype=torch.bool)
        for held in self._held:
            place = torch.searchsorted(held.numbers, numbers).clamp(max=len(held.numbers) - 1)
            matches = held.numbers[place] == numbers
            if bool(matches.all()):
                return {name: held.columns[name].index_select(0, place) for name in names}
            here = torch.nonzero(matches).squeeze(1)
            missing[here] = False
            for name in names:
                rows = found.setdefault(name, self._blank(name, len(numbers)))
                rows[here] = held.columns[name].index_select(0, place[here])
        if bool(missing.any()):
            count, first = int(missing.sum()), int(numbers[missing][0])
            raise KeyError(f"{count} rows of a batch are not held any more, the first is {first}")
        return {name: found[name] if name in found else self._blank(name, 0) for name in names}

    def _blank(self, name: str, rows: int) -> Tensor:
        """Return room for some rows of a column."""
        like = self._empty[name]
        return like.new_empty(rows, *like.shape[1:])
