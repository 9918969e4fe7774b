"""The guard that keeps NaN and infinity out of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.config.schema import GuardConfig
from embodyrl.engine.minibatch import Columns
from embodyrl.engine.parallel import is_sharded
from embodyrl.errors import RunError
from embodyrl.files import replacing

FOLDER = "not_finite"
"""In the run's folder."""


class NumericsError(RunError):
    """Raised when more steps than `engine.guard.max_skipped` had a loss or gradient that is not finite, or when a
    policy's actions are not."""


def explain_actions(actions: NDArray[np.float32], policy: nn.Module, updates: int) -> str:
    """Return what to say of actions `[B, C, D]` that are not finite.

    Args:
        actions: for `B` envs.
        policy: chose them.
        updates: that it has made.
    """
    wrong = int((~np.isfinite(actions)).any((1, 2)).sum())
    # Each rank checks its own part of sharded weights: the others may have no reason to check, and would not answer.
    parts = {name: each.to_local() if is_sharded(each) else each for name, each in policy.state_dict().items()}
    odd = [name for name, each in parts.items() if not bool(each.isfinite().all())]
    if odd:
        cause = f"{len(odd)} of its {len(parts)} tensors of weights are not finite themselves, the first is {odd[0]}"
        remedy = "Lower engine.optimizer.lr, and begin at a checkpoint of an earlier iteration"
    else:
        cause, remedy = "its weights are finite", "Check the observations and engine.precision"
    return (
        f"after {updates} updates the policy's actions for {wrong} of {len(actions)} envs are NaN or infinite, or were "
        f"drawn from probabilities that are; {cause}. No simulator has executed them. {remedy}"
    )


class Guard:
    """Checks every optimiser step before it is made.

    A step whose loss or gradient is NaN or infinite is left out and counted. Its minibatch is written to a file the
    first times, to find the cause.

    Args:
        config: numbers of steps that may be left out, and of files.
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
        """Return whether to make a step.

        Args:
            loss: of the minibatch; a scalar, the same on all ranks.
            norm: of its gradient; a scalar, the same on all ranks.
            minibatch: its columns.
            update: number of the update that it belongs to.

        Raises:
            NumericsError: more steps were left out than are allowed.
        """
        # One test for both, since it makes the CPU wait for the GPU: a NaN or an infinity survives the sum.
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
            f"{self._config.max_skipped}. Weights were left as they were. Lower engine.optimizer.lr, or check the "
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
    """Yield all columns by name; those of nested dictionaries as `outer.inner`."""
    for name, column in columns.items():
        if isinstance(column, dict):
            yield from flat(column, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", column
