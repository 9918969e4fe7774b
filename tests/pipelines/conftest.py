"""Stages that work on a small batch, without simulators and policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from embodyrl.pipelines.pipeline import Iteration, Pipeline, Stage
from embodyrl.rollout.batch import TrajectoryBatch

K, B, C = 3, 4, 1


def batch_of(k: int = K, b: int = B) -> TrajectoryBatch:
    """The columns that every rollout has."""
    numbers = {name: torch.zeros(k, b, dtype=torch.int64) for name in ("task_index", "episode", "group", "version")}
    flags = {name: torch.zeros(k, b, dtype=torch.bool) for name in ("terminated", "truncated")}
    return TrajectoryBatch(
        {
            **numbers,
            **flags,
            "steps": torch.ones(k, b, dtype=torch.int64),
            "valid": torch.ones(k, b, dtype=torch.bool),
            "actions": torch.zeros(k, b, C, 2),
            "logprobs": torch.zeros(k, b, 2),
            "rewards": torch.ones(k, b, C),
            "success": torch.zeros(k, b, C, dtype=torch.bool),
            "trace": {"sample": torch.zeros(k, b, 2)},
        },
        ["wave"],
    )


COLUMNS = tuple(batch_of().columns())


def begin(iteration: Iteration) -> None:
    """Put a batch there."""
    iteration.batch = batch_of()


@pytest.fixture
def run() -> Callable[..., Iteration]:
    """Runs stages once; returns the iteration."""

    def run_once(*stages: Stage) -> Iteration:
        iteration = Iteration(config=None, learner=None, collector=None, engine=None)  # type: ignore[arg-type]
        Pipeline(stages).run(iteration)
        return iteration

    return run_once
