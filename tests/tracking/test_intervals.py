from __future__ import annotations

import pytest

from embodyrl.tracking.intervals import mean_interval, t_975


def test_the_mean_over_seeds_has_the_interval_of_students_t() -> None:
    # By hand: mean 0.8, deviations -0.1, 0, 0.1, standard deviation 0.1; 4.303 * 0.1 / sqrt(3) = 0.2484.
    assert mean_interval([0.7, 0.8, 0.9]) == pytest.approx((0.5516, 1.0484), abs=1e-4)
    assert mean_interval([0.7]) is None
    assert [t_975(n) for n in (10, 11, 20, 60)] == pytest.approx([2.228, 2.201, 2.086, 2.000], abs=0.003)
