"""Statistics of paired episodes: two evaluations that played the same initial states."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from embodyrl.tracking.intervals import wilson_interval

Z = 1.96
"""Quantile of the normal distribution for 95 % coverage, as in `wilson_interval`."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Episodes that two evaluations both played, by outcome: the cells of a 2 x 2 table."""

    both: int
    """Solved in both."""
    only_first: int
    only_second: int
    neither: int

    @classmethod
    def of(cls, outcomes: Iterable[tuple[bool, bool]]) -> Self:
        """Count pairs of outcomes (solved in the first, in the second)."""
        found = list(outcomes)
        return cls(
            both=found.count((True, True)),
            only_first=found.count((True, False)),
            only_second=found.count((False, True)),
            neither=found.count((False, False)),
        )

    @property
    def count(self) -> int:
        """Number of pairs."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """Success rate of the second minus that of the first, -1 .. 1."""
        return (self.only_second - self.only_first) / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the difference."""
        return newcombe_interval(self)

    @property
    def p_value(self) -> float:
        """See `mcnemar_p`."""
        return mcnemar_p(self)


def newcombe_interval(pairs: Pairs, z: float = Z) -> tuple[float, float]:
    """Confidence interval of the difference (second minus first) of two paired success rates, with 95 % coverage at
    z = 1.96.

    Method 10 of Newcombe (1998), "Improved confidence intervals for the difference between binomial proportions based
    on paired data", Statistics in Medicine 17, 2635-2650: Wilson's intervals of both rates, combined with the
    correlation phi of the outcomes, whose numerator is corrected for continuity.

    Args:
        pairs: at least one.
        z: quantile of the normal distribution.
    """
    count = pairs.count
    first, second = pairs.both + pairs.only_first, pairs.both + pairs.only_second
    low_1, high_1 = wilson_interval(first, count, z)
    low_2, high_2 = wilson_interval(second, count, z)
    below_1, above_1 = first / count - low_1, high_1 - first / count
    below_2, above_2 = second / count - low_2, high_2 - second / count
    phi = _correlation(pairs)
    # max: rounding can make the root of a perfect correlation slightly negative
    below = math.sqrt(max(0.0, below_2**2 - 2 * phi * below_2 * above_1 + above_1**2))
    above = math.sqrt(max(0.0, above_2**2 - 2 * phi * above_2 * below_1 + below_1**2))
    return max(-1.0, pairs.difference - below), min(1.0, pairs.difference + above)


def _correlation(pairs: Pairs) -> float:
    """Return phi of method 10; 0 where a row or a column of the table is empty."""
    first, second = pairs.both + pairs.only_first, pairs.both + pairs.only_second
    scale = math.sqrt(first * (pairs.count - first) * second * (pairs.count - second))
    product = float(pairs.both * pairs.neither - pairs.only_first * pairs.only_second)
    if product > 0:
        product = max(0.0, product - pairs.count / 2)
    return product / scale if scale else 0.0


def mcnemar_p(pairs: Pairs) -> float:
    """Exact two-sided p-value of McNemar (1947), "Note on the sampling error of the difference between correlated
    proportions or percentages", Psychometrika 12, 153-157: if both succeed equally often, each pair that differs is a
    toss of a fair coin. 1 without such pairs."""
    differing = pairs.only_first + pairs.only_second
    fewer = min(pairs.only_first, pairs.only_second)
    tail = sum(math.comb(differing, number) for number in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**differing))
