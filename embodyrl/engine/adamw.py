"""AdamW by name: torch's, one with 8-bit state, and one for small policies on the CPU, with torch's numbers in fewer
operations."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.config.schema import OptimizerConfig
from embodyrl.engine.parallel import is_sharded

MOST_SMALL = 2**18
"""Most weights of a policy that `SmallAdamW` learns; with more, computing takes longer than preparing."""


class AdamW(torch.optim.AdamW):
    """torch's AdamW, without the guards against torch.compile around its methods, which nothing here compiles: the
    first call of one imports all of it, a second of every start. `step` is to be called without gradients."""

    step = inspect.unwrap(torch.optim.AdamW.step)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class SmallAdamW(AdamW):
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


def adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), in one fused pass over all parameters."""
    return AdamW(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


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
