"""Rewards to learn from in place of the simulator's own, and filters of groups.

Shapes: `K` chunks, `B` slots, `C` actions; every reward is `[K, B, C]`. With whole episodes a slot is an episode.
`E` numbers of an embedding; `P` groups of `G` episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from embodyrl.algorithms.advantages import mean, variance
from embodyrl.algorithms.columns import Bound, OutputError, function_name, in_chunks, in_time, require_output
from embodyrl.algorithms.options import Pays
from embodyrl.config.schema import Compat, FilterMetric
from embodyrl.seeding import derive_seed

SIIRL_RADIUS = 0.5
"""Largest distance of neighbours with `compat: siirl` [standard deviations]."""
RADIUS_SHARE = 0.5
"""The same otherwise, as a share of the root mean square distance between successes."""
MIN_NEIGHBOURS = 2
"""Points, itself included, that make a point the core of a cluster."""
NOISE = -1
"""Number of the cluster of points that belong to none."""
MIN_RANGE = 1e-6
"""Distances that differ by less count as equal."""
SMALL = 8
"""Images are averaged down to this many pixels each way."""


def rewards_by(reward: Bound[Tensor], columns: Mapping[str, Any]) -> Tensor:
    """Return the values of a registered reward, `[K, B, C]`.

    Args:
        reward: the function.
        columns: of a batch, `executed` among them.

    Raises:
        OutputError: it does not return one number for every action.
    """
    return require_output(
        f"reward {function_name(reward.function)} returned rewards",
        reward(columns),
        columns["executed"],
        "[K, B, C]: return a reward for every action (docs/algorithms.md)",
    )


def groups_by(keeps: Bound[Tensor], columns: Mapping[str, Tensor]) -> Tensor:
    """Return which groups a registered filter keeps, bool `[P]`.

    Args:
        keeps: the function.
        columns: `[P, G]` each.

    Raises:
        OutputError: it does not return one bool for every group.
    """
    what, remedy = f"filter {function_name(keeps.function)} returned groups", "[P]: return one bool for every group"
    kept = require_output(what, keeps(columns), columns["played"].any(1), remedy)
    if kept.dtype is not torch.bool:
        raise OutputError(f"{what} of type {kept.dtype}, expected bool, True for those to keep")
    return kept


def dense(*, rewards: Tensor) -> Tensor:
    """Return the simulator's own rewards `[K, B, C]`."""
    return rewards


def success(*, success: Tensor, executed: Tensor) -> Tensor:
    """Reward of 1 for the action of an episode after which the task was solved for the first time.

    Args:
        success: bool `[K, B, C]`. executed: bool `[K, B, C]`.
    """
    solved = in_time(success & executed)
    first = solved & (solved.cumsum(0) == 1)
    return in_chunks(first.float(), success.shape[2])


def classifier(*, judged: Tensor, path: str | None, threshold: float, ends_episodes: bool) -> Tensor:
    """Reward of 1 for the action of an episode after which a classifier took it for solved for the first time.

    Args:
        judged: bool `[K, B, C]`, that action; see `rollout.judging`, which reads the other arguments.
    """
    return judged.float()


def progress(*, progress: Tensor, path: str | None, pays: Pays) -> Tensor:
    """Reward for progress that a learned predictor sees, at the last action of each chunk.

    Args:
        progress: `[K, B, C]`, what is paid; see `rollout.judging`, which reads the other arguments.
    """
    return progress


def asked(*, answers: Tensor) -> Tensor:
    """Reward that somebody was asked for, at the last action of each episode.

    Args:
        answers: `[K, B, C]`, 0 .. 1; see `rollout.asking`.
    """
    return answers


def disagreement(answers: Tensor, success: Tensor, executed: Tensor) -> tuple[int, int]:
    """Return in how many whole episodes an answer of 0.5 or more means another end than the simulator's success, and of
    how many.

    Args:
        answers: `[K, B, C]`. success, executed: bool `[K, B, C]`.
    """
    said = answers.sum((0, 2)) >= 0.5
    solved, played = (success & executed).any(2).any(0), executed.any(2).any(0)
    return int(((said != solved) & played).sum()), int(played.sum())


def difference(*, rewards: Tensor, executed: Tensor) -> Tensor:
    """Each action's reward minus that of the action before (0 before the first), so that an episode's sum is its last
    reward: a reward that measures progress becomes one for making progress. In float64, where that sum is exact:
    rounded to float32, episodes with the same last reward would differ.

    Args:
        rewards: `[K, B, C]`. executed: bool `[K, B, C]`.
    """
    now = in_time(rewards.double())
    before = torch.cat([torch.zeros_like(now[:1]), now[:-1]])
    return torch.where(executed, in_chunks(now - before, rewards.shape[2]), 0.0)


def srpo(
    *,
    success: Tensor,
    executed: Tensor,
    task_index: Tensor,
    embeddings: Tensor,
    scale: float,
    steepness: float,
    compat: Compat,
) -> Tensor:
    """Self-referential policy optimisation, Fei et al. (2025), arXiv:2511.15605: an episode's score, at its last
    action; see `progress_scores`.

    Args:
        success, executed: bool `[K, B, C]`.
        task_index: `[K, B]`, number of the task.
        embeddings: `[B, E]`, one per episode.
        scale, steepness, compat: see `progress_scores`.
    """
    acted = in_time(executed)
    solved = in_time(success & executed).any(0)
    scores = progress_scores(embeddings, solved, task_index[0], scale=scale, steepness=steepness, compat=compat)
    last = acted & (acted.cumsum(0) == acted.sum(0))
    return in_chunks(last * scores, success.shape[2])


# ---- how close failed episodes came to successful ones
#
# Formulas: Fei et al. (2025), "SRPO: self-referential policy optimization", arXiv:2511.15605, as siiRL computes them.


def progress_scores(
    embeddings: Tensor, success: Tensor, task_index: Tensor, *, scale: float, steepness: float, compat: Compat
) -> Tensor:
    """Score, float32 `[B]`, of each episode, among the episodes of its task.

    1 for a success; for a failure scale * sigmoid(steepness * (0.5 - n)), n being its distance to the nearest kind of
    success, scaled to 0 .. 1 over the task's failures (0.5 where they do not differ). Where a task has no success, or
    no failure, there is nothing to compare: 1 and 0. An episode without embedding (all 0) gets 0.

    Args:
        embeddings: `[B, E]`. success: bool `[B]`. task_index: `[B]`.
        compat: how successes are clustered into kinds, see `success_centres`.
    """
    embeddings = embeddings.double()  # failures that are equally far would else differ by more than MIN_RANGE
    known = embeddings.abs().sum(1) > 0
    scores = (success & known).float()
    for number in task_index.unique():
        here = known & (task_index == number)
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

    siiRL searches neighbours within 0.5. Scaled points have a distance of sqrt(2 E) (root mean square), 53 for the 1408
    numbers of its video model, so that it never finds any. Here neighbours lie within half the root mean square
    distance of the points themselves, for any `E`.
    """
    points = successes.double()
    spread = variance(points, unbiased=False).sqrt()
    scaled = (points - mean(points)) / torch.where(spread > 0, spread, 1.0)
    labels = dbscan(scaled, SIIRL_RADIUS if compat is Compat.siirl else RADIUS_SHARE * _typical_distance(scaled))
    clusters = [mean(points[labels == label]) for label in labels.unique() if label != NOISE]
    return torch.stack(clusters or [mean(points)]).to(successes.dtype)


def _distances(left: Tensor, right: Tensor) -> Tensor:
    """Return the distances `[S, R]` between the points of `[S, E]` and `[R, E]`, without the matrix product
    that loses digits."""
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")


def _typical_distance(points: Tensor) -> float:
    """Return the root mean square distance between two of the points `[S, E]`; 0 for a single one."""
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


# ---- from the observations of an episode to one vector: `F` frames in time, `E` numbers


def random_projection(images: Tensor | None, proprio: Tensor | None, *, dim: int) -> Tensor:
    """Gaussian random projection, which keeps distances (Johnson and Lindenstrauss 1984); the same in every run.

    Args:
        images: uint8 `[F, V, H, W, 3]` or None. proprio: float32 `[F, S]` or None. dim: `E`.

    Returns:
        float32 `[E]` on the CPU.
    """
    parts = []
    if proprio is not None:
        parts.append(proprio.flatten())
    if images is not None:
        images = images.flatten(0, 1).permute(0, 3, 1, 2).float() / 255.0
        parts.append(adaptive_avg_pool2d(images, SMALL).flatten())
    features = torch.cat(parts).cpu()
    generator = torch.Generator().manual_seed(derive_seed(0, "projection", len(features)))
    projected: Tensor = torch.randn(dim, len(features), generator=generator) @ features / len(features) ** 0.5
    return projected


# ---- which groups are worth learning from
#
# Filters read the simulator's own results, before any shaping. An episode that was lost (`played` is False) counts in
# none of them.


def none(*, played: Tensor) -> Tensor:
    """Keep every group of which an episode is left."""
    return played.any(1)


def zero_variance(*, success: Tensor, total_reward: Tensor, played: Tensor, metric: FilterMetric) -> Tensor:
    """Keep groups whose episodes differ; advantages of the others are 0 (Yu et al. 2025, arXiv:2503.14476, eq. 11).

    Args:
        success: bool `[P, G]`, the task was solved at least once. total_reward: `[P, G]`, sum of the simulator's own
        rewards. played: bool `[P, G]`. metric: which of the two has to differ.
    """
    outcomes = success.float() if metric is FilterMetric.success else total_reward
    highest = outcomes.masked_fill(~played, -torch.inf).amax(1)
    lowest = outcomes.masked_fill(~played, torch.inf).amin(1)
    return highest > lowest


def accuracy(*, success: Tensor, played: Tensor, accuracy_low: float, accuracy_high: float) -> Tensor:
    """Keep groups whose success rate is `accuracy_low` .. `accuracy_high`, both included (Cui et al. 2025,
    arXiv:2502.01456, section 3.3: neither too hard nor too easy)."""
    rate = (success & played).sum(1) / played.sum(1).clamp(min=1)
    return played.any(1) & (rate >= accuracy_low) & (rate <= accuracy_high)
