"""What learns, and the optimiser that steps it; with float32 copies of weights that are held in fewer bits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.config.schema import LearningRate, OptimizerConfig
from embodyrl.engine.sharding import placed
from embodyrl.registry import OPTIMIZERS

HALF_TYPES = (torch.bfloat16, torch.float16)


class Optimizer:
    """Descends the gradients of some parameters.

    With `master_weights` a parameter that is held in 16 bits has a float32 copy, which is what is stepped; the
    parameter is the copy, rounded. Steps smaller than half a bit would be lost otherwise.

    Args:
        parameters: those that require gradients learn.
        config: rates, decay, norm.
        updates: length of the run, for the schedule.
        critic: those of the parameters that have a learning rate of their own, if there is one.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: OptimizerConfig,
        updates: int,
        critic: Iterable[nn.Parameter] = (),
    ) -> None:
        self.config = config
        self.updates = updates
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.stepped = [self._stepped(parameter) for parameter in self.parameters]
        """What is stepped: parameters, or their copies."""
        self.inner: torch.optim.Optimizer = OPTIMIZERS.load(config.name)(self._groups(set(critic)), config)

    def _groups(self, critic: set[nn.Parameter]) -> list[dict[str, Any]]:
        """What is stepped: all, or what is not the critic's and what is."""
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
        """Parameters that have a copy, and those."""
        pairs = zip(self.parameters, self.stepped, strict=True)
        return [(parameter, copy) for parameter, copy in pairs if parameter is not copy]

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self) -> Tensor:
        """Scale gradients down to `max_grad_norm`; returns the norm that they had."""
        return nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm, foreach=True)

    @torch.no_grad()
    def step(self) -> None:
        """Change the parameters by their gradients."""
        for parameter, copy in self._copies:
            copy.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
            parameter.grad = None  # at once: for a large policy both together are much of the memory
        self.inner.step()
        for parameter, copy in self._copies:
            parameter.copy_(copy)
            copy.grad = None

    def set_learning_rate(self, update: int) -> float:
        """Set what the schedule says for an update, the first of which is 0; returns that of the policy."""
        done = min(update / self.updates, 1.0)
        share = {
            LearningRate.constant: 1.0,
            LearningRate.linear: 1.0 - done,
            LearningRate.cosine: 0.5 * (1.0 + math.cos(math.pi * done)),
        }
        floor = self.config.lr_floor
        factor = floor + (1.0 - floor) * share[self.config.schedule]
        factor *= min((update + 1) / (self.config.warmup + 1), 1.0)
        rates = (self.config.lr, self.config.critic_lr or self.config.lr)
        for group, rate in zip(self.inner.param_groups, rates, strict=False):
            group["lr"] = rate * factor
        return float(self.inner.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Moments, and the copies of parameters by their number."""
        copies = {str(i): copy.detach() for i, copy in enumerate(self.stepped) if copy is not self.parameters[i]}
        return {"moments": self.inner.state_dict(), "copies": copies}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the parameters have their weights already."""
        self.inner.load_state_dict(state["moments"])
        for number, copy in state["copies"].items():
            own = self.stepped[int(number)]
            own.copy_(placed(copy, own))
