from __future__ import annotations

import pytest
import torch

from embodyrl.algorithms.aggregation import sequence_numbers, token_weights
from embodyrl.config.schema import Aggregation

LOSSES = torch.tensor([1.0, 2.0, 6.0, 4.0, 100.0])
VALID = torch.tensor([True, True, True, True, False])
SEQUENCE = torch.tensor([7, 3, 7, 7, 5])
"""Sequence 7 has losses 1, 6, 4, sequence 3 has 2, and of sequence 5 nothing counts."""


def aggregate(how: str, valid: torch.Tensor = VALID, longest: int = 10) -> float:
    return float((token_weights(valid, SEQUENCE, Aggregation(how), longest) * LOSSES).sum())


def test_aggregation_by_hand() -> None:
    assert aggregate("token_mean") == pytest.approx((1 + 2 + 6 + 4) / 4)
    assert aggregate("seq_mean_token_sum") == pytest.approx((11 + 2) / 2)
    assert aggregate("seq_mean_token_mean") == pytest.approx((11 / 3 + 2) / 2)
    assert aggregate("seq_mean_token_sum_norm") == pytest.approx((11 + 2) / 2 / 10)


@pytest.mark.parametrize("how", list(Aggregation))
def test_nothing_that_counts_is_nothing_and_no_division_by_zero(how: Aggregation) -> None:
    assert aggregate(how, torch.zeros(5, dtype=torch.bool)) == 0.0


@pytest.mark.parametrize("how", list(Aggregation))
def test_the_mean_over_minibatches_is_the_aggregate_of_the_batch(how: Aggregation) -> None:
    weights = token_weights(VALID, SEQUENCE, how, 10)
    parts = torch.tensor([3, 0, 4, 1, 2]).tensor_split(2)
    scaled = [(weights * LOSSES)[part].sum() / (len(part) / 5) * len(part) / 5 for part in parts]
    assert float(sum(scaled)) == pytest.approx(float((weights * LOSSES).sum()))


def test_normalising_by_trajectory_is_the_mean_of_episode_means() -> None:
    # RLinf's masked_mean_ratio: the mean over all K*B entries of loss * mask / (own length / longest length).
    generator = torch.Generator().manual_seed(0)
    losses = torch.randn(6, 4, generator=generator)
    lengths = torch.tensor([6, 1, 3, 2])
    valid = torch.arange(6).unsqueeze(1) < lengths
    rlinf = (losses * valid / (valid.sum(0) / 6)).mean()
    sequence = torch.arange(4).expand(6, 4).flatten()
    weights = token_weights(valid.flatten(), sequence, Aggregation.seq_mean_token_mean, 6)
    torch.testing.assert_close((weights * losses.flatten()).sum(), rlinf)


def test_entries_of_lower_levels_count_each() -> None:
    valid = torch.tensor([[True, True], [True, False]])
    weights = token_weights(valid, torch.tensor([0, 1]), Aggregation.seq_mean_token_mean, 9)
    assert weights.tolist() == [[0.25, 0.25], [0.5, 0.0]]


def test_sequences_are_episodes_of_slots() -> None:
    # Slot 0 plays episodes 0, 0, 1; slot 1 plays 0, 1, 2: five sequences of their own.
    numbers = sequence_numbers(torch.tensor([[0, 0], [0, 1], [1, 2]]))
    assert numbers[0, 0] == numbers[1, 0] and len(numbers.unique()) == 5
