"""Minibatches of demonstrations: every chunk once per pass, the same for the same seed, wherever one begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="demonstrations need pyarrow: pip install 'embodyrl[data]'")

from demonstrations import write_numbered

from embodyrl.config import load_config
from embodyrl.config.schema import AtEnd
from embodyrl.data.batches import Demonstrations
from embodyrl.data.layout import Batch, DatasetError
from embodyrl.data.reader import Dataset
from embodyrl.data.store import EpisodeStore

LENGTHS = [5, 9, 3, 7]


def open_batches(
    folder: Path, *, chunk_size: int = 1, seed: int = 1, cameras=(), frames=1, **settings
) -> Demonstrations:
    dataset, config = Dataset(folder), load_config("gym_pendulum", [f"seed={seed}"]).config
    env = dataclasses.replace(
        config.env, cameras=list(cameras), frames=frames, image_size=list(dataset.spec.image_size)
    )
    data = dataclasses.replace(config.data, path=str(folder), **{"batch_size": 4, **settings})
    rollout = dataclasses.replace(config.rollout, chunk_size=chunk_size)
    return Demonstrations(EpisodeStore(dataset, dataclasses.replace(config, env=env, data=data, rollout=rollout)))


def all_places(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """The same of several, one after the other."""
    return [place for batch in batches for place in places(batch)]


def places(batch: Batch) -> list[tuple[int, int]]:
    """Which (episode, frame) the samples are."""
    return [(int(state[0]), int(state[1])) for state in batch.observation.proprio]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_numbered(tmp_path / "demos", LENGTHS)
    return tmp_path / "demos"


def test_a_pass_draws_every_chunk_once_and_the_next_one_in_another_order(folder: Path) -> None:
    demonstrations = open_batches(folder)
    assert demonstrations.chunks == sum(LENGTHS) == 24
    everything = [(number, frame) for number, length in enumerate(LENGTHS) for frame in range(length)]
    first, second = all_places(demonstrations.batches(0, 6)), all_places(demonstrations.batches(6, 6))
    assert sorted(first) == sorted(second) == everything
    assert first != second and first != everything


def test_a_sequence_depends_on_the_seed_and_can_be_entered_anywhere(folder: Path) -> None:
    whole = [places(batch) for batch in open_batches(folder).batches(0, 40)]
    assert [places(batch) for batch in open_batches(folder).batches(17, 23)] == whole[17:]
    one_by_one = open_batches(folder)
    assert [places(batch) for number in range(40) for batch in one_by_one.batches(number, 1)] == whole
    assert [places(batch) for batch in one_by_one.batches(3, 2)] == whole[3:5]
    assert [places(batch) for batch in open_batches(folder, seed=2).batches(0, 40)] != whole


def test_a_chunk_is_what_was_done_from_then_on_and_goes_on_with_the_last_action(folder: Path) -> None:
    for batch in open_batches(folder, chunk_size=4).batches(0, 6):
        for (number, frame), actions, task in zip(
            places(batch), batch.actions, batch.observation.task_descriptions, strict=True
        ):
            following = [min(frame + step, LENGTHS[number] - 1) for step in range(4)]
            assert actions[:, 0].tolist() == [100 * number + each for each in following]
            assert task == f"do {number % 2}"


def test_chunks_beyond_the_end_can_be_dropped(folder: Path) -> None:
    demonstrations = open_batches(folder, chunk_size=4, at_end=AtEnd.drop)
    assert demonstrations.chunks == 2 + 6 + 0 + 4
    drawn = sorted(all_places(demonstrations.batches(0, 3)))
    assert drawn == [(number, frame) for number, length in enumerate(LENGTHS) for frame in range(length - 3)]
    with pytest.raises(DatasetError, match=r"no episode of .* has 10 undisturbed actions"):
        open_batches(folder, chunk_size=10, at_end=AtEnd.drop)


def test_chunks_whose_actions_answer_to_a_disturbance_are_left_out(tmp_path: Path) -> None:
    """Frame 3 was disturbed: what follows it was decided after it, so no chunk goes on beyond it."""
    write_numbered(tmp_path / "demos", [8], perturbed={0: [3]})
    for size, starts in ((1, range(8)), (2, [0, 1, 2, 4, 5, 6, 7]), (3, [0, 1, 4, 5, 6, 7])):
        demonstrations = open_batches(tmp_path / "demos", chunk_size=size, batch_size=100)
        assert sorted(places(next(demonstrations.batches(0, 1)))) == [(0, frame) for frame in starts]


def test_with_little_memory_few_episodes_are_drawn_from_at_once(tmp_path: Path) -> None:
    write_numbered(tmp_path / "demos", [40] * 10, cameras=("top",), image_size=(64, 64))
    demonstrations = open_batches(tmp_path / "demos", cameras=("top",), memory_mib=1, batch_size=40)
    batches = [places(batch) for batch in demonstrations.batches(0, 10)]
    assert sorted(all_places(demonstrations.batches(0, 10))) == [
        (number, frame) for number in range(10) for frame in range(40)
    ]
    together = [{number for number, _ in batch} for batch in batches]
    assert all(len(numbers) == 2 for numbers in together) and set.union(*together) == set(range(10))
    everything = open_batches(tmp_path / "demos", cameras=("top",), batch_size=40)
    assert all(len({number for number, _ in places(batch)}) > 4 for batch in everything.batches(0, 10))


def test_images_are_those_of_the_named_cameras_in_their_order(tmp_path: Path) -> None:
    write_numbered(tmp_path / "demos", [4, 4], cameras=("top", "wrist"), image_size=(16, 16))
    for cameras, offsets in ((("top", "wrist"), (0, 100)), (("wrist", "top"), (100, 0)), (("wrist",), (100,))):
        batch = next(open_batches(tmp_path / "demos", cameras=cameras).batches(0, 1))
        for (number, frame), images in zip(places(batch), batch.observation.images, strict=True):
            assert images[:, 0, 0, 0].tolist() == [10 * number + frame + offset for offset in offsets]
    assert next(open_batches(tmp_path / "demos").batches(0, 1)).observation.images is None
    with pytest.raises(DatasetError, match=r"has no camera 'side' \(cameras: top, wrist\)"):
        open_batches(tmp_path / "demos", cameras=("side",))


def test_earlier_frames_are_a_chunk_apart_and_never_of_another_episode(tmp_path: Path) -> None:
    write_numbered(tmp_path / "demos", LENGTHS, cameras=("front", "side"), image_size=(16, 16))
    demonstrations = open_batches(tmp_path / "demos", chunk_size=2, cameras=["side", "front"], frames=3)
    seen = set()
    for batch in demonstrations.batches(0, 12):
        assert batch.observation.images.shape[1:] == (6, 16, 16, 3)
        for (number, frame), images in zip(places(batch), batch.observation.images, strict=True):
            shown = [10 * number + max(frame - 2 * age, 0) + offset for age in range(3) for offset in (100, 0)]
            assert images[:, 0, 0, 0].tolist() == shown
            seen.add(frame)
    assert max(seen) > 4 and min(seen) == 0


def test_images_are_moved_together_and_their_edges_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered(tmp_path / "demos", [4], cameras=("top",), image_size=(16, 16))
    image = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    still = np.broadcast_to(image, (4, 1, 16, 16, 3))
    demonstrations = open_batches(tmp_path / "demos", cameras=("top",), shift_pixels=2)
    seen = set()
    for number in range(60):
        moved = demonstrations._shifted(still, number)
        assert (moved == moved[:1]).all()
        padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="edge")
        shifts = [(y, x) for y in range(5) for x in range(5) if (padded[y : y + 16, x : x + 16] == moved[0, 0]).all()]
        assert len(shifts) == 1
        seen.add(shifts[0])
    assert len(seen) > 15
    assert open_batches(tmp_path / "demos", cameras=("top",))._shifted(still, 0) is still


def test_a_split_shares_out_whole_episodes(tmp_path: Path) -> None:
    write_numbered(tmp_path / "demos", LENGTHS)
    whole = open_batches(tmp_path / "demos")
    before = [places(batch) for batch in whole.batches(0, 4)]
    parts = whole.split(0.4)
    assert parts is not None
    seen = [{number for batch in part.batches(0, 9) for number, _ in places(batch)} for part in parts]
    assert not seen[0] & seen[1] and seen[0] | seen[1] == {*range(len(LENGTHS))}
    assert [part.episodes for part in parts] == [len(each) for each in seen] == [2, 2]
    assert sum(part.chunks for part in parts) == whole.chunks
    assert [places(batch) for batch in whole.batches(0, 4)] == before, "the whole is as it was"
    few = whole.split(0.01), whole.split(0.99)
    assert [[part.episodes for part in each] for each in few if each] == [[1, len(LENGTHS) - 1], [len(LENGTHS) - 1, 1]]


def test_one_demonstration_is_not_split(tmp_path: Path) -> None:
    write_numbered(tmp_path / "demos", [4])
    assert open_batches(tmp_path / "demos").split(0.5) is None
