"""Actions in words: one token per entry, each the centre of one of 255 equal intervals of [-1, 1].

Tokens are counted from the first action token, `0 .. bins-1`; the highest stands for -1. `bins` edges make `bins - 1`
intervals, so that the two lowest tokens share the last one. Shapes: `...` any.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ActionBins(nn.Module):
    """The numbers that action tokens stand for."""

    centres: Tensor
    edges: Tensor

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins
        edges = torch.linspace(-1.0, 1.0, bins, dtype=torch.float64)
        centres = 0.5 * (edges[1:] + edges[:-1])
        interval = torch.arange(bins - 1, -1, -1).clamp(max=bins - 2)
        self.register_buffer("centres", centres[interval].float(), persistent=False)
        self.register_buffer("edges", edges.float(), persistent=False)

    def decode(self, tokens: Tensor) -> Tensor:
        """Numbers in [-1, 1] `[...]` that tokens `[...]` stand for."""
        return self.centres[tokens]

    def encode(self, numbers: Tensor) -> Tensor:
        """Tokens `[...]` of numbers `[...]`, which are cut off at -1 and 1."""
        return self.bins - torch.bucketize(numbers.clamp(-1.0, 1.0), self.edges, right=True)


class TokenDistribution:
    """What a model says next, among action tokens alone.

    Args:
        logits: `[..., bins]` of the action tokens.
        temperature: divides them.
        top_k: keep so many of the likeliest tokens; 0: all.
        top_p: keep the likeliest tokens that together have this probability.
        chosen: `[...]` tokens that are kept in any case: those which a rollout has drawn, lest a small change of the
            weights puts them out of reach and their log-probability at minus infinity. At the weights of the rollout
            this changes nothing.
    """

    def __init__(
        self, logits: Tensor, *, temperature: float, top_k: int, top_p: float, chosen: Tensor | None = None
    ) -> None:
        scaled = logits.float() / temperature
        kept = torch.ones_like(scaled, dtype=torch.bool)
        if top_k:
            kept &= scaled >= scaled.topk(top_k, dim=-1).values[..., -1:]
        if top_p < 1.0:
            kept &= _nucleus(scaled.masked_fill(~kept, -torch.inf), top_p)
        if chosen is not None:
            kept = kept.scatter(-1, chosen.unsqueeze(-1), True)
        self._kept = kept
        self._logprobs = scaled.masked_fill(~kept, -torch.inf).log_softmax(-1)

    def sample(self, generator: torch.Generator | None) -> Tensor:
        """Draw tokens `[...]`."""
        probabilities = self._logprobs.exp().flatten(0, -2)
        return torch.multinomial(probabilities, 1, generator=generator).view(self._logprobs.shape[:-1])

    def mode(self) -> Tensor:
        """The likeliest tokens `[...]`."""
        return self._logprobs.argmax(-1)

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Log-probability `[...]` of tokens `[...]` [nats]."""
        return self._logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy `[...]` [nats]."""
        terms = self._logprobs.exp() * self._logprobs.masked_fill(~self._kept, 0.0)
        return -terms.sum(-1)


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Whether each token is among the likeliest ones that together have probability `top_p`; the first always is."""
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before < top_p)
