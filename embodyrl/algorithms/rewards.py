"""What is learned from, instead of the simulator's own reward. Shapes: `K` decisions, `B` slots, `C` actions; every
result is `[K, B, C]`. With whole episodes a slot is an episode."""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.algorithms.levels import in_chunks, in_time
from embodyrl.algorithms.progress import progress_scores
from embodyrl.config.schema import Compat


def dense(*, rewards: Tensor) -> Tensor:
    """The simulator's own rewards `[K, B, C]`."""
    return rewards


def success(*, success: Tensor, executed: Tensor) -> Tensor:
    """1 for the action of an episode after which the task was solved for the first time.

    Args:
        success: bool `[K, B, C]`. executed: bool `[K, B, C]`.
    """
    solved = in_time(success & executed)
    first = solved & (solved.cumsum(0) == 1)
    return in_chunks(first.float(), success.shape[2])


def difference(*, rewards: Tensor, executed: Tensor) -> Tensor:
    """Each action's reward less that of the action before (0 before the first), so that an episode's sum is its last
    reward: a reward that says how far the task has come becomes one for coming farther. In float64, where that sum is
    exact: float32 would tell episodes with the same last reward apart by rounding.

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
    task: Tensor,
    embeddings: Tensor,
    scale: float,
    steepness: float,
    compat: Compat,
) -> Tensor:
    """Self-referential policy optimisation, Fei et al. (2025), arXiv:2511.15605: an episode's score, at its last
    action; see `progress.progress_scores`.

    Args:
        success, executed: bool `[K, B, C]`.
        task: `[K, B]`, number of the task sentence.
        embeddings: `[B, E]`, one per episode.
        scale, steepness, compat: see `progress_scores`.
    """
    acted = in_time(executed)
    solved = in_time(success & executed).any(0)
    scores = progress_scores(embeddings, solved, task[0], scale=scale, steepness=steepness, compat=compat)
    last = acted & (acted.cumsum(0) == acted.sum(0))
    return in_chunks(last * scores, success.shape[2])
