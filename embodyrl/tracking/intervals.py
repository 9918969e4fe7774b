"""Confidence intervals: of a success rate, and of a mean over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist, fmean, stdev

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantile of Student's t distribution with 1 .. 10 degrees of freedom."""


def outcomes(said: Iterable[bool | None]) -> list[bool]:
    """Return which episodes were solved, of which the simulator said True, False or nothing (None). Where it said
    something of any, nothing means failure: some environments name success only when it comes. Empty: it never did."""
    found = list(said)
    return [] if all(each is None for each in found) else [bool(each) for each in found]


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a success rate, Wilson (1927), "Probable inference", with 95 % coverage at z = 1.96."""
    # Not the normal approximation, whose interval has width 0 at rates of 0 and 1, where evaluations often are.
    rate = successes / trials
    centre = rate + z * z / (2 * trials)
    margin = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)


def rate_text(successes: int, trials: int) -> str:
    """Return a success rate with its interval for people: `0.50 [0.40, 0.60]`."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(successes / trials, *wilson_interval(successes, trials))


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of a mean over seeds, by Student's t distribution; None for fewer than two
    values, which say nothing about others."""
    if len(values) < 2:
        return None
    margin = t_975(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - margin, fmean(values) + margin


def rate_interval(rates: Sequence[float], trials: Sequence[int]) -> tuple[float, float] | None:
    """Return the 95 % interval of a success rate over seeds: that of the mean, within 0 .. 1, but never narrower than
    Wilson's of all episodes together, since seeds may agree by chance (and do so at rates of 0 and 1).

    Args:
        rates: of each seed; one is judged by its episodes alone, and None is returned without any.
        trials: episodes of each seed, at least one.
    """
    if not rates:
        return None
    successes = sum(round(rate * count) for rate, count in zip(rates, trials, strict=True))
    low, high = wilson_interval(successes, sum(trials))
    over_seeds = mean_interval(rates) or (low, high)
    return max(0.0, min(low, over_seeds[0])), min(1.0, max(high, over_seeds[1]))


def t_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution: by table up to 10 degrees of freedom, beyond that by the
    expansion of Abramowitz and Stegun (1964), 26.7.5, to two terms, which is right to 0.002."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4.0, (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    return z + first / freedom + second / freedom**2
