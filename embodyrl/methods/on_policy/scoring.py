"""Log-probs that a rollout did not record: under the reference policy, and under the one that an update starts from.

Shapes: `M` chunks of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodyrl.config.schema import OldLogprobs, Proximal
from embodyrl.engine.minibatch import Columns, Drawn, length
from embodyrl.models.policy import Policy

if TYPE_CHECKING:  # a learner scores
    from embodyrl.methods.on_policy.learner import OnPolicyLearner


def add_logprobs(learner: OnPolicyLearner, columns: Columns, task_descriptions: Sequence[str], drawn: Drawn) -> None:
    """Add the log-probs that the loss needs and the rollout did not record.

    Args:
        learner: whose settings say which.
        columns: of the batch `[M, ...]`; gets `reference_logprobs` and `proximal_logprobs`, and `old_logprobs` anew.
        task_descriptions: those that the column `task_index` refers to.
        drawn: minibatches of the first epoch.
    """
    engine, settings = learner.engine, learner.algorithm
    if engine.reference is not None:
        with engine.offload.reference_here(), engine.reference.scoring() as reference:
            most = -(-length(columns) // settings.minibatches)  # no more memory than a minibatch needs
            parts = engine.micro_batches.of(numbered(columns), whole=False, most=most)
            columns["reference_logprobs"] = _score(learner, reference, parts, columns, task_descriptions)
    if learner.loss.takes("proximal_logprobs") and settings.proximal is Proximal.recompute:
        columns["proximal_logprobs"] = _score_as_learned(learner, columns, task_descriptions, drawn)
    if settings.old_logprobs is OldLogprobs.recompute:
        # Chunks of earlier policies keep the rollout's log-probs: the weights that chose them are gone.
        again = _score_as_learned(learner, columns, task_descriptions, drawn)
        is_new = (columns["version"] == engine.version).view(-1, *[1] * (again.dim() - 1))
        columns["old_logprobs"] = torch.where(is_new, again, columns["old_logprobs"])


@torch.no_grad()
def _score(
    learner: OnPolicyLearner,
    policy: Policy,
    parts: Iterable[tuple[Columns, bool]],
    columns: Columns,
    task_descriptions: Sequence[str],
) -> Tensor:
    """Return the log-probs of the batch's chunks under a policy, at the level of the loss. Every chunk is in one of the
    `parts` of the numbered batch, see `MicroBatches.of`."""
    found = torch.zeros_like(columns["old_logprobs"])
    for part, counts in parts:
        logprobs, _ = learner.logprobs(policy, part, task_descriptions)
        if counts:
            found[part["number"]] = logprobs
    # Every rank has filled the rows of its own parts and left 0 in the others.
    return learner.ranks.sum(found)


def _score_as_learned(
    learner: OnPolicyLearner, columns: Columns, task_descriptions: Sequence[str], drawn: Drawn
) -> Tensor:
    """Return the log-probs under the policy that the update starts from, computed in the micro-batches of the first
    epoch. A forward pass rounds differently with another batch size; in the same one the ratio is exactly 1."""
    parts = (
        part
        for minibatch, _ in learner.minibatches(numbered(columns), drawn)
        for part in learner.engine.micro_batches.of(minibatch, whole=learner.whole_episodes)
    )
    return _score(learner, learner.policy, parts, columns, task_descriptions)


def numbered(columns: Columns) -> Columns:
    """Return the columns with one more, `number`, so that results of shuffled parts find their row again."""
    return columns | {"number": torch.arange(length(columns), device=columns["version"].device)}
