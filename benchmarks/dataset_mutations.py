"""Check hundreds of damaged data sets: each must be accepted or refused with words, in bounded time and memory.

Two small valid data sets, with images in tables and in videos, are damaged: values of `meta/info.json` and
`meta/stats.json`, types and values of Parquet columns, bytes of files, files that are pipes, folders or links, images
and videos in other formats and sizes, and what is small on disk but large in memory. Every damage depends only on
`--seed` and its number: each of some 230 kinds once, then drawn ones. What `embodyrl validate` checks of a data set is
checked, and all frames are read, in a process that may take 1 GB more than before. A traceback, a hang, a dead process,
and a data set that is read although the damage makes it wrong, count as failures, and the exit code is then 1. A share
goes through `embodyrl validate` itself.

    nice python benchmarks/dataset_mutations.py [--count 500] [--programs 25] [--seed 1] [--only N]
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import platform
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
import wave
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from embodyrl.config import ConfigUse, load_config
from embodyrl.config.schema import Config
from embodyrl.data.check import check_to_imitate
from embodyrl.data.layout import DatasetError, DatasetSpec, Episode, Images
from embodyrl.data.store import EpisodeStore
from embodyrl.data.writer import DatasetWriter
from embodyrl.version import __version__

SLOW_S, HANG_S = 10.0, 60
"""Limits of processor time and of time per data set [s]."""
MEMORY = 10**9
"""Memory that reading one may take [bytes]."""
LENGTHS, SIDE, KEY = (6, 5, 7), 64, "observation.images.render"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES, DATA = "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"
VIDEO, ENDS = f"videos/{KEY}/chunk-000/file-000.mp4", "meta/ends.parquet"

OVERRIDES = ["experiment/gym_pendulum", "env=gym/pendulum_rgb", "model=cnn", "algorithm=sft"]
"""The config that learns from the data sets."""

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 2.5, 0.4, 1e308, -1e308, float("nan"), float("inf"), 10**15, 10**400, -(10**30)),
    *("", "no", "0", "3", "../../x", "/dev/zero", "\x00", "\x1b[2J", "é", "{nope}", "{", "x" * 10**5, "float32"),
    *([], {}, [[]], [0], [-3], [3], ["3"], [10**12], [64, 64, 3], [3, 64, 64], [10**6, 10**6, 3], [1] * 1000),
    *({"a": 1}, {"dtype": "image"}, {"shape": [3]}, [None], [True], [1.5], {"dtype": [], "shape": {}}),
]
TEMPLATES = [
    *("{nope}", "{chunk_index", "{0}", "{}", "{chunk_index!r}", "{chunk_index.real}", "{chunk_index:999999999d}"),
    *("{video_key.__class__}", "../data.parquet", "/etc/passwd", "data/../../x.parquet", "{chunk_index:>{file_index}}"),
    *("", "data", "\x00", "x" * 5000, "data/{chunk_index:x}", "/proc/self/mem", "{video_key[0]}", "data\\x"),
]
"""Names of files that no data set has."""


@dataclass
class Outcome:
    """Result of one data set."""

    number: int
    damage: str
    kind: str
    """`valid`, `refused`, `accepted` (although it is wrong), `traceback`, `hang`, `memory` or `died`."""
    cpu_s: float
    """Processor time [s]."""
    what: str = ""
    """The message or the traceback."""

    @property
    def is_failure(self) -> bool:
        """Whether that must not happen."""
        return self.kind not in ("valid", "refused") or self.cpu_s > SLOW_S


@dataclass(frozen=True)
class Damage:
    """A kind of damage."""

    name: str
    apply: Callable[[random.Random, Path], object]
    """Damages the data set in a folder."""
    is_wrong: bool = True
    """Whether the data set cannot be read afterwards, or has other contents than it says."""
    of: Images | None = None
    """The data sets that it is for; None: both."""
    is_heavy: bool = False
    """Whether making it takes seconds."""


def write_originals(folder: Path) -> None:
    """Write the two valid data sets to `folder/image` and `folder/video`."""
    for images in Images:
        rng = np.random.default_rng(0)
        is_table = images is Images.image
        spec = DatasetSpec(
            action_names=("torque",),
            state_dim=3,
            cameras=("render",),
            image_size=(SIDE, SIDE),
            fps=20,
            images=images,
            outcome=True,
            perturbed=is_table,
            executed=is_table,
            ends=is_table,
        )
        with DatasetWriter(folder / images.value, spec) as writer:
            for length in LENGTHS:
                shown = rng.integers(0, 256, (length + 1, 1, 1, 1, 3), np.uint8).repeat(SIDE, 2).repeat(SIDE, 3)
                states = rng.uniform(-1, 1, (length + 1, 3)).astype(np.float32)
                actions = rng.uniform(-2, 2, (length, 1)).astype(np.float32)
                marks: dict[str, Any] = {
                    "perturbed": np.zeros(length, np.bool_),
                    "executed": actions,
                    "last_proprio": states[-1],
                    "last_images": shown[-1],
                }
                writer.add(
                    Episode(
                        task="swing up",
                        actions=actions,
                        proprio=states[:-1],
                        images=shown[:-1],
                        rewards=np.zeros(length, np.float32),
                        success=np.zeros(length, np.bool_),
                        **(marks if is_table else {}),
                    )
                )


# --------------------------------------------------------------------------------------------------------- JSON


def set_entry(*path: str | int, to: Any, name: str = INFO) -> Callable[[random.Random, Path], None]:
    """Return what sets an entry of a JSON file."""

    def apply(draw: random.Random, folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        section = content
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = to(draw) if callable(to) else to
        (folder / name).write_text(json.dumps(content))

    return apply


def mutate_entry(draw: random.Random, folder: Path) -> None:
    """Change, remove or rename any entry of a description."""
    file = folder / draw.choice([INFO, INFO, INFO, STATS])
    content = json.loads(file.read_text())
    section, key = content, draw.choice(list(content))
    while isinstance(section[key], dict | list) and section[key] and draw.random() < 0.75:
        section = section[key]
        key = draw.choice(list(section) if isinstance(section, dict) else list(range(len(section))))
    match draw.choice(["value", "value", "value", "remove", "rename"]):
        case "value":
            section[key] = draw.choice(VALUES)
        case "remove":
            del section[key]
        case "rename":
            old = section[key] if isinstance(section, list) else section.pop(key)
            section.append(old) if isinstance(section, list) else section.update({f"{key}s": old})
    file.write_text(json.dumps(content))


def text_of(text: str | bytes, name: str = INFO) -> Callable[[random.Random, Path], object]:
    """Return what replaces a file's contents."""
    return lambda draw, folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


# ------------------------------------------------------------------------------------------------------- tables


def set_column(file: str, name: str, to: Callable[[int], pa.Array]) -> Callable[[random.Random, Path], None]:
    """Return what replaces a column by one of as many rows."""

    def apply(draw: random.Random, folder: Path) -> None:
        table = pq.read_table(folder / file)
        at = table.schema.get_field_index(name)
        table = table.remove_column(at) if at >= 0 else table
        pq.write_table(table.append_column(name, to(len(table))), folder / file)

    return apply


def change_cells(
    file: str, name: str, change: Callable[[list[Any]], list[Any]]
) -> Callable[[random.Random, Path], None]:
    """Return what changes cells of a column, whose type stays."""

    def apply(draw: random.Random, folder: Path) -> None:
        table = pq.read_table(folder / file)
        at, kind = table.schema.get_field_index(name), table.schema.field(name).type
        pq.write_table(table.set_column(at, name, pa.array(change(table[name].to_pylist()), kind)), folder / file)

    return apply


def change_table(file: str, change: Callable[[pa.Table], pa.Table]) -> Callable[[random.Random, Path], None]:
    """Return what changes a table as a whole."""
    return lambda draw, folder: pq.write_table(change(pq.read_table(folder / file)), folder / file)


def mutate_column(draw: random.Random, folder: Path) -> None:
    """Give any column of any table other contents, or another type, or remove it."""
    file = draw.choice([name for name in (DATA, DATA, EPISODES, TASKS, ENDS) if (folder / name).exists()])
    table = pq.read_table(folder / file)
    name = draw.choice([name for name in table.column_names if not name.startswith("stats/")])
    count = len(table)
    arrays = [
        lambda: pa.array(["no"] * count),
        lambda: pa.array([None] * count),
        lambda: pa.array([draw.choice([-1, 0, 1, 7, 2**62, -(2**63)])] * count),
        lambda: pa.array([draw.choice([float("nan"), float("inf"), 1e300, 0.5, -3.0])] * count),
        lambda: pa.array([True] * count),
        lambda: pa.array([[1.0] * draw.randrange(5) for _ in range(count)]),
        lambda: pa.array([[[1]]] * count),
        lambda: pa.array([{"bytes": b"x", "path": "../../../../etc/passwd"}] * count),
        lambda: pa.array([b"\x00"] * count),
        lambda: pa.array([2**64 - 1] * count, pa.uint64()),
        lambda: pa.array(["a"] * count).dictionary_encode(),
        lambda: pa.array([1] * count).cast(pa.timestamp("s")),
    ]
    table = table.remove_column(table.schema.get_field_index(name))
    if draw.random() < 0.85:
        table = table.append_column(name, draw.choice(arrays)())
    pq.write_table(table, folder / file)


def flip_bytes(draw: random.Random, folder: Path) -> None:
    """Change some bytes of any file, mostly where its description is."""
    file = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content = bytearray(file.read_bytes())
    begin = draw.choice([0, max(0, len(content) - 1500)])
    for _ in range(draw.choice([1, 3, 30])):
        content[draw.randrange(begin, len(content))] = draw.randrange(256)
    file.write_bytes(content)


def cut(draw: random.Random, folder: Path) -> None:
    """Cut off the end of any file."""
    file = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


def repeat_rows(count: int) -> Callable[[pa.Table], pa.Table]:
    """Return what repeats the first row of a table so often: little on disk, much in memory."""

    def change(table: pa.Table) -> pa.Table:
        wide = {"action", "episode_index", "task_index", "length", "__index_level_0__", "task"}
        table = table.slice(0, 1).select([name for name in table.column_names if name in wide])
        columns = {name: pa.repeat(table[name][0], count) for name in table.column_names}
        return pa.table(columns)

    return change


def repeat_image(cell: dict[str, Any]) -> Callable[[random.Random, Path], None]:
    """Return what puts the same file into every cell of the images."""
    return change_cells(DATA, KEY, lambda cells: [cell] * len(cells))


# --------------------------------------------------------------------------------------------- files of other kinds


def replace(name: str, by: Callable[[Path], object]) -> Callable[[random.Random, Path], object]:
    """Return what puts something else in the place of a file."""

    def apply(draw: random.Random, folder: Path) -> None:
        (folder / name).unlink()
        by(folder / name)

    return apply


def move_outside(draw: random.Random, folder: Path, name: str = "") -> None:
    """Move a file or folder out of the data set, with a link in its place."""
    path = folder / (name or draw.choice([INFO, TASKS, DATA, EPISODES, "meta", "data"]))
    outside = folder.with_name(f"{folder.name}-outside")
    shutil.move(path, outside)
    path.symlink_to(outside)


def name_image(path: str, make: Callable[[Path], object] = lambda path: None) -> Callable[[random.Random, Path], None]:
    """Return what keeps images by a path, at which `make` puts something."""

    def apply(draw: random.Random, folder: Path) -> None:
        make(folder / "odd")
        repeat_image({"bytes": None, "path": path})(draw, folder)

    return apply


def image_file(form: str, mode: str = "RGB", size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """Return an image in some format, by Pillow's name."""
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, form)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that says it is so large, and holds a few bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def repeated(value: Any) -> Callable[[int], Any]:
    """Return what makes a column of one value."""
    return lambda count: pa.array([value] * count)


def starting(value: Any) -> Callable[[list[Any]], list[Any]]:
    """Return what puts another start time in the place of the last."""
    return lambda cells: [0.0, 0.3, value]


def film(path: Path, *, size: int = SIDE, rate: int = 20, count: int = sum(LENGTHS), codec: str = "libx264") -> None:
    """Write a video."""
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width = stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for index in range(count):
            image = np.full((size, size, 3), 8 * index % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))


def sound(path: Path) -> None:
    """Write an MP4 that is only heard."""
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def wav(path: Path) -> None:
    """Write a sound file."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(8000))


def sparse(path: Path) -> None:
    """Write a file of 1 TB that takes no room."""
    with path.open("wb") as file:
        file.truncate(10**12)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n"
PIPED = [INFO, STATS, TASKS, EPISODES, DATA]
TABLE, FILM = Images.image, Images.video


def _in_info() -> list[Damage]:
    found = [
        Damage(f"{name} = {str(value)[:20]}", set_entry(name, to=value))
        for name in ("total_episodes", "total_frames", "total_tasks")
        for value in (10**15, -1, True, "3", float("nan"))
    ]
    found += [Damage(f"fps = {value}", set_entry("fps", to=value)) for value in (float("nan"), 0, -20, "20", 10**400)]
    found += [Damage(f"data_path {text[:20]!r}", set_entry("data_path", to=text)) for text in TEMPLATES]
    found += [
        Damage(f"video_path {text[:20]!r}", set_entry("video_path", to=text), of=FILM) for text in TEMPLATES if text
    ]
    found += [
        Damage(f"shape {shape} of {name}", set_entry("features", name, "shape", to=shape))
        for name in ("action", "observation.state")
        for shape in ([10**12], [0], [-1], ["3"], [], None, [1, 1], [1.0], 3)
    ]
    found += [
        Damage(f"shape {shape} of images", set_entry("features", KEY, "shape", to=shape))
        for shape in ([10**12, 64, 3], [64, 64], [64, 64, 3, 1], [64, 64, 0], None, ["64", 64, 3], [2000, 2000, 3])
    ]
    return [
        *found,
        Damage("robot_type of another type", set_entry("robot_type", to=["x"])),
        Damage("features without entries", set_entry("features", "action", to=3)),
        Damage("features as a list", set_entry("features", to=[1, 2])),
        Damage("info is a list", text_of("[]")),
        Damage("info is deep", text_of("[" * 10**5)),
        Damage("info is no text", text_of(b"\xff\xfe\x00")),
        Damage("info has a long number", text_of('{"codebase_version": ' + "9" * 10**5 + "}")),
        Damage("stats is a list", text_of("[]", STATS)),
    ]


def _in_tables() -> list[Damage]:
    texts = {
        name: set_column(DATA, name, lambda count: pa.array(["no"] * count))
        for name in ("next.success", "next.reward", "action", "observation.state", "episode_index", "task_index")
    }
    empty = {
        name: set_column(DATA, name, lambda count: pa.array([None] * count, pa.float64()))
        for name in ("next.success", "action", "episode_index")
    }
    positions = [
        Damage(f"{name} = {value}", set_column(EPISODES, name, repeated(value)))
        for name in ("length", "data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index")
        for value in (-1, 2**62, 1.5, "0")
    ]
    starts = [
        Damage(
            f"from_timestamp {value}",
            change_cells(EPISODES, f"videos/{KEY}/from_timestamp", starting(value)),
            of=FILM,
        )
        for value in (0.0, 0.55 - 0.7 / 20, 0.55 + 0.3 / 20, float("nan"), float("inf"), -1e300, 1e15)
    ]
    return [
        *(Damage(f"text as {name}", apply) for name, apply in texts.items()),
        *(Damage(f"empty {name}", apply) for name, apply in empty.items()),
        *positions,
        *starts,
        Damage("success is 2", set_column(DATA, "next.success", lambda count: pa.array([2] * count))),
        Damage(
            "success is 0 or 1", set_column(DATA, "next.success", lambda count: pa.array([0] * count)), is_wrong=False
        ),
        Damage("one action is empty", change_cells(DATA, "action", lambda cells: [None, *cells[1:]])),
        Damage(
            "states of other sizes",
            set_column(DATA, "observation.state", lambda count: pa.array([[1.0] * 2, [1.0] * 4] * (count // 2))),
        ),
        Damage("frames in another order", change_table(DATA, lambda table: table.take([1, 0, *range(2, len(table))]))),
        Damage("a task number too many", change_cells(DATA, "task_index", lambda cells: [7] * len(cells))),
        Damage("column twice", change_table(DATA, lambda table: table.append_column("action", table["action"]))),
        Damage("rows missing", change_table(DATA, lambda table: table.slice(0, 9))),
        Damage("no rows", change_table(DATA, lambda table: table.slice(0, 0))),
        Damage("no episodes", change_table(EPISODES, lambda table: table.slice(0, 0))),
        Damage("episodes twice", change_table(EPISODES, lambda table: pa.concat_tables([table, table]))),
        Damage("tasks twice", change_table(TASKS, lambda table: pa.concat_tables([table, table]))),
        Damage("task is empty", change_cells(TASKS, "task", lambda cells: [None])),
        Damage("task of 10 MB", change_cells(TASKS, "task", lambda cells: ["x" * 10**7])),
        Damage("10^8 rows", change_table(DATA, repeat_rows(10**8)), is_heavy=True),
        Damage("10^7 episodes", change_table(EPISODES, repeat_rows(10**7)), is_heavy=True),
        Damage("10^7 tasks", change_table(TASKS, repeat_rows(10**7)), is_heavy=True),
        Damage(
            "tasks of pandas 3",
            change_table(
                TASKS, lambda table: table.cast(pa.schema([("task_index", pa.int64()), ("task", pa.large_string())]))
            ),
            is_wrong=False,
        ),
    ]


def _in_files() -> list[Damage]:
    kinds: dict[str, Callable[[Path], object]] = {
        "a pipe": os.mkfifo,
        "a folder": Path.mkdir,
        "nothing": lambda path: None,
        "empty": Path.touch,
        "1 TB of nothing": sparse,
        "a link to itself": lambda path: path.symlink_to(path),
        "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    }
    found = [Damage(f"{name} is {kind}", replace(name, by)) for name in PIPED for kind, by in kinds.items()]
    found += [Damage(f"{VIDEO} is {kind}", replace(VIDEO, by), of=FILM) for kind, by in kinds.items()]
    found += [
        Damage(f"{ENDS} is {kind}", replace(ENDS, by), of=TABLE)
        for kind, by in kinds.items()
        if kind not in ("nothing", "a link to itself")
    ]
    return [
        *found,
        Damage("a link leads out", move_outside),
        Damage("a link of a video leads out", lambda draw, folder: move_outside(draw, folder, VIDEO), of=FILM),
    ]


def _in_images() -> list[Damage]:
    contents = {
        "EPS": EPS,
        "TIFF": image_file("TIFF"),
        "GIF": image_file("GIF"),
        "ICO": image_file("ICO"),
        "BMP": image_file("BMP"),
        "a bomb": png_header(50_000, 50_000),
        "a lie": png_header(SIDE, SIDE),
        "other size": image_file("PNG", size=(SIDE, SIDE + 1)),
        "16 bits": image_file("PNG", "I;16"),
        "cut": image_file("PNG")[:60],
        "empty": b"",
        "text": b"no image",
        "absent": None,
    }
    paths: dict[str, tuple[str, Callable[[Path], object]]] = {
        "outside": ("../../../../../../etc/passwd", lambda path: None),
        "absolute": ("/etc/passwd", lambda path: None),
        "a pipe": ("odd", os.mkfifo),
        "a folder": ("odd", Path.mkdir),
        "1 TB": ("odd", sparse),
        "too long": ("x" * 5000, lambda path: None),
        "NUL": ("\x00", lambda path: None),
        "/dev/zero": ("odd", lambda path: path.symlink_to("/dev/zero")),
    }
    good = lambda path: path.write_bytes(image_file("PNG"))  # noqa: E731
    return [
        *(
            Damage(f"image is {name}", repeat_image({"bytes": data, "path": None}), of=TABLE)
            for name, data in contents.items()
        ),
        *(Damage(f"image at {name}", name_image(path, make), of=TABLE) for name, (path, make) in paths.items()),
        Damage("image at a path", name_image("odd", good), is_wrong=False, of=TABLE),
        Damage("image is JPEG", repeat_image({"bytes": image_file("JPEG"), "path": None}), is_wrong=False, of=TABLE),
        Damage(
            "image is grey", repeat_image({"bytes": image_file("PNG", "L"), "path": None}), is_wrong=False, of=TABLE
        ),
        Damage("images of 30 MB", repeat_image({"bytes": bytes(3 * 10**7), "path": None}), of=TABLE, is_heavy=True),
        Damage("images as texts", set_column(DATA, KEY, lambda count: pa.array(["x"] * count)), of=TABLE),
    ]


def _in_videos() -> list[Damage]:
    makers: dict[str, Callable[[Path], object]] = {
        "sound": sound,
        "a WAV": wav,
        "larger": lambda path: film(path, size=128),
        "slower": lambda path: film(path, rate=10),
        "faster": lambda path: film(path, rate=40),
        "short": lambda path: film(path, count=10),
        "of JPEGs": lambda path: film(path, codec="mjpeg"),
        "a playlist": lambda path: path.write_text(
            "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n"
        ),
        "a list of files": lambda path: path.write_text("ffconcat version 1.0\nfile /etc/passwd\n"),
        "an image": lambda path: path.write_bytes(image_file("PNG")),
    }
    return [
        *(Damage(f"video is {name}", replace(VIDEO, by), of=FILM) for name, by in makers.items()),
        Damage("video of another encoder", replace(VIDEO, film), is_wrong=False, of=FILM),
    ]


@cache
def damages() -> list[Damage]:
    """Return every kind of damage; those at the end are drawn at random."""
    return [*_in_info(), *_in_tables(), *_in_files(), *_in_images(), *_in_videos(), *drawn()]


def drawn() -> list[Damage]:
    """Return damages that differ from number to number, and may leave a valid data set."""
    appliers = (mutate_entry, mutate_column, flip_bytes, cut)
    return [Damage(apply.__name__, apply, is_wrong=False) for apply in appliers]


def damage_of(number: int) -> Damage:
    """Return the damage of a number: each kind once, then those that are drawn."""
    every = damages()
    return every[number] if number < len(every) else drawn()[number % len(drawn())]


def write(seed: int, number: int, originals: Path, folder: Path) -> Damage:
    """Write the damaged data set of that number."""
    draw = random.Random(f"{seed}:{number}")
    damage = damage_of(number)
    kind = damage.of or draw.choice(list(Images))
    shutil.copytree(originals / kind.value, folder)
    damage.apply(draw, folder)
    return damage


# ------------------------------------------------------------------------------------------------------ judging


@cache
def config() -> Config:
    """Return a config that learns from such data sets."""
    return load_config(OVERRIDES[0], [*OVERRIDES[1:], "data.path=x"], use=ConfigUse.show).config


def judge(folder: Path, is_wrong: bool) -> tuple[str, str]:
    """Check a data set and read all of it, in this process; returns the kind of outcome and a text."""
    chosen = dataclasses.replace(config(), data=dataclasses.replace(config().data, path=str(folder)))
    try:
        issues = list(check_to_imitate(chosen))
        if issues:
            return ("refused", issues[0].message) if all(each.message for each in issues) else ("traceback", "no words")
        dataset = EpisodeStore.open(chosen).dataset
        for number in range(len(dataset.episodes)):
            dataset.read(number)
    except DatasetError as error:
        return "refused", str(error)
    except (MemoryError, pa.ArrowMemoryError):
        return "memory", traceback.format_exc()
    except Exception:  # what this is looking for
        return "traceback", traceback.format_exc()
    return ("accepted" if is_wrong else "valid"), ""


def try_apart(seed: int, number: int, originals: Path) -> Outcome:
    """Judge the data set of that number in a process of its own, with limits of memory and time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "a", "b", "c", "demos")
        folder.parent.mkdir(parents=True)
        damage = write(seed, number, originals, folder)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _limit()
            os.write(writer, json.dumps(judge(folder, damage.is_wrong))[:60_000].encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read()
        _, status, used = os.wait4(child, 0)
        cpu_s = used.ru_utime + used.ru_stime
    if not said:
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU)
        return Outcome(number, damage.name, "hang" if is_late else "died", cpu_s, f"status {status}")
    kind, what = json.loads(said)
    return Outcome(number, damage.name, kind, cpu_s, what)


def _limit() -> None:
    """Limit this process: its memory, and by a signal that ends it, its time."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(HANG_S)


def validate(seed: int, number: int, originals: Path) -> Outcome:
    """Judge the data set of that number by `embodyrl validate`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "a", "b", "c", "demos")
        folder.parent.mkdir(parents=True)
        damage = write(seed, number, originals, folder)
        before = os.times()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "embodyrl", "validate", *OVERRIDES, f"data.path={folder}"],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                capture_output=True,
                text=True,
                timeout=120,
            )
        except subprocess.TimeoutExpired:
            return Outcome(number, damage.name, "hang", 0.0)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    said = done.stdout + done.stderr
    is_sound = done.returncode in (0, 2) and "Traceback" not in said and "\x1b" not in said and said.strip()
    kind = {0: "valid", 2: "refused"}[done.returncode] if is_sound else "traceback"
    return Outcome(number, damage.name, kind, cpu_s, said)


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Count results."""
    counts = Counter(outcome.kind for outcome in outcomes)
    kinds = ("valid", "refused", "accepted", "traceback", "hang", "memory", "died")
    return {
        "data sets": len(outcomes),
        **{kind: counts[kind] for kind in kinds},
        "most_cpu_s": round(max((outcome.cpu_s for outcome in outcomes), default=0.0), 2),
        "failures": [asdict(each) for each in outcomes if each.is_failure][:50],
    }


def main() -> None:
    """Damage, judge, count and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="data sets that are judged in processes of this program")
    parser.add_argument("--programs", type=int, default=25, help="those of them that `embodyrl validate` is given, too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="show what comes of the data set of that number")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/dataset_mutations.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        originals = Path(name)
        write_originals(originals)
        numbers = range(args.count) if args.only is None else [args.only]
        judged = [try_apart(args.seed, number, originals) for number in numbers]
        if args.only is not None:
            print(judged[0].damage, judged[0].kind, judged[0].what, sep="\n")
            return
        step = max(1, args.count // args.programs) | 1 if args.programs else args.count + 1
        asked = [validate(args.seed, number, originals) for number in range(step // 2, args.count, step)]
    found = {
        "version": __version__,
        "python": platform.python_version(),
        "seed": args.seed,
        "read": summary(judged),
        "embodyrl validate": summary(asked),
    }
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    if any(each.is_failure for each in [*judged, *asked]):
        sys.exit(1)


if __name__ == "__main__":
    main()
