"""Policies over ranks: replicated or sharded, and their state as if there were one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embodyrl.config.schema import ParallelBackend
from embodyrl.engine.parallel import Ranks, Replicas, is_sharded
from embodyrl.models.policy import Policy
from embodyrl.placement.ranks import shards_of


def parallelize(policy: Policy, ranks: Ranks, backend: ParallelBackend, device: torch.device) -> Replicas:
    """Replicate or shard a policy over ranks; all get the weights of the first. Replicas are on the device already,
    shards are moved there."""
    shards = shards_of(backend, ranks.size, ranks.local_size)
    if shards > 1:
        from embodyrl.engine.sharding import Shards

        return Shards(policy, ranks, device, shards)
    if ranks.size > 1:
        for tensor in [*policy.parameters(), *policy.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
    return Replicas(policy, ranks)


def full_state_dict(tree: Any, *, keep: bool) -> Any:
    """Return nested state with whole tensors on the CPU in place of sharded ones; empty ones unless `keep`. All ranks
    must call it."""
    if isinstance(tree, Tensor) and is_sharded(tree):
        from embodyrl.engine.sharding import whole_weight

        return whole_weight(tree, keep=keep)
    if isinstance(tree, Mapping):
        return {key: full_state_dict(value, keep=keep) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(full_state_dict(value, keep=keep) for value in tree)
    return tree
