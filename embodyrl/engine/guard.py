"""Keeps numbers that are not finite out of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from embodyrl.config.schema import GuardConfig
from embodyrl.engine.columns import Columns
from embodyrl.errors import RunError
from embodyrl.files import replacing

FOLDER = "not_finite"
"""In the run's folder."""


class NumericsError(RunError):
    """Raised when losses or gradients are not finite numbers again and again."""


class Guard:
    """Looks at every optimiser step before it is made.

    A step whose loss or gradient is NaN or infinite is left out and counted. What it was to learn from is written to a
    file the first times, for whoever looks for the cause.

    Args:
        config: how many steps may be left out, how many files are written.
        folder: of the run; None: no files.
    """

    def __init__(self, config: GuardConfig, folder: Path | None) -> None:
        self.skipped = 0
        """Steps left out so far."""
        self._dumped: Path | None = None
        """The last file."""
        self._config = config
        self._folder = folder

    def allows(self, loss: Tensor, norm: Tensor, minibatch: Columns, *, update: int) -> bool:
        """Whether to make a step.

        Args:
            loss, norm: of its gradient; scalars, the same on all ranks.
            minibatch: what it learns from.
            update: that it belongs to.

        Raises:
            NumericsError: more steps were left out than are allowed.
        """
        if bool(torch.isfinite(loss + norm)):
            return True
        self.skipped += 1
        self._dump(minibatch, loss, norm, update)
        if self.skipped > self._config.max_skipped:
            raise NumericsError(self._explain(loss, norm, minibatch, update))
        return False

    def _explain(self, loss: Tensor, norm: Tensor, minibatch: Columns, update: int) -> str:
        odd = sorted(name for name, column in flat(minibatch) if not bool(torch.isfinite(column.float()).all()))
        cause = f"; {', '.join(odd)} of the batch are not finite themselves" if odd else ""
        where = f". What such a step was to learn from is in {self._dumped}" if self._dumped else ""
        return (
            f"the gradient norm is {float(norm)} in update {update} (loss {float(loss)}){cause}; this is step "
            f"{self.skipped} of the run that could not be made, and engine.guard.max_skipped is "
            f"{self._config.max_skipped}. Weights were left as they were. Lower engine.optimizer.lr, or look at the "
            f"rewards and observations{where}"
        )

    def _dump(self, minibatch: Columns, loss: Tensor, norm: Tensor, update: int) -> None:
        if self._folder is None or self.skipped > self._config.dumps:
            return
        path = self._folder / FOLDER / f"update_{update:06}_{self.skipped:02}.safetensors"
        path.parent.mkdir(exist_ok=True)
        tensors = {name: column.detach().cpu().clone().contiguous() for name, column in flat(minibatch)}
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"loss": str(float(loss)), "grad_norm": str(float(norm))})
        self._dumped = path


def flat(columns: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Columns, and those of tables in them as `table.column`."""
    for name, column in columns.items():
        if isinstance(column, dict):
            yield from flat(column, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", column
