"""Critics of actions: an ensemble of small networks, computed together.

Shapes: `M` decisions, `F` features of an observation, `N` numbers of a chunk of actions, `E` critics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, relu

from embodyrl.models.critics.config import CriticSizes
from embodyrl.models.products import ensemble_product


def critic_weights(inputs: int, config: CriticSizes) -> int:
    """Return the number of weights of all critics together."""
    sizes = [inputs, *config.hidden_sizes, 1]
    of_one = sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(sizes))
    return config.count * (of_one + 2 * sum(config.hidden_sizes) * config.layer_norm)


class Critics(nn.Module):
    """Values of chunks of actions, by `E` networks of one shape. All of them are one product of matrices per layer:
    a loop over small networks would take `E` times as long.

    Weights and biases start as those of `nn.Linear`. With normalised layers each hidden layer is followed by the
    normalisation of Ba et al. (2016), arXiv:1607.06450, then by a rectifier (Ball et al. 2023, arXiv:2302.02948).

    Args:
        inputs: `F + N`.
        config: number, widths, normalisation.
        generator: on the CPU, for the start values.
    """

    def __init__(self, inputs: int, config: CriticSizes, generator: torch.Generator) -> None:
        super().__init__()
        self.normed = config.layer_norm
        count = config.count
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.gains, self.shifts = nn.ParameterList(), nn.ParameterList()
        sizes = [inputs, *config.hidden_sizes, 1]
        for fan_in, fan_out in pairwise(sizes):
            bound = 1.0 / math.sqrt(fan_in)
            for parameters, shape in ((self.weights, (count, fan_in, fan_out)), (self.biases, (count, 1, fan_out))):
                parameters.append(torch.empty(shape).uniform_(-bound, bound, generator=generator))
        for width in config.hidden_sizes if config.layer_norm else ():
            self.gains.append(torch.ones(count, 1, width))
            self.shifts.append(torch.zeros(count, 1, width))

    def forward(self, features: Tensor, actions: Tensor, which: Tensor | None = None) -> Tensor:
        """Return the values `[E, M]` of actions; gradients flow to the networks and to the actions.

        Args:
            features: `[M, F]`.
            actions: `[M, N]`, in -1 .. 1.
            which: int64, numbers of the critics that are asked; None: all.
        """
        return self._values(features, actions, which, frozen=False)

    def of_actions(self, features: Tensor, actions: Tensor) -> Tensor:
        """Return the values `[E, M]` of actions; gradients flow to the actions alone."""
        return self._values(features, actions, None, frozen=True)

    def _values(self, features: Tensor, actions: Tensor, which: Tensor | None, *, frozen: bool) -> Tensor:
        def taken(parameters: Sequence[Tensor]) -> list[Tensor]:
            chosen = parameters if which is None else [each.index_select(0, which) for each in parameters]
            # Detached weights receive no gradient, so the backward pass leaves out half of its products.
            return [each.detach() for each in chosen] if frozen else [*chosen]

        weights, biases = taken([*self.weights]), taken([*self.biases])
        gains, shifts = taken([*self.gains]), taken([*self.shifts])
        # `expand` copies nothing: all critics read the same `[M, F + N]`.
        hidden = torch.cat([features, actions], -1).expand(len(weights[0]), -1, -1)
        for layer, (weight, bias) in enumerate(zip(weights[:-1], biases[:-1], strict=True)):
            hidden = ensemble_product(hidden, weight, bias)
            if self.normed:
                hidden = torch.addcmul(shifts[layer], layer_norm(hidden, hidden.shape[-1:]), gains[layer])
            hidden = relu(hidden)
        return torch.baddbmm(biases[-1], hidden, weights[-1]).squeeze(-1)

    @torch.no_grad()
    def follow(self, others: Critics, share: float) -> None:
        """Move all weights by a share of the way to those of others: Polyak averaging."""
        torch._foreach_lerp_([*self.parameters()], [*others.parameters()], share)
