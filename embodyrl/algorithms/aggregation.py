"""From the losses of entries to one number.

A sequence is an episode of a slot, or that part of it that lies in the batch. Minibatches are drawn decision by
decision, so they hold pieces of sequences; a mean over each minibatch's own pieces would not be the mean over
sequences. Therefore every entry gets its weight from the whole batch once, and a minibatch's loss is the weighted sum
of its entries times (units in the batch) / (units in the minibatch), units being what minibatches are drawn by. In the
mean over the minibatches of a pass that is exactly the aggregate over the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.config.schema import Aggregation


def entry_weights(valid: Tensor, sequence: Tensor, how: Aggregation, longest: int) -> Tensor:
    """Weights `w` such that `(w * losses).sum()` is the aggregate of a batch.

    - token_mean: sum / entries that count.
    - seq_mean_token_sum: mean over sequences of each one's sum.
    - seq_mean_token_mean: mean over sequences of each one's mean; also known as normalised by trajectory.
    - seq_mean_token_sum_norm: seq_mean_token_sum over a constant, the length of the longest possible sequence (Liu et
      al. 2025, arXiv:2503.20783, section 3.2: long sequences are not favoured).

    A sequence of which nothing counts is left out of the mean over sequences.

    Args:
        valid: bool `[M, ...]`, entries that count, at the level of the log-probs.
        sequence: `[M]`, number of the sequence that each decision belongs to.
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
    """Number of the sequence that each decision belongs to, by slot and episode: `[K, B]` -> `[K, B]`.

    Args:
        episode: number of each decision's episode within its slot.
    """
    slots = torch.arange(episode.shape[1], device=episode.device).expand_as(episode)
    _, number = torch.unique(torch.stack([slots, episode], -1).flatten(0, 1), dim=0, return_inverse=True)
    return number.view(episode.shape)


def masked_mean(entries: Tensor, valid: Tensor) -> Tensor:
    """Mean over valid entries; 0 if there are none."""
    weights = valid.to(entries.dtype)
    return (entries * weights).sum() / weights.sum().clamp(min=1.0)
