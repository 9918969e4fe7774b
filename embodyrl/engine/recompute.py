"""Gradient checkpointing: what a block computes on the way forward is not kept but computed again on the way back
(Chen et al. 2016, arXiv:1604.06174). A block's activations are then in memory one block at a time, for a third more
computation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from embodyrl.models.errors import PolicyError
from embodyrl.models.policy import Policy


def recompute_blocks(policy: Policy) -> None:
    """Keep only the inputs of the policy's blocks (`parallel_plan`) for the backward pass. Gradients stay the same.

    Raises:
        PolicyError: the policy has no blocks.
    """
    blocks = policy.parallel_plan().blocks
    if not blocks:
        raise PolicyError(
            f"engine.gradient_checkpointing: model {policy.name!r} does not say which blocks it consists of "
            "(Policy.parallel_plan): set engine.gradient_checkpointing=false"
        )
    for name in blocks:
        block = policy.get_submodule(name)
        block.forward = functools.partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
