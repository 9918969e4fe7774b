"""The replay, fed by real rollouts of a simulator whose every number is known: each decision is followed by what really
followed it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import programs
import psutil
import pytest
import torch
from counter_simulator import last_step
from known_numbers import LIMIT, make_collector

from embodyrl.engine.parallel import SINGLE_PROCESS
from embodyrl.rollout.episodes import FinalObservations, Rollout
from embodyrl.rollout.replay import Minibatch, Replay, ReplayError, ReplayState
from embodyrl.rollout.replay_fields import MIB, replay_fields, row_bytes

SIZES = {"proprio_dim": 2, "action_dim": 2, "chunk_size": 1}


def make_replay(capacity: int = 600, slots: int = 3, folder: Path = Path(), **changes: object) -> Replay:
    options: dict[str, object] = {
        "slots": slots,
        "own": range(slots),
        "fields": replay_fields(**{**SIZES, **changes.pop("sizes", {})}),  # type: ignore[dict-item]
        "start_after": 10,
        "seed": 1,
        "memory": 100 * MIB,
        "folder": folder,
    }
    return Replay(capacity, **(options | changes))  # type: ignore[arg-type]


def rollouts(count: int, **settings: object) -> Iterator[Rollout]:
    with make_collector(**settings) as collector:  # type: ignore[arg-type]
        collector.following = True
        for _ in range(count):
            yield collector.collect()


def drawn(replay: Replay, count: int = 2000) -> Minibatch:
    [minibatch] = replay.minibatches(1, count)
    return minibatch


def check(minibatch: Minibatch) -> set[tuple[bool, bool]]:
    """Compare every decision with what the simulator must have done; returns the kinds of ends that occurred."""
    columns = minibatch.columns
    kinds = set()
    for row in range(len(columns["steps"])):
        start, step = (int(entry) for entry in columns["proprio"][row])
        terminated = step + 1 == last_step(start)
        truncated = step + 1 == LIMIT and not terminated
        found = (bool(columns["terminated"][row]), bool(columns["truncated"][row]))
        assert found == (terminated, truncated)
        assert columns["rewards"][row].tolist() == [step + 1]
        assert columns["success"][row].tolist() == [terminated]
        if not terminated:
            assert columns["next_proprio"][row].tolist() == [start, step + 1], "what follows is not the reset"
        kinds.add(found)
    return kinds


@pytest.mark.parametrize("schedule", ["lockstep", "pipeline", "ready_batch"])
def test_each_decision_is_followed_by_what_followed_it(schedule: str) -> None:
    replay, total = make_replay(), 0
    for rollout in rollouts(6, num_chunks=4, schedule=schedule):
        replay.add(rollout)
        total += int(rollout.batch["valid"].sum())
        # Also the last ones of a rollout, in the middle of an episode.
        assert len(replay) == total == replay.added
        kinds = check(drawn(replay))
    assert kinds == {(False, False), (True, False), (False, True)}, "too easy: not every kind of end occurred"


def test_the_oldest_make_room_and_nothing_is_drawn_whose_follower_is_gone() -> None:
    replay = make_replay(capacity=39)
    for rollout in rollouts(12, num_chunks=7):
        replay.add(rollout)
        assert len(replay) <= 39
        check(drawn(replay, 500))
    assert replay.added == 12 * 7 * 3 and len(replay) > 20


def test_every_decision_is_drawn_about_equally_often() -> None:
    replay = make_replay()
    for rollout in rollouts(3, num_chunks=4):
        replay.add(rollout)
    replay._columns["actions"][:] = np.arange(600 * 2).reshape(replay._columns["actions"].shape)  # tells them apart
    counts = torch.unique(drawn(replay, 36_000).columns["actions"][:, 0, 0], return_counts=True)[1]
    assert len(counts) == len(replay) == 36
    assert int(counts.min()) > 850 and int(counts.max()) < 1150


def test_a_chunk_that_ends_inside_keeps_how_many_actions_were_executed() -> None:
    replay = make_replay(sizes={"chunk_size": 3})
    for rollout in rollouts(4, num_chunks=4, chunk_size=3):
        replay.add(rollout)
    columns = drawn(replay).columns
    assert columns["rewards"].shape[1] == 3 and set(columns["steps"].tolist()) == {1, 2, 3}
    for row in range(len(columns["steps"])):
        (start, step), executed = (int(entry) for entry in columns["proprio"][row]), int(columns["steps"][row])
        assert columns["rewards"][row].tolist() == [step + 1 + i if i < executed else 0 for i in range(3)]
        if not columns["terminated"][row]:
            assert columns["next_proprio"][row].tolist() == [start, step + executed]


def test_only_the_first_success_of_an_episode_is_one() -> None:
    replay = make_replay(slots=1, sizes={"chunk_size": 2}, own=range(1))
    [rollout] = rollouts(1, num_envs=1, num_chunks=3, chunk_size=2)
    batch = rollout.batch
    for name in ("terminated", "truncated"):
        batch.data[name] = torch.zeros_like(batch[name])
    batch.data["episode"] = torch.tensor([[5], [5], [6]])
    batch.data["steps"] = torch.tensor([[2], [2], [1]])
    batch.data["success"] = torch.tensor([[[False, True]], [[True, True]], [[False, True]]])
    replay.add(rollout)
    found = drawn(replay, 200).columns
    rows = {tuple(p): s for p, s in zip(found["proprio"].tolist(), found["success"].tolist(), strict=True)}
    # In the second chunk the episode has been solved already; in the third the action was not executed.
    assert sorted(rows.values()) == [[False, False], [False, False], [False, True]]


@pytest.mark.faults
def test_what_a_simulator_that_died_was_playing_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = tmp_path / "alive"
    alive.touch()
    monkeypatch.setenv("MORTAL", str(alive))
    replay, lost = make_replay(slots=2), 0
    settings = {"num_envs": 2, "workers": 2, "simulator": "mortal", "on_worker_death": "restart"}
    for rollout in rollouts(8, num_chunks=2, **settings):
        replay.add(rollout)
        lost += int((~rollout.batch["valid"]).sum())
        if len(replay):
            check(drawn(replay, 300))
    assert lost and not alive.exists() and replay.added == 8 * 2 * 2 - lost == len(replay)


def test_ranks_draw_the_same_minibatch_and_each_holds_its_own_rows() -> None:
    whole = make_replay()
    ranks = [make_replay(own=range(1)), make_replay(own=range(1, 3))]
    for rollout in rollouts(5, num_chunks=4):
        whole.add(rollout)
        following = rollout.following
        assert following is not None
        for replay in ranks:
            here = np.isin(following.slots, replay.own)
            own = FinalObservations(
                rows=following.rows[here],
                slots=following.slots[here],
                columns={name: column[here] for name, column in following.columns.items()},
            )
            replay.add(Rollout(batch=rollout.batch, finished=[], env_steps=0, following=own))
    wanted, parts = drawn(whole, 64), [drawn(replay, 64) for replay in ranks]
    assert sorted(torch.cat([part.places for part in parts]).tolist()) == list(range(64))
    for part in parts:
        assert 0 < len(part.places) < 64 and part.size == 64
        for name, column in part.columns.items():
            if name == "next_proprio":  # after a termination it is whatever is there
                kept = ~part.columns["terminated"]
                assert torch.equal(column[kept], wanted.columns[name][part.places][kept])
            else:
                assert torch.equal(column, wanted.columns[name][part.places]), name


def saved(replay: Replay, folder: Path, before: Path | None) -> Path:
    state = replay.state(SINGLE_PROCESS, whole=before is None)
    assert state is not None
    folder.mkdir()
    state.save(folder, before)
    return folder


@pytest.mark.parametrize("capacity", [39, 600])
def test_it_goes_on_from_a_checkpoint_with_the_same_draws(tmp_path: Path, capacity: int) -> None:
    """Checkpoints share files; one that is removed takes none of another along."""
    replay, before = make_replay(capacity), None
    every = list(rollouts(9, num_chunks=4))
    for number, rollout in enumerate(every[:7]):
        replay.add(rollout)
        assert replay.take_updates(0.3) == int(0.3 * 12 * (number + 1)) - int(0.3 * 12 * number)
        if number % 2 == 0:
            drawn(replay, 10)
            before = saved(replay, tmp_path / str(number), before)
    assert before is not None
    for name in ("0", "2", "4"):
        for file in (tmp_path / name).iterdir():
            file.unlink()
    again = make_replay(capacity)
    again.restore(ReplayState.load(before), before)
    for more in (every[7:7], every[7:8], every[8:]):
        for each in (replay, again):
            for rollout in more:
                each.add(rollout)
        assert replay.metrics() == again.metrics() and replay.take_updates(0.3) == again.take_updates(0.3)
        one, other = drawn(replay, 300), drawn(again, 300)
        check(other)
        alive = ~one.columns["terminated"]
        for name, column in one.columns.items():
            rows = alive if name == "next_proprio" else torch.ones_like(alive)
            assert torch.equal(column[rows], other.columns[name][rows]), name


def test_a_checkpoint_writes_only_what_is_new_and_forgets_what_is_gone(tmp_path: Path) -> None:
    replay, before, sizes = make_replay(39), None, []
    for number, rollout in enumerate(rollouts(12, num_chunks=4)):
        replay.add(rollout)
        folder = saved(replay, tmp_path / f"{number:02}", before)
        links = {file.name: file.stat().st_nlink for file in folder.glob("*.safetensors")}
        newest = max(links)
        sizes.append((folder / newest).stat().st_size)
        assert links[newest] == 1 and all(count > 1 for name, count in links.items() if name != newest)
        assert len(links) <= 6  # 13 moments of a slot, at least 4 in each file, and one beyond
        before = folder
    assert max(sizes) < 1.5 * min(sizes)


def test_when_the_last_checkpoint_is_gone_the_next_is_whole(tmp_path: Path) -> None:
    replay = make_replay()
    first, second, third = rollouts(3, num_chunks=4)
    replay.add(first)
    saved(replay, tmp_path / "one", None)
    replay.add(second)
    replay.state(SINGLE_PROCESS, whole=False)
    replay.add(third)
    folder = saved(replay, tmp_path / "two", None)  # asks for a whole one
    again = make_replay()
    again.restore(ReplayState.load(folder), folder)
    assert len(again) == len(replay) == 36
    check(drawn(again))


def test_a_replay_of_another_run_is_refused(tmp_path: Path) -> None:
    replay = make_replay()
    [rollout] = rollouts(1, num_chunks=4)
    replay.add(rollout)
    folder = saved(replay, tmp_path / "one", None)
    with pytest.raises(ReplayError, match="another run: it has 3 slots, this run has 2"):
        make_replay(slots=2).restore(ReplayState.load(folder), folder)
    with pytest.raises(ReplayError, match=r"another run: proprio is \(2,\), expected \(5,\)"):
        make_replay(sizes={"proprio_dim": 5}).restore(ReplayState.load(folder), folder)


def test_a_large_one_lies_in_an_unnamed_file_and_leaves_the_memory(tmp_path: Path) -> None:
    """In a process of its own: in one with other tests, the C library keeps and uses again what those have freed."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    code = f"import sys; sys.path[:0] = {folders}; import test_replay; test_replay.leave_the_memory({str(tmp_path)!r})"
    done = programs.run(["-c", code])
    assert done.returncode == 0, done.stderr


def leave_the_memory(place: str) -> None:
    """Fill a large replay, draw from it, and require that this process has not grown."""
    tmp_path = Path(place)
    wide = {"proprio_dim": 2, "action_dim": 40_000}
    [rollout] = rollouts(1, num_chunks=100)
    rollout.batch.data["actions"] = torch.randn(100, 3, 1, 40_000)
    process = psutil.Process()
    large = make_replay(sizes=wide, memory=10 * MIB, folder=tmp_path)
    assert 600 * row_bytes(replay_fields(chunk_size=1, **wide)) > 90 * MIB
    before = process.memory_info().rss
    large.add(rollout)
    check(drawn(large, 64))
    large.add(Rollout(batch=rollout.batch, finished=[], env_steps=0, following=rollout.following))
    assert process.memory_info().rss - before < 10 * MIB
    assert not list(tmp_path.iterdir()), "it has no name, so that nothing is left of it"
    check(drawn(large, 64))


def test_there_must_be_room_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("others have no room meanwhile"))
    room = os.statvfs(tmp_path)
    too_many = 2 * room.f_bavail * room.f_frsize // row_bytes(replay_fields(**SIZES))
    with pytest.raises(ReplayError, match=r"no room .*: lower algorithm\.off_policy\.replay\.capacity"):
        make_replay(capacity=too_many, memory=1, folder=tmp_path)


def test_its_counters_are_json(tmp_path: Path) -> None:
    replay = make_replay()
    [rollout] = rollouts(1, num_chunks=12)
    replay.add(rollout)
    found = json.loads((saved(replay, tmp_path / "one", None) / "counters.json").read_text())
    assert found["added"] == 36 and found["ended"]["episodes"] == len(rollout.finished) > 0
    assert replay.metrics()["replay/successes"] == sum(bool(each.success) for each in rollout.finished)


def test_what_came_of_an_episode_is_known_of_all_its_decisions_and_none_is_drawn_before(tmp_path: Path) -> None:
    sizes = {"whole_episodes": True}
    replay, other, seen = make_replay(sizes=sizes), make_replay(sizes=sizes), set()
    for number, rollout in enumerate(rollouts(8, num_chunks=3)):
        replay.add(rollout)
        if number >= 4:
            other.add(rollout)
        assert len(replay) < replay.added, "episodes go on"
        if len(replay):
            columns = drawn(replay).columns
            for row, (start, step) in enumerate(columns["proprio"].long().tolist()):
                end = min(last_step(start), LIMIT)
                assert int(columns["remaining"][row]) == end - step
                assert bool(columns["solved"][row]) == (last_step(start) <= LIMIT)
                seen.add(bool(columns["solved"][row]))
        if number < 4:  # checkpoints in the middle of episodes, whose decisions are noted in a later one
            before = tmp_path / str(number - 1) if number else None
            state = replay.state(SINGLE_PROCESS, whole=not number)
            assert state is not None
            (tmp_path / str(number)).mkdir()
            state.save(tmp_path / str(number), before)
        if number == 3:
            other.restore(ReplayState.load(tmp_path / "3"), tmp_path / "3")
    assert seen == {True, False}
    for name in ("remaining", "solved", "actions"):
        np.testing.assert_array_equal(replay._columns[name], other._columns[name])
    np.testing.assert_array_equal(replay._decided, other._decided)
