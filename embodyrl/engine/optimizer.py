"""The optimiser, with float32 copies of weights in 16 bits; its factories by name; and the guard that keeps NaN and
infinity out of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.config.schema import GuardConfig, LearningRate, OptimizerConfig
from embodyrl.engine.minibatch import Columns
from embodyrl.engine.parallel import is_sharded, norm_of, placed
from embodyrl.errors import RunError, UserError
from embodyrl.files import replacing
from embodyrl.registry import OPTIMIZERS

HALF_TYPES = (torch.bfloat16, torch.float16)
MOST_SMALL = 2**18
"""Most weights of a policy that `SmallAdamW` learns; with more, computing takes longer than preparing."""


class Optimizer:
    """Steps some parameters along their gradients.

    With `master_weights` a parameter in 16 bits has a float32 copy, which the optimiser steps; the parameter is the
    rounded copy (Micikevicius et al. 2018, arXiv:1710.03740, section 3.1). Otherwise steps smaller than half a bit
    would be lost.

    Args:
        parameters: those that require gradients learn.
        config: rates, decay, norm.
        updates: length of the run, for the schedule.
        critic: the critic's parameters, for `critic_lr`.
        keep_gradients: the gradients of a small policy may keep their memory between updates (`SmallAdamW`).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: OptimizerConfig,
        updates: int,
        critic: Iterable[nn.Parameter] = (),
        *,
        keep_gradients: bool = False,
    ) -> None:
        self.config = config
        self.updates = updates
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.stepped = [self._stepped(parameter) for parameter in self.parameters]
        """The tensors that are stepped: parameters, or their copies."""
        small = keep_gradients and small_suits(self.parameters, config)
        self._small = SmallAdamW(self.parameters, config) if small else None
        self.inner: torch.optim.Optimizer = self._small or _built(config, self._groups(set(critic)))

    def _groups(self, critic: set[nn.Parameter]) -> list[dict[str, Any]]:
        """Return the parameter groups: one of all, or the policy's and the critic's."""
        if self.config.critic_lr is None:
            return [{"params": self.stepped}]
        pairs = list(zip(self.parameters, self.stepped, strict=True))
        return [
            {"params": [stepped for own, stepped in pairs if own not in critic]},
            {"params": [stepped for own, stepped in pairs if own in critic]},
        ]

    def _stepped(self, parameter: nn.Parameter) -> nn.Parameter:
        if self.config.master_weights and parameter.dtype in HALF_TYPES:
            return nn.Parameter(parameter.detach().to(torch.float32))
        return parameter

    @property
    def _copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of each parameter that has a copy, and the copy."""
        pairs = zip(self.parameters, self.stepped, strict=True)
        return [(parameter, copy) for parameter, copy in pairs if parameter is not copy]

    def clear(self) -> None:
        """Drop all gradients."""
        if self._small is not None:
            self._small.gradient.zero_()
            return
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self) -> Tensor:
        """Scale gradients down to `max_grad_norm`; returns their norm before, over the shards of all ranks."""
        if self._small is not None:
            return self._small.clip(self.config.max_grad_norm)
        return norm_of(nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm, foreach=True)).detach()

    @torch.no_grad()
    def step(self) -> None:
        """Make a step."""
        if self._small is not None:
            self._small.step_all()
            return
        for parameter, copy in self._copies:
            copy.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
            parameter.grad = None  # at once: for a large policy both gradients together are much of the memory
        self.inner.step()
        for parameter, copy in self._copies:
            parameter.copy_(copy)
            copy.grad = None

    def set_learning_rate(self, update: int) -> float:
        """Set the scheduled learning rates of an update (0, 1, ...); returns the policy's."""
        factor = self.share(update, self.updates)
        rates = (self.config.lr, self.config.critic_lr or self.config.lr)
        for group, rate in zip(self.inner.param_groups, rates, strict=False):
            group["lr"] = rate * factor
        return self.rate

    def share(self, update: int, updates: int) -> float:
        """Return the scheduled share of the learning rates in an update (0, 1, ...) of a run of so many."""
        # Of the run's length, not of the checkpoint's: a resumed run continues the schedule where it was.
        done = min(update / updates, 1.0)
        share = {
            LearningRate.constant: 1.0,
            LearningRate.linear: 1.0 - done,
            LearningRate.cosine: 0.5 * (1.0 + math.cos(math.pi * done)),
        }
        floor = self.config.lr_floor
        factor = floor + (1.0 - floor) * share[self.config.schedule]
        return factor * min((update + 1) / (self.config.warmup + 1), 1.0)

    @property
    def rate(self) -> float:
        """The policy's learning rate at present."""
        return float(self.inner.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's state, and the copies of parameters by their number."""
        copies = {str(i): copy.detach() for i, copy in enumerate(self.stepped) if copy is not self.parameters[i]}
        return {"moments": self.inner.state_dict(), "copies": copies}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of whole tensors; the parameters must have their weights before."""
        # Each rank takes its own part of the whole tensors, so the number of ranks may have changed.
        stepped = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        moments = {
            number: {name: placed(value, stepped[number]) for name, value in entry.items()}
            for number, entry in state["moments"]["state"].items()
        }
        self.inner.load_state_dict(state["moments"] | {"state": moments})
        for number, copy in state["copies"].items():
            own = self.stepped[int(number)]
            own.copy_(placed(copy, own))


def _built(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the registered optimiser, and check that it is one."""
    found = OPTIMIZERS.load(config.name)(groups, config)
    if not isinstance(found, torch.optim.Optimizer):
        raise UserError(f"optimizer {config.name!r} returned {type(found).__name__}, expected a torch.optim.Optimizer")
    return found


def adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), in one fused pass over all parameters."""
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


class SmallAdamW(torch.optim.AdamW):
    """AdamW for a small policy on the CPU: the same numbers, bit for bit, in fewer operations.

    With the few weights of an MLP, preparing a step takes longer than making it. Here it is prepared once: gradients
    are parts of one vector, and the lists of tensors that a step names stay the same.

    Args:
        parameters: float32, on the CPU; their gradients must not be replaced.
        config: rates.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> None:
        betas = (config.betas[0], config.betas[1])
        super().__init__(parameters, config.lr, betas, config.eps, config.weight_decay, fused=True)
        self._parameters: list[Tensor] = list(parameters)
        self.gradient = torch.zeros(sum(parameter.numel() for parameter in parameters))
        """Gradients of all parameters, one after the other."""
        parts = self.gradient.split([parameter.numel() for parameter in parameters])
        self._gradients = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
        for parameter, gradient in zip(parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._means, self._squares = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
        self._made = torch.zeros(len(parameters))
        """Steps made, once for each parameter, since each has its own in a state dict."""
        self._steps = list(self._made.unbind())

    def clip(self, most: float) -> Tensor:
        """Scale gradients down to a norm of `most`; returns their norm before."""
        # From the norms of the parts, as torch's own clipping: the norm of the vector would be rounded differently.
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self._gradients)))
        self.gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def step_all(self) -> None:
        """Make a step: the operation within `step`, which prepares it anew each time."""
        group = self.param_groups[0]
        self._made.add_(1.0)
        torch._fused_adamw_(
            self._parameters,
            self._gradients,
            self._means,
            self._squares,
            [],
            self._steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        if not self.state:  # a state dict is empty before the first step, as AdamW's
            self._show_state()

    def _show_state(self) -> None:
        """Let AdamW's state be the tensors that `step_all` steps."""
        for parameter, *values in zip(self._parameters, self._steps, self._means, self._squares, strict=True):
            self.state[parameter] = dict(zip(("step", "exp_avg", "exp_avg_sq"), values, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state dict of AdamW. Parameters that never had a gradient have no state in it: their moments
        are 0."""
        super().load_state_dict(state_dict)
        loaded = dict(self.state)
        for tensor in (self._made, *self._means, *self._squares):
            tensor.zero_()
        if not loaded:
            return
        self._show_state()
        for parameter, entry in loaded.items():
            for name, value in entry.items():
                self.state[parameter][name].copy_(value)
        self._made.fill_(self._made.max())


def small_suits(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> bool:
    """Return whether `SmallAdamW` learns what `adamw` would, faster.

    Parameters without a gradient have one of 0 there. With weight decay it would move them, which `adamw` leaves as
    they are. Those that have a gradient in some steps only (no loss here has such) would be stepped in all.
    """
    dense = all(p.dtype is torch.float32 and p.device.type == "cpu" and not is_sharded(p) for p in parameters)
    uniform = config.name == "adamw" and config.critic_lr is None and config.weight_decay == 0.0
    return dense and uniform and 0 < sum(parameter.numel() for parameter in parameters) <= MOST_SMALL


def adamw_8bit(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW with its state in blocks of 8-bit numbers, Dettmers et al. (2022), arXiv:2110.02861; tensors of fewer than
    4096 numbers keep theirs in float32."""
    import bitsandbytes

    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    return optimizer


# ---- steps that are left out


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
