"""Value model: distributions of returns over bins (Physical Intelligence 2025, arXiv:2511.14759, eq. 1).

Shapes: `M` states, `F` features of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class ValueDistribution(nn.Module):
    """Distributions of returns, -1 .. 0, for features of states.

    Args:
        features: `F`.
        hidden_sizes: widths of hidden layers, each followed by a normalisation.
        bins: number of bins, the first of which is -1 and the last 0.
    """

    places: Tensor

    def __init__(self, features: int, hidden_sizes: Sequence[int], bins: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in hidden_sizes:
            layers += [nn.Linear(features, size), nn.LayerNorm(size), nn.ReLU()]
            features = size
        self.network = nn.Sequential(*layers, nn.Linear(features, bins))
        self.register_buffer("places", torch.linspace(-1.0, 0.0, bins), persistent=False)

    def losses(self, features: Tensor, returns: Tensor) -> Tensor:
        """Return the cross-entropies `[M]` with the bins of returns `[M]` (eq. 1) [nats]."""
        bins = ((returns + 1.0) * (len(self.places) - 1)).round().long()
        return functional.cross_entropy(self.network(features).to(self.places), bins, reduction="none")

    def forward(self, features: Tensor) -> Tensor:
        """Return the means `[M]` of the distributions for features `[M, F]`."""
        means: Tensor = self.network(features).to(self.places).softmax(-1) @ self.places
        return means


def scaled_returns(remaining: Tensor, solved: Tensor, *, failure: float, longest: int) -> Tensor:
    """Return what is left of episodes, `[M]` in -1 .. 0: minus the actions until the task is solved, or until the end
    and what failure costs, in units of the least possible.

    Args:
        remaining: int `[M]`, actions to the end of the episode.
        solved: bool `[M]`, whether it was solved.
        failure: what a failure costs [actions].
        longest: actions of the longest episode.
    """
    return -(remaining + failure * ~solved).clamp(max=longest + failure) / (longest + failure)
