"""Demonstrations on disk: what is written is what is read, in LeRobot's layout, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="demonstrations need pyarrow: pip install 'embodyrl[data]'")

import pyarrow as pa
import pyarrow.parquet as pq

from embodyrl.data import storage
from embodyrl.data.layout import DatasetError, DatasetSpec, Episode, Images
from embodyrl.data.reader import Dataset
from embodyrl.data.writer import DatasetWriter, of_numbers, pooled

LENGTHS = (7, 30, 1, 25)
TASK_DESCRIPTIONS = ("open the door", "close the door")


def spec(**changes) -> DatasetSpec:
    usual = {
        "action_names": ("x", "y", "grip"),
        "state_dim": 5,
        "cameras": ("top", "wrist"),
        "image_size": (18, 31),
        "fps": 80,
        "outcome": True,
        "perturbed": True,
    }
    return DatasetSpec(**{**usual, **changes})


def episode(number: int, of: DatasetSpec, length: int) -> Episode:
    rng = np.random.default_rng(number)
    height, width = of.image_size
    return Episode(
        task=TASK_DESCRIPTIONS[number % 2],
        actions=rng.normal(size=(length, of.action_dim)).astype(np.float32),
        proprio=rng.normal(size=(length, of.state_dim)).astype(np.float32) if of.state_dim else None,
        images=rng.integers(0, 256, (length, len(of.cameras), height, width, 3), np.uint8) if of.cameras else None,
        rewards=rng.normal(size=length).astype(np.float32) if of.outcome else None,
        success=rng.random(length) < 0.5 if of.outcome else None,
        perturbed=rng.random(length) < 0.1 if of.perturbed else None,
        executed=rng.normal(size=(length, of.action_dim)).astype(np.float32) if of.executed else None,
        last_proprio=rng.normal(size=of.state_dim).astype(np.float32) if of.ends and of.state_dim else None,
        last_images=rng.integers(0, 256, (len(of.cameras), height, width, 3), np.uint8) if of.ends else None,
        terminated=of.ends and number % 2 == 1,
    )


def write(folder: Path, of: DatasetSpec) -> list[Episode]:
    episodes = [episode(number, of, length) for number, length in enumerate(LENGTHS)]
    with DatasetWriter(folder, of) as writer:
        for each in episodes:
            writer.add(each)
    return episodes


VARIANTS = {
    "images in tables": {},
    "images in videos": {"images": Images.video},
    "no images": {"cameras": (), "image_size": (0, 0)},
    "one number": {"cameras": (), "image_size": (0, 0), "action_names": ("torque",), "state_dim": 1},
    "what was executed and what followed": {"executed": True, "ends": True},
    "what followed videos": {"images": Images.video, "state_dim": 0, "ends": True},
    "images alone": {"state_dim": 0, "outcome": False, "perturbed": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_written_is_read_bit_for_bit_in_any_order(name: str, tmp_path: Path) -> None:
    of = spec(**VARIANTS[name])
    written = write(tmp_path / "demos", of)
    dataset = Dataset(tmp_path / "demos")
    assert dataset.spec == of
    for number in (3, 0, 2, 1):
        read = dataset.read(number)
        for key, value in vars(written[number]).items():
            assert np.array_equal(getattr(read, key), value), (number, key)
    assert dataset.read(1, with_images=False).images is None
    assert [path.name for path in tmp_path.iterdir()] == ["demos"]


def test_the_layout_is_that_of_lerobot(tmp_path: Path) -> None:
    write(tmp_path / "demos", spec(images=Images.video))
    folder = tmp_path / "demos"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
        "videos/observation.images.top/chunk-000/file-000.mp4",
        "videos/observation.images.wrist/chunk-000/file-000.mp4",
    }
    info = json.loads((folder / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0" and info["splits"] == {"train": "0:4"}
    assert info["features"]["observation.images.top"]["shape"] == [18, 31, 3]
    assert info["features"]["action"] == {"dtype": "float32", "shape": [3], "names": ["x", "y", "grip"]}
    frames = pq.read_table(folder / "data/chunk-000/file-000.parquet")
    assert frames.schema.field("action").type == pa.list_(pa.float32(), 3)
    assert frames["index"].to_pylist() == list(range(sum(LENGTHS)))
    assert frames["frame_index"].to_pylist()[7:10] == [0, 1, 2]
    assert frames["timestamp"][9].as_py() == pytest.approx(2 / 80)
    assert [task for task, before in zip(*two_columns(frames), strict=True) if before == 1][:1] == [1]
    rows = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in rows] == [
        (0, 7),
        (7, 37),
        (37, 38),
        (38, 63),
    ]
    assert [row["videos/observation.images.top/from_timestamp"] for row in rows] == [0, 7 / 80, 37 / 80, 38 / 80]
    assert rows[1]["tasks"] == ["close the door"]
    assert np.shape(rows[0]["stats/observation.images.top/mean"]) == (3, 1, 1)


def two_columns(table: pa.Table) -> tuple[list[int], list[int]]:
    return table["task_index"].to_pylist(), table["episode_index"].to_pylist()


def test_statistics_are_those_of_all_frames(tmp_path: Path) -> None:
    written = write(tmp_path / "demos", spec(cameras=(), image_size=(0, 0)))
    stats = json.loads((tmp_path / "demos/meta/stats.json").read_text())
    actions = np.concatenate([each.actions for each in written]).astype(np.float64)
    assert stats["action"]["count"] == [sum(LENGTHS)]
    for name, value in (
        ("min", actions.min(0)),
        ("max", actions.max(0)),
        ("mean", actions.mean(0)),
        ("std", actions.std(0)),
        ("q01", np.quantile(actions, 0.01, axis=0)),
        ("q99", np.quantile(actions, 0.99, axis=0)),
    ):
        assert np.allclose(stats["action"][name], value), name


def test_pooled_statistics_are_those_of_everything_together() -> None:
    parts = [np.random.default_rng(seed).normal(seed, 1 + seed, (5 + seed, 2)) for seed in range(3)]
    together, whole = pooled([of_numbers(part) for part in parts]), of_numbers(np.concatenate(parts))
    for name in ("min", "max", "mean", "std", "count"):
        assert np.allclose(together[name], whole[name]), name


def test_many_files_and_rows_in_one_piece_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodyrl.data.writer.DATA_FILE_MB", 0.002)
    monkeypatch.setattr("embodyrl.data.writer.VIDEO_FILE_MB", 0.001)
    written = write(tmp_path / "demos", spec(images=Images.video))
    assert len(list((tmp_path / "demos/data").rglob("*.parquet"))) > 1
    assert len(list((tmp_path / "demos/videos").rglob("*.mp4"))) > 2
    dataset = Dataset(tmp_path / "demos")
    assert all(np.array_equal(dataset.read(number).images, written[number].images) for number in range(4))


def test_a_dataset_written_as_one_piece_by_others_is_read(tmp_path: Path) -> None:
    written = write(tmp_path / "demos", spec())
    path = tmp_path / "demos/data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path), path, row_group_size=1000)
    tasks = tmp_path / "demos/meta/tasks.parquet"
    pq.write_table(pa.table({"task_index": [0, 1], "__index_level_0__": list(TASK_DESCRIPTIONS)}), tasks)
    dataset = Dataset(tmp_path / "demos")
    for number, each in enumerate(written):
        read = dataset.read(number)
        assert np.array_equal(read.actions, each.actions) and np.array_equal(read.images, each.images)
        assert read.task == each.task


def test_an_interrupted_recording_leaves_nothing_and_nothing_is_overwritten(tmp_path: Path) -> None:
    of = spec()
    with pytest.raises(RuntimeError), DatasetWriter(tmp_path / "demos", of) as writer:
        writer.add(episode(0, of, 3))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "demos", of)
    with pytest.raises(DatasetError, match="exists already and is never overwritten"):
        DatasetWriter(tmp_path / "demos", of)


def test_an_episode_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    of = spec()
    with DatasetWriter(tmp_path / "demos", of) as writer:
        for other, message in (
            (spec(action_names=("x",)), "actions has shape"),
            (spec(image_size=(20, 31)), "images has shape"),
            (spec(state_dim=0), "proprio is missing"),
            (spec(outcome=False), "rewards is missing"),
        ):
            with pytest.raises(ValueError, match=message):
                writer.add(episode(0, other, 3))


def change_info(folder: Path, **changes: object) -> None:
    path = folder / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_column(path: Path, name: str) -> None:
    pq.write_table(pq.read_table(path).drop_columns([name]), path)


def spoil(path: Path) -> None:
    """Damage the rows of a file, but not what is at its end."""
    content = path.read_bytes()
    path.write_bytes(content[:8] + bytes(len(content) // 4) + content[8 + len(content) // 4 :])


def replace_column(path: Path, name: str, cells: list[list[float]]) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, [cells]), path)


DATA, POSITIONS = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
DAMAGES = {
    "no folder": (lambda folder: folder.rename(folder.with_name("gone")), "do not exist: record some"),
    "no info": (lambda folder: (folder / "meta/info.json").unlink(), "holds no demonstrations"),
    "damaged info": (lambda folder: (folder / "meta/info.json").write_text("{"), "is damaged"),
    "old version": (
        lambda folder: change_info(folder, codebase_version="v2.1"),
        "version v2.1, this program reads v3.0",
    ),
    "no action": (lambda folder: change_info(folder, features={"index": {}}), "feature 'action' is missing"),
    "no fps": (lambda folder: change_info(folder, fps=0), "fps is 0"),
    "other total": (lambda folder: change_info(folder, total_frames=64), "lists 63 frames, but meta/info.json says 64"),
    "no data": (lambda folder: (folder / DATA).unlink(), "file-000.parquet is missing: the dataset is incomplete"),
    "damaged data": (lambda folder: (folder / DATA).write_bytes(b"PAR1 and so on"), "is damaged"),
    "damaged rows": (lambda folder: spoil(folder / DATA), "is damaged"),
    "no tasks": (lambda folder: (folder / "meta/tasks.parquet").unlink(), "tasks.parquet is missing"),
    "no column": (lambda folder: drop_column(folder / DATA, "action"), "has no column 'action'"),
    "few rows": (
        lambda folder: pq.write_table(pq.read_table(folder / DATA).slice(0, 50), folder / DATA),
        "has 50 rows, but an episode is said to end at 63",
    ),
    "narrow actions": (
        lambda folder: replace_column(folder / DATA, "action", [[0.0, 1.0]] * 63),
        "'action' in .* does not hold 3 numbers in every frame of episode 0, as meta/info.json says",
    ),
    "uneven states": (
        lambda folder: replace_column(folder / DATA, "observation.state", [[0.0]] + [[0.0, 1.0]] * 62),
        "'observation.state' in .* cannot be used: cells have different numbers of numbers in episode 0",
    ),
    "damaged positions": (lambda folder: spoil(folder / POSITIONS), "file-000.parquet is damaged"),
    "shifted rows": (
        lambda folder: pq.write_table(pa.concat_tables([pq.read_table(folder / DATA)] * 2).slice(1), folder / DATA),
        "holds other rows than episode",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_dataset_is_refused_with_words(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGES[name]
    write(tmp_path / "demos", spec())
    damage(tmp_path / "demos")
    with pytest.raises(DatasetError, match=message):
        dataset = Dataset(tmp_path / "demos")
        for number in range(4):
            dataset.read(number)


def test_a_video_that_ends_early_is_refused(tmp_path: Path) -> None:
    of = spec(images=Images.video)
    write(tmp_path / "demos", of)
    short = tmp_path / "short"
    with DatasetWriter(short, of) as writer:
        writer.add(episode(0, of, 10))
    name = "videos/observation.images.top/chunk-000/file-000.mp4"
    (short / name).replace(tmp_path / "demos" / name)
    with pytest.raises(DatasetError, match="before the episode at"):
        Dataset(tmp_path / "demos").read(3)


def test_channels_may_come_first_in_the_description(tmp_path: Path) -> None:
    write(tmp_path / "demos", spec())
    features = json.loads((tmp_path / "demos/meta/info.json").read_text())["features"]
    for key in ("observation.images.top", "observation.images.wrist"):
        features[key] |= {"shape": [3, 18, 31], "names": ["channels", "height", "width"]}
    change_info(tmp_path / "demos", features=features)
    assert Dataset(tmp_path / "demos").spec.image_size == (18, 31)


def test_pieces_in_memory_do_not_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"a": [1, 2, 3]}), path)
    assert storage.read_rows(path, 0, 2, {"a": storage.Kind.whole})["a"].tolist() == [1, 2]
    pq.write_table(pa.table({"a": [7, 8, 9]}), path)
    assert storage.read_rows(path, 0, 2, {"a": storage.Kind.whole})["a"].tolist() == [7, 8]
