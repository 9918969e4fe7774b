"""How close failed episodes came to successful ones. Shapes: `B` episodes, `E` numbers of an embedding.

Formulas: Fei et al. (2025), "SRPO: self-referential policy optimization", arXiv:2511.15605, as siiRL computes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.algorithms.moments import mean, variance
from embodyrl.config.schema import Compat

SIIRL_RADIUS = 0.5
RADIUS_SHARE = 0.5
MIN_NEIGHBOURS = 2
"""Points, itself included, that make a point the core of a cluster."""
NOISE = -1
MIN_RANGE = 1e-6


def progress_scores(
    embeddings: Tensor, success: Tensor, task: Tensor, *, scale: float, steepness: float, compat: Compat
) -> Tensor:
    """Score, float32 `[B]`, of each episode, among the episodes of its task.

    1 for a success; for a failure scale * sigmoid(steepness * (0.5 - n)), n being its distance to the nearest kind of
    success, scaled to 0 .. 1 over the task's failures (0.5 where they do not differ). Where a task has no success, or
    no failure, there is nothing to compare: 1 and 0. An episode without embedding (all 0) gets 0.

    Args:
        embeddings: `[B, E]`. success: bool `[B]`. task: `[B]`.
        compat: how successes are clustered into kinds, see `success_centres`.
    """
    embeddings = embeddings.double()  # failures that are equally far would else differ by more than MIN_RANGE
    known = embeddings.abs().sum(1) > 0
    scores = (success & known).float()
    for number in task.unique():
        here = known & (task == number)
        solved, failed = here & success, here & ~success
        if solved.any() and failed.any():
            centres = success_centres(embeddings[solved], compat)
            distances = _distances(embeddings[failed], centres).amin(1)
            scores[failed] = (scale * torch.sigmoid(steepness * (0.5 - _unit_range(distances)))).float()
    return scores


def _unit_range(distances: Tensor) -> Tensor:
    lowest, highest = distances.amin(), distances.amax()
    if highest - lowest < MIN_RANGE:
        return torch.full_like(distances, 0.5)
    return (distances - lowest) / (highest - lowest)


def success_centres(successes: Tensor, compat: Compat) -> Tensor:
    """Centres `[*, E]` of the kinds of success among `[S, E]`: the means of their clusters, after each coordinate was
    scaled to standard deviation 1; the mean of all where there is no cluster.

    siiRL looks for neighbours within 0.5. Scaled points lie sqrt(2 E) apart (root mean square), 53 for the 1408 numbers
    of its video model, so that it never finds any. Here neighbours lie within half the root mean square distance of the
    points themselves, whatever `E` is.
    """
    points = successes.double()
    spread = variance(points, unbiased=False).sqrt()
    scaled = (points - mean(points)) / torch.where(spread > 0, spread, 1.0)
    labels = dbscan(scaled, SIIRL_RADIUS if compat is Compat.siirl else RADIUS_SHARE * _typical_distance(scaled))
    clusters = [mean(points[labels == label]) for label in labels.unique() if label != NOISE]
    return torch.stack(clusters or [mean(points)]).to(successes.dtype)


def _distances(left: Tensor, right: Tensor) -> Tensor:
    """Between the points of `[S, E]` and `[R, E]`, without the shortcut that loses digits."""
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")


def _typical_distance(points: Tensor) -> float:
    """Root mean square distance between two of the points `[S, E]`; 0 for a single one."""
    count = len(points)
    return float((_distances(points, points).square().sum() / max(count * (count - 1), 1)).sqrt())


def dbscan(points: Tensor, radius: float) -> Tensor:
    """Density-based clustering, Ester et al. (1996): number `[S]` of each point's cluster, -1 for noise.

    A point with `MIN_NEIGHBOURS` points within `radius` is a core; cores within reach of each other and all points
    within reach of one form a cluster.

    Args:
        points: `[S, E]`. radius: largest distance of neighbours.
    """
    near = _distances(points, points) <= radius
    core = near.sum(1) >= MIN_NEIGHBOURS
    labels = torch.full((len(points),), NOISE)
    for start in range(len(points)):
        if core[start] and labels[start] == NOISE:
            members = torch.zeros(len(points), dtype=torch.bool)
            members[start] = True
            while True:  # at most S times: every round adds a point
                reached = members | near[members & core].any(0)
                if torch.equal(reached, members):
                    break
                members = reached
            labels[members & (labels == NOISE)] = labels.amax() + 1
    return labels
