"""Rollouts that one process hands over to others, of its machine and of other ones."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from embodyrl.engine.parallel import Ranks
from embodyrl.placement.transport.lending import MemoryServer
from embodyrl.placement.transport.line import LineError
from embodyrl.placement.transport.segment import MemoryGone
from embodyrl.rollout.batch import COLUMNS, TrajectoryBatch, leaves
from embodyrl.rollout.episodes import FinalObservations, Rollout
from embodyrl.rollout.handing import SharedColumns, SharedRollout, map_rollout
from embodyrl.rollout.spread import is_large, share_here, shares_here

K, B = 3, 4


@pytest.fixture
def server() -> Iterator[MemoryServer]:
    with MemoryServer("127.0.0.3") as server:
        yield server


def rollout(columns: SharedColumns) -> Rollout:
    """One whose images were collected in the memory, and whose small columns were not."""
    images = torch.from_numpy(columns.zeros((K, B, 1, 16, 16, 3), torch.zeros(0, dtype=torch.uint8).numpy().dtype))
    images[:] = torch.arange(K * B).view(K, B, 1, 1, 1, 1)
    own: dict[str, Any] = {
        "images": images,
        "values": torch.arange(K * B, dtype=torch.float32).view(K, B),
        "valid": torch.arange(K * B).view(K, B) % 3 > 0,
        "trace": {"features": torch.arange(K * B * 300).view(K, B, 300).to(torch.bfloat16)},
    }
    letters = {"K": K, "B": B, "C": 1, "N": 1, "D": 2}
    for name, column in COLUMNS.items():
        if column.required and name not in own:
            own[name] = torch.zeros([letters[letter] for letter in column.shape.split()], dtype=column.dtype)
    following = FinalObservations(
        rows=np.array([0, 2, 2]), slots=np.array([3, 0, 1]), columns={"proprio": np.eye(3, 5, dtype=np.float32)}
    )
    return Rollout(batch=TrajectoryBatch(own, ["push"]), finished=[], env_steps=7, following=following)


def test_another_machine_reads_what_this_one_maps(server: MemoryServer) -> None:
    columns = SharedColumns("a", server)
    given = rollout(columns)
    shared = SharedRollout(**json.loads(json.dumps(dataclasses.asdict(columns.share(given)))))
    for machine in ("a", "b"):
        found = map_rollout(shared, machine, timeout_s=5.0)
        assert found.env_steps == 7 and found.batch.task_descriptions == given.batch.task_descriptions
        for name, leaf in leaves(given.batch).items():
            other = leaves(found.batch)[name]
            assert other.dtype is leaf.dtype and torch.equal(other, leaf), (machine, name)
        assert found.following is not None and given.following is not None
        for name, leaf in given.following.leaves().items():
            assert torch.equal(found.following.leaves()[name], leaf), (machine, name)
    columns.close()
    with pytest.raises(MemoryGone, match="is gone with its process"):
        map_rollout(shared, "a")
    with pytest.raises(LineError, match="not lent any more"):
        map_rollout(shared, "b", timeout_s=5.0)


def test_of_large_columns_only_the_share_travels(server: MemoryServer) -> None:
    columns = SharedColumns("a", server)
    given = rollout(columns)
    found = map_rollout(columns.share(given), "b", share=range(1, 3), timeout_s=5.0)
    large = {name for name, leaf in leaves(given.batch).items() if is_large(name, leaf)}
    assert large == {"images", "trace/features"}
    for name, leaf in leaves(given.batch).items():
        other = leaves(found.batch)[name]
        assert torch.equal(other[:, 1:3], leaf[:, 1:3])
        assert torch.equal(other, leaf) is (name not in large)
    nothing = map_rollout(columns.share(given), "b", share=range(0), timeout_s=5.0)
    assert all(torch.equal(leaves(nothing.batch)[name], torch.zeros_like(leaves(given.batch)[name])) for name in large)
    columns.close()


def test_shares_of_parts_are_those_of_the_whole() -> None:
    for sizes, size in itertools.product(([4], [2, 2], [1, 3, 2], [5, 5, 5]), (1, 2, 3, 4)):
        for rank in range(size):
            ranks, firsts = cast("Ranks", SimpleNamespace(rank=rank, size=size)), itertools.accumulate([0, *sizes])
            found = [
                first + slot for first, share in zip(firsts, shares_here(sizes, ranks), strict=False) for slot in share
            ]
            assert found == [*share_here(sum(sizes), ranks)]
