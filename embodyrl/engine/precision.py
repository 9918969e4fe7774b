"""What forward passes compute in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from embodyrl.config.schema import Precision
from embodyrl.models.policy import Policy


def choose_precision(precision: Precision, policy: Policy, device: torch.device) -> torch.dtype:
    """The type that `engine.precision` stands for.

    auto is bfloat16 for weights that are held in it, and for models of many layers (those whose `parallel_plan` names
    blocks) on a GPU that multiplies it natively; else float32, because small networks gain nothing from fewer bits.
    """
    if precision is Precision.float32:
        return torch.float32
    held = any(parameter.dtype is torch.bfloat16 for parameter in policy.parameters())
    pays = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision is Precision.bfloat16 or held or (pays and policy.parallel_plan().blocks):
        return torch.bfloat16
    return torch.float32


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Compute matrix products in `dtype` inside the block; what needs the range or digits of float32 stays in it."""
    if dtype is torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
