from __future__ import annotations

import pytest
import torch

from embodyrl.algorithms.rewards import accuracy, none, zero_variance
from embodyrl.config.schema import FilterMetric

SUCCESS = torch.tensor([[True, True, True, True], [True, False, True, True], [False] * 4, [True, False, False, False]])
PLAYED = torch.tensor([[True] * 4, [True, False, True, True], [False] * 4, [True] * 4])
"""Of the second group the one failure was lost, of the third everything."""
REWARDS = torch.tensor([[1.0, 2.0, 1.0, 1.0], [3.0, 9.0, 3.0, 3.0], [1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 5.0, 5.0]])


def test_groups_that_all_came_out_the_same_are_dropped() -> None:
    def kept(metric: FilterMetric) -> list[bool]:
        return zero_variance(success=SUCCESS, total_reward=REWARDS, played=PLAYED, metric=metric).tolist()

    assert kept(FilterMetric.success) == [False, False, False, True]
    assert kept(FilterMetric.total_reward) == [True, False, False, False]


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        (0.0, 1.0, [True, True, False, True]),
        (0.1, 0.9, [False, False, False, True]),
        (0.25, 0.25, [False, False, False, True]),
        (0.26, 1.0, [True, True, False, False]),
    ],
)
def test_groups_within_the_limits_are_kept(low: float, high: float, kept: list[bool]) -> None:
    assert accuracy(success=SUCCESS, played=PLAYED, accuracy_low=low, accuracy_high=high).tolist() == kept


def test_without_a_filter_only_lost_groups_are_dropped() -> None:
    assert none(played=PLAYED).tolist() == [True, True, False, True]
