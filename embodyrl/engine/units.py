"""The parts of a policy whose weights are gathered together where they are sharded."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from embodyrl.models.policy import Policy


def units(policy: Policy) -> list[nn.Module]:
    """Return the modules whose weights are gathered together, inner ones first: the policy's blocks, the rest of it,
    and layers of either that learn in more bits than their neighbours, since one gather cannot mix types."""
    blocks = [policy.get_submodule(name) for name in policy.parallel_plan().blocks]
    inside = {module for block in blocks for module in block.modules()}
    others = [module for module in policy.modules() if module not in inside]
    odd = [layer for group in (*(block.modules() for block in blocks), others) for layer in _odd_layers(group)]
    return [layer for layer in odd if layer is not policy and layer not in blocks] + [*blocks, policy]


def _odd_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules whose own weights learn in more bits than others of these: heads on a network in 16 bits."""
    learning = {
        module: [weight.itemsize for weight in module.parameters(recurse=False) if weight.requires_grad]
        for module in modules
    }
    fewest = min((size for sizes in learning.values() for size in sizes), default=0)
    return [module for module, sizes in learning.items() if any(size > fewest for size in sizes)]
