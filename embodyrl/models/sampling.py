"""Drawing from categorical distributions."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return an index `[...]` for each distribution `[..., n]`.

    Draws what `torch.multinomial` draws, without its checks, for which the host waits for a GPU: the first of `n`
    exponential clocks to ring, at rates `probabilities`. Numbers that are not finite give any index: see `known`.

    Args:
        probabilities: float32; rows need not sum to 1.
        generator: on their device; None: torch's own.
    """
    clocks = torch.empty_like(probabilities, memory_format=torch.contiguous_format).exponential_(generator=generator)
    return (probabilities / clocks).argmax(-1)


def known(numbers: Tensor, logprobs: Tensor) -> Tensor:
    """Return numbers `[...]` that choices stand for, NaN where the log-probability `[...]` of a choice is.

    A choice among NaN looks like any other. So marked, it is found where actions reach the host anyway, and no GPU is
    waited for.
    """
    return numbers.masked_fill(logprobs.isnan(), torch.nan)
