"""Weights of a policy, their gradients and their optimiser state, sharded over ranks (FSDP2).

Imported only by runs that shard: see `distribution.parallelize`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from embodyrl.engine.parallel import Ranks, Replicas
from embodyrl.engine.units import units
from embodyrl.models.policy import EvalOutput, Policy

ENTRIES = ("act", "evaluate", "sft_loss")
"""Methods of a policy that use its weights; FSDP gathers shards for them as for `forward`."""


class Shards(Replicas):
    """Every rank holds a shard of each weight (FSDP2), and gathers those of a block of layers while it computes with
    them. Gradients and optimiser state are sharded alike.

    Args:
        policy: the same on all ranks; its parameters are replaced.
        ranks: those of the run.
        device: that they compute on.
        shards: number of shards; with more ranks, each shard is held by several (HSDP: Zhao et al. 2023,
            arXiv:2304.11277).
    """

    def __init__(self, policy: Policy, ranks: Ranks, device: torch.device, shards: int) -> None:
        super().__init__(policy, ranks)
        policy.memory_stays = False
        _know_outputs()
        self._skeleton = _without_weights(policy) if ranks.is_first else None
        self.factor = float(ranks.size)  # FSDP averages the ranks' gradients, but the loss needs their sum
        shard = functools.partial(
            fully_shard,
            mesh=_mesh(device, ranks.size, shards),
            reshard_after_forward=True,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),  # sums of gradients keep all digits
        )
        # One unit after the other, so that no rank needs room for the whole policy beside its shards while they are
        # made, and weights that are still the pages of a file are copied only to be sharded.
        there: set[Tensor] = set()
        for unit in units(policy):
            for tensor in (*unit.parameters(), *unit.buffers()):
                if tensor not in there:
                    tensor.data = tensor.data.to(device)
                    dist.broadcast(tensor.detach(), src=0)
            shard(unit)
            there.update(unit.parameters(), unit.buffers())
        for entry in ENTRIES:
            register_fsdp_forward_method(policy, entry)
        self._parts = [module for module in policy.modules() if isinstance(module, FSDPModule)]

    def full_policy(self) -> Policy | None:
        """See `Replicas`; the first rank gets a copy on the CPU, one weight after the other."""
        weights = [whole_weight(weight, keep=self.ranks.is_first) for weight in self.policy.parameters()]
        if self._skeleton is None:
            return None
        filled = copy.deepcopy(
            self._skeleton,
            {id(empty): weight for empty, weight in zip(self._skeleton.parameters(), weights, strict=True)},
        )
        for buffer, current in zip(filled.buffers(), self.policy.buffers(), strict=True):
            buffer.copy_(current)
        return filled

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """See `Replicas`; all ranks enter together."""
        self._reshard_after_use(False)
        for part in self._parts:
            part.unshard()
        try:
            yield
        finally:
            for part in self._parts:
                part.reshard()
            self._reshard_after_use(True)

    def _reshard_after_use(self, wanted: bool) -> None:
        for part in self._parts:
            part.set_reshard_after_forward(wanted, recurse=False)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: FSDP sums gradients during the backward pass."""


def _mesh(device: torch.device, ranks: int, shards: int) -> DeviceMesh:
    """Return the arrangement of ranks; those of a machine follow each other, and share one copy."""
    if shards == ranks:
        return init_device_mesh(device.type, (ranks,))
    return init_device_mesh(device.type, (ranks // shards, shards), mesh_dim_names=("copies", "shards"))


def whole_weight(weight: Tensor, *, keep: bool) -> Tensor:
    """Return the whole tensor on the CPU, of the same kind; an empty one unless `keep`."""
    full = gathered(weight) if isinstance(weight, DTensor) else weight.detach()
    full = full.cpu() if keep else full.new_empty(0, device="cpu")
    return nn.Parameter(full, weight.requires_grad) if isinstance(weight, nn.Parameter) else full


def gathered(weight: DTensor) -> Tensor:
    """Gather a whole tensor on the ranks' device, also while its shards are offloaded."""
    mesh, part = weight.device_mesh, weight.to_local().detach()
    here = part.to(mesh.device_type)
    sharded = DTensor.from_local(
        here, mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return sharded.full_tensor()


def _without_weights(policy: Policy) -> Policy:
    """Return a copy whose weights take no memory."""
    empty = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
        for weight in policy.parameters()
    }
    return copy.deepcopy(policy, empty)


def _know_outputs() -> None:
    """Register `EvalOutput` with torch, so that FSDP finds the tensors in it whose gradients it waits for."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing here changes it in place
    if EvalOutput in pytree.SUPPORTED_NODES:
        return
    names = [field.name for field in dataclasses.fields(EvalOutput)]
    pytree.register_pytree_node(
        EvalOutput,
        lambda output: ([getattr(output, name) for name in names], None),
        lambda values, _: EvalOutput(**dict(zip(names, values, strict=True))),
    )
