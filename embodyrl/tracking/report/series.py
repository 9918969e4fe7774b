"""Curves of runs as numbers, for charts on pages and in figures alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from embodyrl.runs.record import EvaluationRecord, RunRecord

MARKED = 15
"""Points of a line up to which each has a mark."""
MOST_POINTS = 500
"""Points of a line; of longer runs a point is the mean of several iterations."""
MOST_LETTERS = 56
"""Of a name in a legend."""
SMOOTHED = 0.04
"""Width of the window of a running mean, as a share of the run."""
COLOURS = ("#3b82f6", "#e0721c", "#1f9d55", "#9a5bd6", "#c99700", "#0f9fa8", "#d6478f", "#8a94a6")
"""Of lines; all differ visibly from white and from dark blue, and neighbours from each other for the colour-blind."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line with or without a band, or points with or without error bars."""

    name: str
    """In the legend."""
    x: Sequence[float]
    y: Sequence[float]
    iterations: Sequence[int]
    """Of each point."""
    minutes: Sequence[float] = ()
    """Wall clock of each point [min]; empty: it is not known."""
    low: Sequence[float] = ()
    """Of the band or the error bars; empty: none."""
    high: Sequence[float] = ()
    points: bool = False
    """Points with error bars instead of a line with a band."""
    faint: bool = False
    """Single values behind their running mean."""
    colour: int = 0
    """Index of `COLOURS`."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A diagram: metrics over env steps."""

    title: str
    metrics: Mapping[str, str]
    """Names of metrics, and what the legend calls them."""
    note: str = ""
    percent: bool = False
    """Values are shares of 1."""
    whole: bool = False
    """The vertical axis goes from 0 to 1 whatever the values are."""
    smooth: bool = False
    """Draw a running mean over the single values."""
    recent: str = ""
    """Metric that is such a mean already, over the newest episodes; empty, or not in the run: none."""
    evaluated: str = ""
    """Metric of evaluations, which are drawn as points; empty: none."""
    section: str = "learning"


TRAINING = "training"
CURVES = (
    Curve(
        title="Success",
        metrics={"env/success_once": TRAINING},
        recent="env/success_recent",
        note="Points: evaluations on held-out start states, with 95 % Wilson intervals. Line: episodes of training, in "
        "which the policy explores.",
        percent=True,
        whole=True,
        smooth=True,
        evaluated="eval/success_once",
        section="results",
    ),
    Curve(
        title="Return",
        metrics={"env/return": TRAINING},
        recent="env/return_recent",
        note="Mean sum of an episode's rewards, not discounted. Points: evaluations.",
        smooth=True,
        evaluated="eval/return",
        section="results",
    ),
    Curve(
        title="Episode length [control steps]",
        metrics={"env/episode_length": TRAINING},
        smooth=True,
        evaluated="eval/episode_length",
        section="results",
    ),
    Curve(
        title="Policy loss",
        metrics={"train/policy_loss": "policy", "train/actor_loss": "policy, by its critics"},
        smooth=True,
    ),
    Curve(
        title="Value loss",
        metrics={"train/value_loss": "critic", "train/critic_loss": "critics of the replay"},
        smooth=True,
    ),
    Curve(title="Supervised loss", metrics={"train/loss": "demonstrations"}, smooth=True),
    Curve(
        title="Entropy [nats]",
        metrics={"train/entropy": "entropy"},
        smooth=True,
        note="How much the policy explores; near the lowest possible value nothing new is tried.",
    ),
    Curve(
        title="KL divergence [nats]",
        metrics={"train/approx_kl": "of an update", "train/reference_kl": "from the reference policy"},
        smooth=True,
        note="How far an iteration moves the policy from the one that collected.",
    ),
    Curve(
        title="Clipped share", metrics={"train/clip_fraction": "chunks with a clipped ratio"}, percent=True, smooth=True
    ),
    Curve(
        title="Explained variance",
        metrics={"train/explained_variance": "of the critic"},
        smooth=True,
        note="1: the critic knows every return; 0: it knows no more than their mean.",
    ),
    Curve(title="Learning rate", metrics={"train/learning_rate": "learning rate"}),
    Curve(title="Gradient norm", metrics={"train/grad_norm": "before clipping"}, smooth=True),
    Curve(title="Values of decisions (Q)", metrics={"train/q": "mean", "train/q_max": "largest"}),
    Curve(title="Temperature", metrics={"train/temperature": "weight of the entropy"}),
    Curve(
        title="Lag of rollouts [updates]",
        metrics={"async/lag_mean": "mean", "async/lag_max": "largest"},
    ),
    Curve(
        title="Env steps per second", metrics={"time/env_steps_per_s": "learning included"}, section="time", smooth=True
    ),
)


def curves_of(run: RunRecord, curve: Curve) -> list[Series]:
    """Return what a run has of a diagram."""
    found: list[Series] = []
    for metric, name in curve.metrics.items():
        single = _binned(points_of(run, metric), name, colour=len(found) % len(COLOURS))
        if single is None:
            continue
        window = window_of(curve, len(single.x))
        recent = _binned(points_of(run, curve.recent), f"{name}, newest episodes", single.colour)
        if recent is not None:
            found += [_with(single, faint=True, name=""), recent]
        elif window > 1:
            found.append(_with(single, faint=True, name=""))
            found.append(_with(single, y=running_mean(single.y, window), name=f"{name}, mean of {window}"))
        else:
            found.append(single)
    if curve.evaluated and (points := evaluated(run.evaluations, curve.evaluated, run.x_key)) is not None:
        found.append(points)
    return [timed(each, [run]) for each in found]


def window_of(curve: Curve, points: int) -> int:
    """Return the width of a diagram's running mean over so many points; 1: it has none."""
    return max(1, round(SMOOTHED * points)) if curve.smooth else 1


def timed(series: Series, runs: Sequence[RunRecord]) -> Series:
    """Return a series with the wall clock of its points, the mean of runs; as it is if not all runs know it."""
    clocks = [run.minutes for run in runs]
    if not all(iteration in clock for iteration in series.iterations for clock in clocks):
        return series
    return _with(series, minutes=[fmean(clock[iteration] for clock in clocks) for iteration in series.iterations])


def points_of(run: RunRecord, metric: str) -> list[tuple[float, float, int]]:
    """Return `(x, value, iteration)` of every row that has the metric."""
    return [
        (float(row.get(run.x_key) or 0.0), float(row[metric]), row["iteration"])
        for row in run.rows
        if row.get(metric) is not None
    ]


def evaluated(
    evaluations: Sequence[EvaluationRecord], metric: str, x_key: str, colour: int = 1, name: str = "evaluations"
) -> Series | None:
    """Return the points of evaluations, of the success rate with its intervals."""
    evaluations = [each for each in evaluations if metric in each.metrics]
    if not evaluations:
        return None
    is_rate = metric == "eval/success_once"
    return Series(
        name=name,
        x=[each.env_steps if x_key != "iteration" else float(each.iteration) for each in evaluations],
        y=[float(each.metrics[metric]) for each in evaluations],
        iterations=[each.iteration for each in evaluations],
        low=[each.metrics["eval/success_low"] for each in evaluations] if is_rate else (),
        high=[each.metrics["eval/success_high"] for each in evaluations] if is_rate else (),
        points=True,
        colour=colour,
    )


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of up to `window` values around each."""
    before, after = (window - 1) // 2, window // 2
    return [fmean(values[max(0, at - before) : at + after + 1]) for at in range(len(values))]


def mean_of(runs: Sequence[Sequence[tuple[float, float, int]]], name: str, **style: Any) -> Series | None:
    """Return the mean of runs' points at each iteration, with the smallest and the largest as its band. Iterations that
    not all runs have, because some ended earlier, are left out."""
    by_iteration = [{iteration: (x, value) for x, value, iteration in points} for points in runs]
    shared = sorted(set.intersection(*map(set, by_iteration))) if by_iteration else []
    if not shared:
        return None
    values = [[points[iteration][1] for points in by_iteration] for iteration in shared]
    return Series(
        name=name,
        x=[fmean(points[iteration][0] for points in by_iteration) for iteration in shared],
        y=[fmean(each) for each in values],
        iterations=shared,
        low=[min(each) for each in values] if len(runs) > 1 else (),
        high=[max(each) for each in values] if len(runs) > 1 else (),
        **style,
    )


def short(name: str) -> str:
    """Return a name that fits into a legend."""
    return name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"


def _binned(points: Sequence[tuple[float, float, int]], name: str, colour: int) -> Series | None:
    if not points:
        return None
    size = math.ceil(len(points) / MOST_POINTS)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return Series(
        name=name if size == 1 else f"{name}, means of {size} iterations",
        x=[group[-1][0] for group in groups],
        y=[fmean(value for _, value, _ in group) for group in groups],
        iterations=[group[-1][2] for group in groups],
        colour=colour,
    )


def _with(series: Series, **changes: Any) -> Series:
    return Series(**(vars(series) | changes))
