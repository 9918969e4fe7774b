"""Data sets as other programs write them are read as what they hold."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demonstrations import write_numbered

pytest.importorskip("pyarrow", reason="demonstrations need pyarrow: pip install 'embodyrl[data]'")

import av
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from embodyrl.config import ConfigUse, load_config
from embodyrl.config.schema import FeatureNames
from embodyrl.data import image_files
from embodyrl.data.batches import Demonstrations
from embodyrl.data.check import check_to_imitate
from embodyrl.data.layout import DatasetError, Images
from embodyrl.data.reader import Dataset
from embodyrl.data.store import EpisodeStore

DATA, TASKS = "data/chunk-000/file-000.parquet", "meta/tasks.parquet"
EPISODES, RENDER = "meta/episodes/chunk-000/file-000.parquet", "observation.images.render"
LENGTHS = [4, 3, 5]


def change_features(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "meta/info.json"
    content = json.loads(path.read_text())
    change(content["features"])
    path.write_text(json.dumps(content))


def change_table(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def tasks_as(kind: pa.DataType) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        table = pq.read_table(folder / TASKS)
        values = pa.array(table["task"].to_pylist(), pa.string())
        values = values.dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)
        pq.write_table(pa.table({"task_index": table["task_index"], "task": values}), folder / TASKS)

    return change


def images_as_files(folder: Path) -> None:
    table = pq.read_table(folder / DATA)
    at, cells = table.schema.get_field_index(RENDER), table[RENDER].to_pylist()
    (folder / "images").mkdir()
    for number, cell in enumerate(cells):
        (folder / f"images/{number}.png").write_bytes(cell["bytes"])
    paths = [{"bytes": None, "path": f"images/{number}.png"} for number in range(len(cells))]
    for kind in (table.schema.field(at).type, None):  # as declared, and as found in cells of which all are empty
        pq.write_table(table.set_column(at, RENDER, pa.array(paths, kind)), folder / DATA)
        Dataset(folder).read(0)


def with_depth(folder: Path) -> None:
    name = "observation.images.depth"
    change_features(folder, lambda features: features.update({name: {"dtype": "float32", "shape": [16, 16]}}))
    change_table(folder / DATA, lambda table: table.append_column(name, pa.array([[0.5] * 256] * len(table))))


def with_another_camera(folder: Path) -> None:
    image = {"dtype": "video", "shape": [480, 640, 3], "names": ["height", "width", "channels"]}
    odd = {"dtype": "audio", "shape": "long"}
    change_features(folder, lambda features: features.update({"observation.images.wrist": image, "odd": odd}))


def channels_first(folder: Path) -> None:
    change_features(folder, lambda features: features[RENDER].update({"shape": [3, 16, 16], "names": None}))


AS_OTHERS = {
    "tasks of pandas 3": tasks_as(pa.large_string()),
    "tasks as views": tasks_as(pa.string_view()),
    "tasks as categories": tasks_as(pa.dictionary(pa.int32(), pa.string())),
    "images by path": images_as_files,
    "depth in numbers": with_depth,
    "a camera of another size, and an unknown feature": with_another_camera,
    "channels first, unnamed": channels_first,
}


def test_what_others_write_differently_is_read_alike(tmp_path: Path) -> None:
    wrong = {}
    for number, (name, change) in enumerate(AS_OTHERS.items()):
        folder = tmp_path / str(number)
        write_numbered(folder, LENGTHS, cameras=("render",), image_size=(16, 16))
        before = [Dataset(folder).read(each) for each in range(3)]
        change(folder)
        try:
            dataset = Dataset(folder, cameras=["render"])
            read = [dataset.read(each) for each in range(3)]
        except DatasetError as error:
            wrong[name] = str(error)
            continue
        for one, two in zip(before, read, strict=True):
            if one.task != two.task or not np.array_equal(one.images, two.images):
                wrong[name] = "read otherwise"
    assert wrong == {}


def renamed(folder: Path, names: dict[str, str]) -> None:
    """Give features of a data set other names."""
    for path in (DATA, EPISODES):
        change_table(
            folder / path,
            lambda table: table.rename_columns(
                ["/".join(names.get(part, part) for part in name.split("/")) for name in table.column_names]
            ),
        )
    for old, new in names.items():
        if (folder / "videos" / old).exists():
            (folder / "videos" / old).rename(folder / "videos" / new)
        change_features(folder, lambda features, old=old, new=new: features.update({new: features.pop(old)}))


def test_data_features_names_what_others_call_otherwise(tmp_path: Path) -> None:
    """The layouts of lerobot/pusht, from which env pusht learns, and of openpi's converters."""
    size = (96, 96)
    write_numbered(
        tmp_path / "pusht", LENGTHS, state_dim=2, action_names=("x", "y"), cameras=("p",), image_size=size,
        fps=10, images=Images.video,
    )  # fmt: skip
    before = Dataset(tmp_path / "pusht").read(1)
    renamed(tmp_path / "pusht", {"observation.images.p": "observation.image"})
    words = ["env=pusht/rgb", "model=cnn", "algorithm=sft", "data.path=not_here"]
    loaded = load_config("experiment/gym_pendulum", words, use=ConfigUse.elsewhere).config
    loaded = dataclasses.replace(loaded, data=dataclasses.replace(loaded.data, path=str(tmp_path / "pusht")))
    (said,) = check_to_imitate(loaded)
    assert "no images of camera 'pixels'" in said.message and "data.features.images.pixels" in said.hint
    named = dataclasses.replace(loaded.data, features=FeatureNames(images={"pixels": "observation.image"}))
    config = dataclasses.replace(loaded, data=named)
    assert list(check_to_imitate(config)) == []
    store = EpisodeStore.open(config)
    dataset = store.dataset
    assert np.array_equal(dataset.read(1).images, before.images) and np.array_equal(
        dataset.read(1).actions, before.actions
    )
    shown = Demonstrations(store)
    assert next(shown.batches(0, 1)).observation.images.shape == (12, 1, *size, 3)

    write_numbered(tmp_path / "openpi", LENGTHS, cameras=("base", "left"), image_size=(16, 16))
    before = Dataset(tmp_path / "openpi").read(2)
    renamed(
        tmp_path / "openpi",
        {
            "observation.images.base": "image",
            "observation.images.left": "wrist_image",
            "observation.state": "state",
            "action": "actions",
        },
    )
    names = FeatureNames(action="actions", state="state", images={"front": "image", "wrist": "wrist_image"})
    read = Dataset(tmp_path / "openpi", names, ["wrist", "front"]).read(2)
    assert np.array_equal(read.images, before.images[:, ::-1])
    assert np.array_equal(read.proprio, before.proprio) and np.array_equal(read.actions, before.actions)


def test_names_of_features_that_do_not_exist_are_faults(tmp_path: Path) -> None:
    write_numbered(tmp_path / "demos", LENGTHS, cameras=("render",), image_size=(64, 64))
    words = ["env=gym/pendulum_rgb", "model=cnn", "algorithm=sft", f"data.path={tmp_path / 'demos'}"]
    loaded = load_config("experiment/gym_pendulum", words, use=ConfigUse.show).config
    for names, said in (
        (FeatureNames(state="observation.stat"), "data.features.state names it, did you mean 'observation.state'?"),
        (FeatureNames(action="actions"), "data.features.action names it, did you mean 'action'?"),
        (FeatureNames(state="observation.stat"), "set data.features.state to what it is called there, or record"),
        (FeatureNames(action="episode_index"), "which data.features.action names, is read as something else"),
        (FeatureNames(images={"render": "render"}), "data.features.images.render names it"),
        (FeatureNames(images={"render": "action"}), "'action' is kept as 'float32', expected image or video"),
        (FeatureNames(images={"rander": RENDER}), "env.cameras has no camera 'rander' did you mean 'render'?"),
    ):
        config = dataclasses.replace(loaded, data=dataclasses.replace(loaded.data, features=names))
        issues = [f"{each.message} {each.hint}" for each in check_to_imitate(config)]
        assert any(said in issue for issue in issues), (said, issues)


def test_an_image_begins_where_the_lengths_say_and_a_start_time_that_differs_is_a_fault(tmp_path: Path) -> None:
    folder = tmp_path / "demos"
    write_numbered(folder, LENGTHS, cameras=("render",), image_size=(16, 16), images=Images.video)
    before = [Dataset(folder).read(number).images for number in range(3)]
    name = f"videos/{RENDER}/from_timestamp"
    table = pq.read_table(folder / EPISODES)
    starts = np.array(table[name].to_pylist())
    for frames in (0.2, -0.2, 0.3, -0.35, 0.7, -0.7, -1.0, np.nan):
        changed = pa.array(starts + np.array([0, frames / 2, frames]) / 20)
        pq.write_table(table.set_column(table.schema.get_field_index(name), name, changed), folder / EPISODES)
        if abs(frames) < 0.25:
            dataset = Dataset(folder)
            assert all(np.array_equal(dataset.read(number).images, before[number]) for number in range(3)), frames
        else:
            with pytest.raises(DatasetError, match=r"episode [12] of .* begins at .* before it in that file have"):
                Dataset(folder)


def test_videos_of_every_encoder_that_lerobot_offers_are_read(tmp_path: Path) -> None:
    """Takes about a second of processor time, most of it the start of the encoders."""
    path, wrong = tmp_path / "video.mp4", {}
    for codec in ("libx264", "libx265", "libsvtav1", "libvpx-vp9", "mpeg4"):
        if codec not in av.codecs_available:
            continue
        options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec, rate=10, options=options)
            stream.width = stream.height = 96
            stream.pix_fmt = "yuv420p"
            for number in range(20):
                image = np.full((96, 96, 3), 10 * number, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            container.mux(stream.encode(None))
        found = image_files.read_video(path, 7, 5, 10, (96, 96))[:, 50, 50, 0]
        if np.abs(found - np.arange(70.0, 120, 10)).max() > 4:
            wrong[codec] = found.tolist()
    assert wrong == {}


def test_only_images_of_the_named_formats_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an EPS file Pillow would start a program."""
    opened = []
    monkeypatch.setattr("subprocess.Popen", lambda *words, **_: opened.append(words))
    monkeypatch.setattr("subprocess.check_call", lambda *words, **_: opened.append(words))
    for format_, size, said in (
        ("EPS", (8, 8), "it is no PNG or JPEG file"),
        ("TIFF", (8, 8), "it is no PNG or JPEG file"),
        ("PNG", (8, 9), "it has 9x8 pixels, but the dataset says 8x8"),
        ("JPEG", (9, 8), "it has 8x9 pixels, but the dataset says 8x8"),
    ):
        buffer = io.BytesIO()
        Image.new("RGB", size).save(buffer, format_)
        with pytest.raises(image_files.ImageError, match=said):
            image_files.decode_image(buffer.getvalue(), (8, 8))
    assert opened == []


def test_links_are_followed_within_a_data_set_and_a_cache_of_the_hub_alone(tmp_path: Path) -> None:
    write_numbered(tmp_path / "demos", LENGTHS)
    blobs, snapshot = tmp_path / "datasets--a--b/blobs", tmp_path / "datasets--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    (tmp_path / "demos").rename(snapshot)
    for number, path in enumerate(path for path in [*snapshot.rglob("*")] if path.is_file()):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    assert len(Dataset(snapshot).read(2)) == LENGTHS[2]
    (tmp_path / "link").symlink_to(snapshot)
    assert len(Dataset(tmp_path / "link").read(2)) == LENGTHS[2]
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DatasetError, match="outside of the dataset"):
        Dataset(snapshot)


def test_a_row_group_or_an_episode_that_memory_has_no_room_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_numbered(tmp_path / "demos", LENGTHS, cameras=("render",), image_size=(512, 512))
    dataset, config = Dataset(tmp_path / "demos"), load_config("gym_pendulum").config

    def store(memory_mib: int) -> EpisodeStore:
        return EpisodeStore(
            dataset, dataclasses.replace(config, data=dataclasses.replace(config.data, memory_mib=memory_mib))
        )

    store(4).require_each()
    with pytest.raises(DatasetError, match=r"episode 2 of .* takes 4 MiB, more than data.memory_mib = 3: set .* to at"):
        store(3).require_each()
    monkeypatch.setattr("embodyrl.data.storage.LARGEST_GROUP", 100)
    with pytest.raises(DatasetError, match=r"row group 0 of .* takes 0 MiB, and at most 0 are read"):
        Dataset(tmp_path / "demos")
