from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embodyrl.rollout.batch import BatchError, TrajectoryBatch


def columns(k: int = 2, b: int = 3) -> dict[str, Tensor | dict[str, Tensor]]:
    flags = {name: torch.zeros(k, b, dtype=torch.bool) for name in ("terminated", "truncated", "valid")}
    numbers = {name: torch.zeros(k, b, dtype=torch.int64) for name in ("task", "steps", "episode", "group", "version")}
    return {
        **flags,
        **numbers,
        "actions": torch.zeros(k, b, 4, 7),
        "logprobs": torch.zeros(k, b, 28),
        "rewards": torch.zeros(k, b, 4),
        "success": torch.zeros(k, b, 4, dtype=torch.bool),
        "trace": {"sample": torch.arange(k * b).view(k, b, 1)},
    }


def test_decisions_are_flattened_in_order() -> None:
    batch = TrajectoryBatch(columns(), ["push"])
    flat = batch.decisions("trace", "valid")
    assert flat.shape == (6,) and flat["trace", "sample"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rewards", torch.zeros(2, 3), r"'rewards' has shape \(2, 3\), expected 3 dimensions starting with \(2, 3\)"),
        ("logprobs", torch.zeros(2, 3, 4, 7), "'logprobs' has shape .* expected 3 dimensions"),
        ("values", torch.zeros(3, 2), r"'values' has shape \(3, 2\), expected 2 dimensions starting with \(2, 3\)"),
    ],
)
def test_a_wrong_shape_names_column_got_and_want(name: str, value: Tensor, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        TrajectoryBatch(columns() | {name: value}, ["push"])
    batch = TrajectoryBatch(columns(), ["push"])
    with pytest.raises(BatchError, match=message):
        batch[name] = value


def test_missing_columns_are_named() -> None:
    incomplete = columns()
    del incomplete["rewards"], incomplete["episode"]
    with pytest.raises(BatchError, match="missing from the batch: rewards, episode"):
        TrajectoryBatch(incomplete, ["push"])
    with pytest.raises(BatchError, match="has no column 'advantages'"):
        TrajectoryBatch(columns(), ["push"])["advantages"]
