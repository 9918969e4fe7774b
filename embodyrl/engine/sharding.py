"""How the weights of a policy, their gradients and their optimiser state are spread over ranks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from embodyrl.config.schema import ParallelBackend
from embodyrl.engine.parallel import Ranks
from embodyrl.models.policy import EvalOutput, Policy

ENTRIES = ("act", "evaluate", "sft_loss")
"""Methods of a policy that use its weights, besides those of its parts."""


class Replicas:
    """Every rank holds all weights. Also what a single rank has."""

    factor = 1.0
    """What a rank's loss is multiplied by before its backward pass."""

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self.policy = policy
        self.ranks = ranks

    def whole_policy(self) -> Policy | None:
        """The policy with whole weights, to be saved; None on all ranks but the first. All must ask."""
        return self.policy if self.ranks.is_first else None

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All weights are on every rank for the length of a block, so that each can decide as often as it likes."""
        yield

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add the gradients of all ranks up, once each of them has its own."""
        if self.ranks.size == 1:
            return
        own = [parameter.grad for parameter in parameters if parameter.grad is not None]  # the same ones on all ranks
        flat = torch.cat([gradient.flatten().float() for gradient in own])
        dist.all_reduce(flat)
        for gradient, part in zip(own, flat.split([gradient.numel() for gradient in own]), strict=True):
            gradient.copy_(part.view_as(gradient))


class Shards(Replicas):
    """Every rank holds a part of each weight (FSDP2), and gets the others of a block of layers while it computes with
    them. Gradients and optimiser state are spread alike.

    Args:
        policy: the same on all ranks; its parameters are replaced.
        ranks: all of them take part.
        device: where they compute.
    """

    def __init__(self, policy: Policy, ranks: Ranks, device: torch.device) -> None:
        super().__init__(policy, ranks)
        self._skeleton = _without_weights(policy) if ranks.is_first else None
        self.factor = float(ranks.size)  # FSDP takes the mean of the ranks' gradients, and their sum is wanted
        shard = functools.partial(
            fully_shard,
            mesh=init_device_mesh(device.type, (ranks.size,)),
            reshard_after_forward=True,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),  # sums of gradients keep all digits
        )
        for unit in units(policy):
            shard(unit)
        for entry in ENTRIES:
            register_fsdp_forward_method(policy, entry)
        self._parts = [module for module in policy.modules() if isinstance(module, FSDPModule)]

    def whole_policy(self) -> Policy | None:
        """See `Replicas`; the first rank gets a copy on the CPU, one weight after the other."""
        weights = [_whole_weight(weight, keep=self.ranks.is_first) for weight in self.policy.parameters()]
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
    def gathered(self) -> Iterator[None]:
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
        """Nothing is left to do: they are added up as soon as they are there."""


def spread(policy: Policy, ranks: Ranks, backend: ParallelBackend, device: torch.device) -> Replicas:
    """Spread a policy over ranks; all get the weights that the first one has."""
    if ranks.size == 1:
        return Replicas(policy, ranks)
    for tensor in [*policy.parameters(), *policy.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    if backend is ParallelBackend.none:
        return Replicas(policy, ranks)
    _know_outputs()
    return Shards(policy, ranks, device)


def units(policy: Policy) -> list[nn.Module]:
    """Modules whose weights are gathered together, inner ones first: the policy's blocks, what is left of it, and
    layers of either that learn in more bits than the rest of it, which one gathering cannot mix."""
    blocks = [policy.get_submodule(name) for name in policy.parallel_plan().blocks]
    inside = {module for block in blocks for module in block.modules()}
    others = [module for module in policy.modules() if module not in inside]
    odd = [layer for group in (*(block.modules() for block in blocks), others) for layer in _odd_layers(group)]
    return [layer for layer in odd if layer is not policy and layer not in blocks] + [*blocks, policy]


def _odd_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules whose own weights learn in more bits than others of these: heads on a network in 16 bits."""
    learning = {
        module: [weight.itemsize for weight in module.parameters(recurse=False) if weight.requires_grad]
        for module in modules
    }
    fewest = min((size for sizes in learning.values() for size in sizes), default=0)
    return [module for module, sizes in learning.items() if any(size > fewest for size in sizes)]


def whole(tree: Any, *, keep: bool) -> Any:
    """Nested state with whole tensors on the CPU in place of spread ones; empty ones unless `keep`. All ranks must
    ask."""
    if isinstance(tree, DTensor):
        return _whole_weight(tree, keep=keep)
    if isinstance(tree, Mapping):
        return {key: whole(value, keep=keep) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(whole(value, keep=keep) for value in tree)
    return tree


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, spread as another tensor of its shape is; nothing is exchanged."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def place_moments(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A whole `Optimizer.state_dict`, with its tensors spread as the optimiser's parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        number: {name: placed(value, parameters[number]) for name, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return state | {"state": moments}


def norm_of(norm: Tensor) -> Tensor:
    """A norm of gradients, which is a part of one where they are spread."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _whole_weight(weight: Tensor, *, keep: bool) -> Tensor:
    """A whole tensor on the CPU, of the same kind; an empty one unless `keep`."""
    full = _gathered(weight) if isinstance(weight, DTensor) else weight.detach()
    full = full.cpu() if keep else full.new_empty(0, device="cpu")
    return nn.Parameter(full, weight.requires_grad) if isinstance(weight, nn.Parameter) else full


def _gathered(weight: DTensor) -> Tensor:
    """A whole tensor, gathered where the ranks compute, also while its part is kept elsewhere."""
    mesh, part = weight.device_mesh, weight.to_local().detach()
    here = part.to(mesh.device_type)
    spread_here = DTensor.from_local(
        here, mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return spread_here.full_tensor()


def _without_weights(policy: Policy) -> Policy:
    """A copy whose weights take no memory."""
    empty = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
        for weight in policy.parameters()
    }
    return copy.deepcopy(policy, empty)


def _know_outputs() -> None:
    """Let torch look into what a policy's `evaluate` returns for tensors whose gradients FSDP waits for."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing here changes it in place
    if EvalOutput in pytree.SUPPORTED_NODES:
        return
    names = [field.name for field in dataclasses.fields(EvalOutput)]
    pytree.register_pytree_node(
        EvalOutput,
        lambda output: ([getattr(output, name) for name in names], None),
        lambda values, _: EvalOutput(**dict(zip(names, values, strict=True))),
    )
