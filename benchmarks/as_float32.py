"""The program on a CPU that has no instructions for bfloat16: matrix products and attention are computed in float32.

    python benchmarks/as_float32.py run config.yaml     # as `embodyrl run config.yaml`

Torch has only a plain loop for products of bfloat16 on such a CPU, 3 to 4 times slower than the product in float32 with
both conversions. Results are rounded to bfloat16; only what one operation reads and returns is held in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embodyrl.cli.main import main

HALF = torch.bfloat16
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
REPLACED = ("mm", "addmm", "bmm", "baddbmm", ATTENTION, f"{ATTENTION}_backward")


def in_float32(name: str) -> Callable[..., Any]:
    """Return an operation of torch on the CPU that computes in float32 what it is given in bfloat16."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def compute(*args: Any, **kwargs: Any) -> Any:
        if not any(map(is_half, [*args, *kwargs.values()])):
            return kernel.call_boxed(cpu, *args, **kwargs)
        made = kernel.call_boxed(cpu, *map(raised, args), **{key: raised(each) for key, each in kwargs.items()})
        if isinstance(made, Tensor):
            return made.to(HALF)
        # Beside its result [B, heads, L, width], attention returns the logarithms of its sums, always in float32.
        return tuple(each.to(HALF) if each.dim() == 4 else each for each in made)

    return compute


def is_half(value: object) -> bool:
    """Return whether an argument is a tensor in bfloat16."""
    return isinstance(value, Tensor) and value.dtype is HALF


def raised(value: Any) -> Any:
    """Return an argument, in float32 if it is a tensor in bfloat16."""
    return value.float() if is_half(value) else value


def replace_operations() -> torch.library.Library:
    """Replace the operations until the returned object is dropped."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's own are overridden, which is what we want
        for name, compute in [(name, in_float32(name)) for name in REPLACED]:
            library.impl(name, compute, "CPU")
    return library


if __name__ == "__main__":
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        replaced = replace_operations()
    main()
