"""The optimiser, with float32 copies of weights in 16 bits, and its factories by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.config.schema import LearningRate, OptimizerConfig
from embodyrl.engine.adamw import SmallAdamW, small_suits
from embodyrl.engine.parallel import norm_of, placed
from embodyrl.errors import UserError
from embodyrl.registry import OPTIMIZERS

HALF_TYPES = (torch.bfloat16, torch.float16)


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

    def set_learning_rate(self, update: int, updates: int | None = None) -> float:
        """Set the scheduled learning rates of an update (0, 1, ...) of so many, by default those of the run; returns
        the policy's."""
        factor = self.share(update, updates or self.updates)
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
