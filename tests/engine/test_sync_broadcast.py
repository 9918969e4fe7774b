"""Weights through torch.distributed (gloo), between three real processes that learn, act, hang and die."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sync_peers import (
    UPDATES,
    WORLD,
    broadcast_cases,
    broadcast_on_gpus,
    broadcast_training,
    broadcast_until,
    peers,
)


@pytest.mark.parametrize("patches", [False, True])
def test_policies_on_other_ranks_decide_like_the_one_that_learns(tmp_path: Path, patches: bool) -> None:
    """In buckets of 200 bytes, so that there are several."""
    with peers(*((broadcast_training, rank, tmp_path / "meeting", patches) for rank in range(WORLD))) as ranks:
        outcomes = [rank.get() for rank in ranks]
    (expected, sizes), *others = outcomes
    for decisions, _ in others:
        assert [np.array_equal(one, other) for one, other in zip(decisions, expected, strict=True)] == [True] * 4
    assert len({decision.tobytes() for decision in expected}) == UPDATES + 1, "nothing was learned"
    assert (max(sizes[1:]) < sizes[0]) == patches, "all of an MLP learns; a small step is a smaller patch"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} NVIDIA GPUs")
def test_weights_go_from_gpu_to_gpu_through_nccl(tmp_path: Path) -> None:
    with peers(*((broadcast_on_gpus, rank, tmp_path / "meeting") for rank in range(WORLD))) as ranks:
        sent, *received = [rank.get() for rank in ranks]
    assert all(np.array_equal(found[name], sent[name]) for found in received for name in sent)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `broadcast_cases` found on each rank; rank 0 sends."""
    meeting = tmp_path_factory.mktemp("cases") / "meeting"
    with peers(*((broadcast_cases, rank, meeting) for rank in range(WORLD))) as ranks:
        found = [rank.get() for rank in ranks]
    assert all(isinstance(each, dict) for each in found), found
    return found


def in_bfloat16(array: NDArray[np.float32]) -> NDArray[np.float32]:
    return torch.from_numpy(array).bfloat16().float().numpy()


def test_tensors_that_do_not_fit_are_named_on_every_rank(cases: list[dict[str, Any]]) -> None:
    for found in cases:
        name, text = found["layout"]
        assert name == "LayoutError"
        assert (
            "bias has shape (3,) at the sender and (2,) at the receiver; weight has shape (3, 2) at the sender" in text
        )


def test_the_first_transfer_carries_all_and_later_ones_what_changed(cases: list[dict[str, Any]]) -> None:
    sender, *receivers = cases
    for found in receivers:
        for name, tensor in found["after first"].items():
            assert np.array_equal(tensor, in_bfloat16(sender["after first"][name])), name
        assert found["after second"]["adapter"][7, 1] == 1.25 and found["after second"]["count"] == 9
    # 90,000 + 600 numbers and some alignment, in 2 bytes each; then one of 600 and a buffer.
    assert 181_200 <= sender["first"] < 182_000 and sender["second"] < 300


def test_a_missed_version_is_an_error_on_every_rank_and_nobody_takes_it(cases: list[dict[str, Any]]) -> None:
    assert cases[1]["gap"] == ("VersionError", "version 2 builds upon version 1, and version 0 is here")
    assert cases[0]["gap"] == (
        "SyncError",
        "sending weights of version 2 failed at rank 1 of 3: no rank took the weights",
    )
    assert cases[2]["gap"][0] == "SyncError" and isinstance(cases[0]["gap again"], int)
    assert all(found["after gap"]["gain"] == 1.0 for found in cases[1:]) and cases[0]["after gap"]["gain"] == 7.0


def test_weights_that_drifted_are_noticed_and_sent_whole_the_next_time(cases: list[dict[str, Any]]) -> None:
    name, text = cases[2]["drift"]
    assert name == "ChecksumError" and "builds upon others than are here" in text
    assert [found["drift"][0] for found in cases[:2]] == ["SyncError"] * 2
    assert cases[0]["drift again"] > 1200 and [found["drift again"] for found in cases[1:]] == [None] * 2
    for found in cases[1:]:
        for name, tensor in found["after drift"].items():
            assert np.array_equal(tensor, in_bfloat16(cases[0]["after drift"][name])), name


def test_a_version_is_sent_once(cases: list[dict[str, Any]]) -> None:
    assert cases[0]["duplicate"] == ("VersionError", "version 3 cannot follow version 3: each is sent once, in order")


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_is_named_by_all_others(tmp_path: Path, victim: int) -> None:
    with peers(*((broadcast_until, rank, tmp_path / "meeting", 60.0) for rank in range(WORLD))) as ranks:
        assert [rank.get() for rank in ranks] == ["ready"] * WORLD
        ranks[victim].signal(signal.SIGKILL)
        ranks[victim].process.join(60)
        others = [rank for number, rank in enumerate(ranks) if number != victim]
        for rank in others:
            rank.line.send("go on")
        for rank in others:
            name, text = rank.get()
            assert name == "PeerLost" and "failed because another rank ended" in text, (name, text)
            assert "weights of version" in text


@pytest.mark.faults
def test_a_rank_that_hangs_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    with peers(*((broadcast_until, rank, tmp_path / "meeting", 1.5) for rank in range(WORLD))) as ranks:
        assert [rank.get() for rank in ranks] == ["ready"] * WORLD
        ranks[1].signal(signal.SIGSTOP)
        for rank in (ranks[0], ranks[2]):
            rank.line.send("go on")
        outcomes = [rank.get() for rank in (ranks[0], ranks[2])]
    # Whoever's time runs out first is gone for the other one.
    assert {"SyncTimeout"} <= {name for name, _ in outcomes} <= {"SyncTimeout", "PeerLost"}, outcomes
    assert any("did not end within 1.5 s" in text for _, text in outcomes)
