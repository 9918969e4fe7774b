"""The reference policy of the KL penalty: the policy at the start of the run."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from embodyrl.engine.lora import adapted_layers, without_adapters
from embodyrl.engine.parallel import placed
from embodyrl.models.policy import Policy


class Reference(ABC):
    """A policy that never changes."""

    weights: Policy | None
    """Weights that it needs on the device while it scores, besides the learning policy's; None if it needs none."""

    @abstractmethod
    @contextmanager
    def scoring(self) -> Iterator[Policy]:
        """Yield the reference policy for the length of a block."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the tensors that a resumed run cannot compute again."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""


def reference_of(policy: Policy, *, adapted: bool) -> Reference:
    """Return the reference for a policy that has not learned yet."""
    return WithoutAdapters(policy) if adapted else FrozenCopy(policy)


class FrozenCopy(Reference):
    """A second set of weights."""

    def __init__(self, policy: Policy) -> None:
        self.policy = copy.deepcopy(policy).requires_grad_(False)
        self.weights = self.policy

    @contextmanager
    def scoring(self) -> Iterator[Policy]:
        """See `Reference`."""
        yield self.policy

    def state_dict(self) -> dict[str, Any]:
        """See `Reference`."""
        return self.policy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Reference`."""
        own = self.policy.state_dict()
        self.policy.load_state_dict({name: placed(value, own[name]) for name, value in state.items()})


class WithoutAdapters(Reference):
    """The learning policy without its adapters, and with its initial heads: no second set of weights."""

    weights = None

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._heads = policy.parallel_plan().heads
        assert adapted_layers(policy), "without adapters the weights themselves learn"
        self._first = {name: parameter.detach().clone() for name, parameter in self._learning.items()}

    @property
    def _learning(self) -> dict[str, nn.Parameter]:
        """Parameters of the heads by name, looked up anew because sharding replaces them."""
        return {
            name: parameter
            for head in self._heads
            for name, parameter in self.policy.get_submodule(head).named_parameters(prefix=head)
        }

    @contextmanager
    def scoring(self) -> Iterator[Policy]:
        """See `Reference`."""
        now = {name: parameter.detach().clone() for name, parameter in self._learning.items()}
        with without_adapters(self.policy):
            self._set(self._first)
            try:
                yield self.policy
            finally:
                self._set(now)

    @torch.no_grad()
    def _set(self, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._learning.items():
            parameter.copy_(placed(values[name], parameter))

    def state_dict(self) -> dict[str, Any]:
        """See `Reference`."""
        return dict(self._first)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Reference`."""
        for name, value in self._first.items():
            value.copy_(state[name])
