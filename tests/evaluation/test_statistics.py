"""Paired success rates: the interval of their difference and the test that it is none."""

from __future__ import annotations

import math

import pytest

from embodyrl.evaluation.results import Pairs, mcnemar_p, newcombe_interval


def test_the_interval_is_the_one_computed_by_hand() -> None:
    # 50 pairs: 32 solved by the first, 22 by the second. Wilson's intervals: 0.50141 .. 0.75861, 0.31162 .. 0.57694.
    # phi = (20 * 16 - 12 * 2 - 25) / sqrt(32 * 18 * 22 * 28) = 271 / 595.66 = 0.45496
    # second - first = -0.2; its distances to the limits are those of (first - second) = 0.2, exchanged:
    #   below 0.2: sqrt(0.13859^2 - 2 phi 0.13859 * 0.13694 + 0.13694^2) = 0.14384
    #   above 0.2: sqrt(0.12838^2 - 2 phi 0.12838 * 0.11861 + 0.11861^2) = 0.12921
    pairs = Pairs(both=20, only_first=12, only_second=2, neither=16)
    assert pairs.difference == pytest.approx(-0.2)
    assert newcombe_interval(pairs) == pytest.approx((-0.2 - 0.12921, -0.2 + 0.14384), abs=2e-5)


def test_exchanging_the_policies_turns_the_interval_around() -> None:
    low, high = newcombe_interval(Pairs(both=20, only_first=12, only_second=2, neither=16))
    assert newcombe_interval(Pairs(both=20, only_first=2, only_second=12, neither=16)) == pytest.approx((-high, -low))


def test_equal_outcomes_still_leave_an_interval() -> None:
    # No row of the table has two outcomes, so phi is 0. Wilson's upper limit at 0 of 10: 3.8416 / 13.8416 = 0.27754,
    # which is the distance on both sides: sqrt(0^2 + 0.27754^2).
    for pairs in (
        Pairs(both=0, only_first=0, only_second=0, neither=10),
        Pairs(both=10, only_first=0, only_second=0, neither=0),
    ):
        assert pairs.interval == pytest.approx((-3.8416 / 13.8416, 3.8416 / 13.8416))
        assert pairs.p_value == 1.0


def test_a_negative_correlation_is_not_corrected() -> None:
    # phi = (0 * 0 - 5 * 5) / sqrt(5 * 5 * 5 * 5) = -1: both distances add up. Wilson at 5 of 10: 0.5 +- 0.26341.
    pairs = Pairs(both=0, only_first=5, only_second=5, neither=0)
    assert pairs.interval == pytest.approx((-0.52681, 0.52681), abs=1e-4)


def test_a_small_positive_correlation_is_corrected_to_none() -> None:
    # 3 * 3 - 2 * 2 = 5 is half of the 10 pairs, so phi is 0, and the distances are those of independent rates.
    pairs = Pairs(both=3, only_first=2, only_second=2, neither=3)
    assert pairs.interval == pytest.approx((-math.hypot(0.26341, 0.26341), math.hypot(0.26341, 0.26341)), abs=1e-4)


def test_mcnemars_p_counts_tosses_of_a_coin() -> None:
    # 14 pairs differ, 2 of them for the second: 2 * (1 + 14 + 91) / 2^14
    assert mcnemar_p(Pairs(both=20, only_first=12, only_second=2, neither=16)) == 2 * (1 + 14 + 91) / 2**14
    assert mcnemar_p(Pairs(both=9, only_first=0, only_second=3, neither=0)) == 2 / 2**3
    assert mcnemar_p(Pairs(both=0, only_first=4, only_second=4, neither=0)) == 1.0, "never above 1"
    assert mcnemar_p(Pairs(both=0, only_first=4000, only_second=100, neither=0)) == 0.0, "far below the least float"


def test_pairs_are_counted_by_outcome() -> None:
    outcomes = [(True, True), (True, False), (True, False), (False, True), (False, False)]
    assert Pairs.of(outcomes) == Pairs(both=1, only_first=2, only_second=1, neither=1)
