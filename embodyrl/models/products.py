"""Matrix products of linear layers by oneDNN, on processors that torch's usual library (MKL) is slow on.

MKL has products in AVX-512 for Intel's processors alone; on others it computes with half of the width. oneDNN, which
torch contains as well, has them for all: twice as fast on AMD's Zen 5 for float32 matrices of more than a few hundred
rows and columns (`benchmarks/products.py`). Results differ by rounding at most.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SMALLEST = 2**21
"""Multiplications of a product from which on oneDNN is faster; preparing a call takes it longer than MKL."""
PROCESSORS = Path("/proc/cpuinfo")


def use_onednn(network: nn.Module) -> None:
    """Let the linear layers of a network compute large products by oneDNN, where that is faster."""
    if not onednn_is_faster():
        return
    for layer in network.modules():
        # Not those derived from it, which may compute something else.
        if not isinstance(layer, nn.Linear) or type(layer) is not nn.Linear:
            continue
        if layer.weight.device.type == "cpu" and layer.weight.dtype is torch.float32:
            layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether this processor has AVX-512 and is not one that MKL uses it on."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    # Not documented, but what torch.compile emits for linear layers.
    if not torch.backends.mkl.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return PROCESSORS.is_file() and "AuthenticAMD" in PROCESSORS.read_text(errors="replace")


def product(numbers: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `numbers [..., K] @ weight [N, K].T + bias [N]` by oneDNN; without a gradient."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(numbers, weight, bias, "none", [], "")
    return found


def of_weights(gradient: Tensor, numbers: Tensor) -> Tensor:
    """Return the gradient `[N, K]` of a weight, given that of a layer's output `[B, N]` and its input `[B, K]`."""
    narrow = gradient.shape[1] > numbers.shape[1]
    if not suits(gradient.t(), numbers.t()):
        # A product of as many numbers is faster with the narrow matrix on the left.
        return (numbers.t() @ gradient).t() if narrow else gradient.t() @ numbers
    # The first factor is copied into another order, so it should be the smaller one.
    return product(numbers.t(), gradient.t()).t() if narrow else product(gradient.t(), numbers.t())


def linear(numbers: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `functional.linear` does, by oneDNN where that is faster."""
    if not suits(numbers, weight):
        return functional.linear(numbers, weight, bias)
    if not torch.is_grad_enabled():
        return product(numbers.contiguous(), weight, bias)
    found: Tensor = _Product.apply(numbers, weight, bias)  # type: ignore[no-untyped-call]
    return found


def ensemble_product(numbers: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """Return `numbers [E, M, K] @ weights [E, K, N] + biases [E, 1, N]`, by oneDNN where that is faster."""
    if not suits(numbers[0], weights[0].t()):
        return torch.baddbmm(biases, numbers, weights)
    parts = zip(numbers.unbind(), weights.unbind(), biases.squeeze(1).unbind(), strict=True)
    return torch.stack([linear(each, weight.t(), bias) for each, weight, bias in parts])


def suits(numbers: Tensor, weight: Tensor) -> bool:
    """Return whether `product` may be used instead of `functional.linear`, on a CPU in float32, and is faster."""
    if numbers.numel() * weight.shape[0] < SMALLEST or not onednn_is_faster():
        return False
    on_cpu = numbers.device.type == "cpu" and numbers.dtype is torch.float32
    return on_cpu and not torch.is_autocast_enabled("cpu")


def _forward(layer: nn.Linear, numbers: Tensor) -> Tensor:
    return linear(numbers, layer.weight, layer.bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        numbers = numbers.contiguous()
        ctx.save_for_backward(numbers, weight)
        return product(numbers, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        numbers, weight = ctx.saved_tensors
        of_numbers, of_weight, of_bias = ctx.needs_input_grad
        # Of a mean, for instance, it is one number that stands for all: oneDNN has no fast way for such.
        gradient = gradient.contiguous()
        rows = gradient.flatten(0, -2)
        return (
            product(gradient, weight.t()) if of_numbers else None,
            of_weights(rows, numbers.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
