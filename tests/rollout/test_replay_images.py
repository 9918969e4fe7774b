"""A replay of images: those of real rollouts, each kept once, on the disk or in memory, and on the rank that saw
them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from counter_simulator import last_step, shade
from known_numbers import make_collector

from embodyrl.engine.exchange import ADDRESS, Exchange
from embodyrl.engine.parallel import SINGLE_PROCESS
from embodyrl.rollout.episodes import Rollout
from embodyrl.rollout.replay import Replay, ReplayState
from embodyrl.rollout.replay_fields import MIB, held_in_memory, replay_fields, row_bytes
from embodyrl.rollout.spread import bring_own, leave_large

SIZE = 16
"""Height and width of an image [pixels]: large enough that its rows stay with their rank."""
CAMERAS = ("top",)


def make_replay(capacity: int = 120, *, frames: int = 1, size: int = SIZE, **changes: object) -> Replay:
    options: dict[str, object] = {
        "slots": 3,
        "own": range(3),
        "fields": replay_fields(proprio_dim=2, action_dim=2, chunk_size=1, images=(frames, size, size, 3)),
        "start_after": 10,
        "seed": 1,
        "memory": 100 * MIB,
        "folder": Path(),
    }
    return Replay(capacity, **(options | changes))  # type: ignore[arg-type]


def rollouts(count: int, *, frames: int = 1) -> Iterator[Rollout]:
    with make_collector(num_chunks=4, cameras=CAMERAS, frames=frames) as collector:
        collector.following = True
        for _ in range(count):
            yield collector.collect()


def check(replay: Replay, *, frames: int = 1) -> None:
    """Compare the images of every decision with those that the simulator must have shown."""
    [minibatch] = replay.minibatches(1, 300)
    columns = {name: column.numpy() for name, column in minibatch.columns.items()}
    seen = set()
    for row in range(len(columns["steps"])):
        start, step = (int(entry) for entry in columns["proprio"][row])
        # An episode repeats its first image where there is none before.
        for name, now in (("images", step), ("next_images", step + 1)):
            if name == "images" or step + 1 != last_step(start):
                wanted = [shade(start, max(now - age, 0)) for age in range(frames)]
                assert [np.unique(image).tolist() for image in columns[name][row]] == [[each] for each in wanted]
        seen.add(bool(columns["truncated"][row]))
    assert seen == {True, False}, "too easy: no episode was cut off"


@pytest.mark.parametrize("frames", [1, 3])
def test_images_are_those_of_the_decision_and_of_what_followed(frames: int) -> None:
    replay = make_replay(60, frames=frames)
    for rollout in rollouts(8, frames=frames):  # more than it can hold
        replay.add(rollout)
    check(replay, frames=frames)


def test_large_columns_go_to_the_disk_and_small_ones_stay(tmp_path: Path) -> None:
    memory, disk = make_replay(), make_replay(memory=MIB // 32, folder=tmp_path)
    assert not memory._files and len(disk._files) == 1, "images alone"
    for rollout in rollouts(3):
        memory.add(rollout)
        disk.add(rollout)
    [one], [other] = memory.minibatches(1, 100), disk.minibatches(1, 100)
    assert all(torch.equal(column, other.columns[name]) for name, column in one.columns.items())
    check(disk)
    assert not list(tmp_path.iterdir())


def test_columns_in_memory_are_the_smallest_and_leave_half_of_it() -> None:
    fields = replay_fields(proprio_dim=100, action_dim=4, chunk_size=1, images=(1, 64, 64, 3))
    assert held_in_memory(fields, capacity=100, memory=100 * row_bytes(fields)) == set(fields)
    small = {"actions", "rewards", "success", "steps", "terminated", "truncated"}
    assert held_in_memory(fields, capacity=100, memory=100 * row_bytes(fields) - 1) == {*small, "proprio"}
    assert held_in_memory(fields, capacity=100, memory=100 * 100) == small
    assert held_in_memory(fields, capacity=100, memory=100) == set()


def test_100k_decisions_take_the_disk_that_is_said_and_little_memory(tmp_path: Path) -> None:
    """Adding and drawing many times the memory, of which nothing may stay."""
    memory, capacity = 16 * MIB, 100_000
    replay = make_replay(capacity, size=64, memory=memory, folder=tmp_path)
    room = sum(len(file) for file in replay._files) + sum(
        column.nbytes for column in replay._columns.values() if column.nbytes < memory
    )
    assert 1.2e9 < room < 1.3e9
    process, images = psutil.Process(), replay._columns["images"]
    before = most = process.memory_info().rss
    draw = np.random.default_rng(1)
    for _ in range(20):  # 75 MiB each
        places = draw.integers(0, replay.rows, 300)
        for place in places:
            entry = {"images": np.full((3, 1, 64, 64, 3), place % 251, np.uint8)}
            replay._ends[:] = place
            replay._write(np.arange(3), entry, decided=True)
        most = max(most, process.memory_info().rss)
        replay._live = np.flatnonzero(replay._decided)
        for minibatch in replay.minibatches(10, 64):
            found = minibatch.columns["images"]
            assert torch.equal(found[:, 0, 0, 0, 0], found[:, 0, -1, -1, -1])
            most = max(most, process.memory_info().rss)
    assert images.shape[:2] == (3, capacity // 3)
    assert most - before < 1.1 * memory


def test_what_others_have_seen_is_not_brought() -> None:
    """A rank that keeps its own slots reads the rows that it holds, and no others."""
    [rollout] = rollouts(1)
    images = rollout.batch["images"].clone()
    rollout.batch["valid"][1, 1] = False
    exchange = Exchange(SINGLE_PROCESS)
    left = leave_large(rollout.batch, exchange)
    assert ADDRESS in left and "images" not in left
    own = bring_own(left, exchange, range(1, 3))
    kept = own["valid"][:, 1:]
    assert torch.equal(own["images"][:, 1:][kept], images[:, 1:][kept]) and not kept.all()
    assert not own["images"][:, 0].any() and images[:, 0].any()
    assert exchange.received == 0


def test_checkpoints_with_images_write_what_is_new_also_after_a_resume(tmp_path: Path) -> None:
    every, before, sizes = list(rollouts(8)), None, []
    replay = make_replay()

    def save(number: int) -> Path:
        state = replay.state(SINGLE_PROCESS, whole=before is None)
        assert state is not None
        (folder := tmp_path / str(number)).mkdir()
        state.save(folder, before)
        newest = max(folder.glob("*.safetensors"))
        sizes.append(newest.stat().st_size)
        return folder

    for number, rollout in enumerate(every[:4]):
        replay.add(rollout)
        before = save(number)
    assert before is not None
    replay = make_replay()
    replay.restore(ReplayState.load(before), before)
    for number, rollout in enumerate(every[4:], start=4):
        replay.add(rollout)
        before = save(number)
    again = make_replay()
    again.restore(ReplayState.load(before), before)
    check(again)
    assert max(sizes) < 1.3 * min(sizes), "the first one after a resume is no larger"
    assert len(list(before.glob("*.safetensors"))) == 8
