"""From the losses of entries to one number.

A sequence is an episode of a slot, or that part of it that lies in the batch. Minibatches are drawn chunk by chunk,
so they hold pieces of sequences; a mean over each minibatch's own pieces would not be the mean over
sequences. Therefore every entry gets its weight from the whole batch once, and a minibatch's loss is the weighted sum
of its entries times (units in the batch) / (units in the minibatch), units being what minibatches are drawn by. In
the mean over the minibatches of an epoch that is exactly the aggregate over the batch.

Shapes: `M` chunks, `K` chunks of `B` slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.config.schema import Aggregation


def token_weights(valid: Tensor, sequence: Tensor, how: Aggregation, longest: int) -> Tensor:
    """Return weights `w`, shaped like `valid`, such that `(w * losses).sum()` is the aggregate of a batch.

    - token_mean: sum / entries that count.
    - seq_mean_token_sum: mean over sequences of each one's sum.
    - seq_mean_token_mean: mean over sequences of each one's mean (GRPO, Shao et al. 2024, eq. 3).
    - seq_mean_token_sum_norm: seq_mean_token_sum over a constant, the length of the longest possible sequence (Liu et
      al. 2025, arXiv:2503.20783, section 3.2: long sequences are not favoured).

    A sequence of which nothing counts is left out of the mean over sequences.

    Args:
        valid: bool `[M, ...]`, entries that count, at the level of the log-probs.
        sequence: `[M]`, number of the sequence that each chunk belongs to.
        how: see above.
        longest: entries in the longest possible sequence.
    """
    counts = valid.to(torch.float32)
    if how is Aggregation.token_mean:
        return counts / counts.sum().clamp(min=1.0)
    _, member = torch.unique(sequence, return_inverse=True)
    lengths = torch.zeros(len(member), device=valid.device).index_add(0, member, counts.reshape(len(member), -1).sum(1))
    weights = counts / (lengths > 0).sum().clamp(min=1)
    if how is Aggregation.seq_mean_token_sum:
        return weights
    if how is Aggregation.seq_mean_token_sum_norm:
        return weights / longest
    own_length = lengths[member].clamp(min=1.0)
    return weights / own_length.view(-1, *[1] * (valid.dim() - 1))


def sequence_numbers(episode: Tensor) -> Tensor:
    """Number the sequences of a batch: `[K, B]` -> `[K, B]`, one number for each pair of slot and episode.

    Args:
        episode: number of each chunk's episode within its slot.
    """
    slots = torch.arange(episode.shape[1], device=episode.device)
    # One number for each pair, because sorting pairs takes torch many times as long.
    pairs = slots * (episode.max() + 1) + episode
    numbers: Tensor = torch.unique(pairs, return_inverse=True)[1]
    return numbers
