from __future__ import annotations

import pytest

from embodyrl.tracking.intervals import mean_interval, rate_interval, t_975, wilson_interval


def test_the_mean_over_seeds_has_the_interval_of_students_t() -> None:
    # By hand: mean 0.8, deviations -0.1, 0, 0.1, standard deviation 0.1; 4.303 * 0.1 / sqrt(3) = 0.2484.
    assert mean_interval([0.7, 0.8, 0.9]) == pytest.approx((0.5516, 1.0484), abs=1e-4)
    assert mean_interval([0.7]) is None
    assert [t_975(n) for n in (10, 11, 20, 60)] == pytest.approx([2.228, 2.201, 2.086, 2.000], abs=0.003)


def test_seeds_that_agree_have_the_interval_of_their_episodes() -> None:
    assert rate_interval([1.0, 1.0], [10, 10]) == pytest.approx(wilson_interval(20, 20))
    assert rate_interval([0.8], [50]) == pytest.approx(wilson_interval(40, 50))
    assert rate_interval([0.7, 0.8, 0.9], [100, 100, 100]) == pytest.approx((0.5516, 1.0), abs=1e-4)
    assert rate_interval([], []) is None
