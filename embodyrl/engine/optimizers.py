"""Makers of optimisers: callable (groups of parameters, config) -> torch optimiser."""

from __future__ import annotations

from typing import Any

import torch

from embodyrl.config.schema import OptimizerConfig


def adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, in one pass over all parameters."""
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def adamw_8bit(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW with moments in blocks of 8-bit numbers, Dettmers et al. (2022), arXiv:2110.02861; small tensors (fewer
    than 4096 numbers) keep theirs in float32."""
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
