"""`meta/info.json`: what a dataset says of itself. Checked before anything else is read, so that what is read next has
a known size and place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.config.schema import FeatureNames
from embodyrl.data.files import path_fault, read_json, shown, template_fault
from embodyrl.data.layout import (
    ANEW,
    COUNTERS,
    DATA_FILE_MB,
    DATA_PATH,
    ENDS,
    EXECUTED,
    FILES_PER_CHUNK,
    FRAME,
    IMAGES,
    INFO,
    PERTURBED,
    REWARD,
    STATE,
    STATS,
    SUCCESS,
    VERSION,
    VIDEO_FILE_MB,
    VIDEO_PATH,
    DatasetError,
    DatasetSpec,
    Images,
)
from embodyrl.errors import did_you_mean, shell_command

TOTALS = {"total_episodes": 10**6, "total_frames": 10**9, "total_tasks": 10**5}
"""Entries with numbers of rows, and the most that is read; the largest published datasets have a tenth."""
MOST_NUMBERS = 10_000
"""Most numbers in an action or a state."""
LONGEST_SIDE = 2048
"""Most rows or columns of an image, as for `env.image_size` [pixels]."""
CHANNELS = (1, 3, 4)
"""Channels that an image may have."""
LOWEST_FPS, HIGHEST_FPS = 0.01, 10_000.0
"""Range of the frames per second [Hz]."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """Contents of `meta/info.json`."""

    spec: DatasetSpec
    """Features that are read."""
    episodes: int
    frames: int
    tasks: int
    data_path: str = DATA_PATH
    video_path: str = VIDEO_PATH
    cameras: tuple[str, ...] = ()
    """All cameras, also those that are not read."""

    def write(self, folder: Path) -> None:
        """Write the file below `folder`."""
        in_videos = bool(self.spec.cameras) and self.spec.images is Images.video
        content = {
            "codebase_version": VERSION,
            "robot_type": self.spec.robot,
            "total_episodes": self.episodes,
            "total_frames": self.frames,
            "total_tasks": self.tasks,
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": DATA_FILE_MB,
            "video_files_size_in_mb": VIDEO_FILE_MB,
            "fps": self.spec.fps,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": self.data_path,
            "video_path": self.video_path if in_videos else None,
            "features": self.spec.features(),
        }
        (folder / INFO).parent.mkdir(parents=True, exist_ok=True)
        (folder / INFO).write_text(json.dumps(content, indent=4) + "\n")

    @classmethod
    def read(cls, folder: Path, names: FeatureNames | None = None, cameras: Sequence[str] | None = None) -> Info:
        """Read the file below `folder`.

        Args:
            folder: the dataset.
            names: names of its features; None: LeRobot's.
            cameras: cameras that are read, of those that there are; None: all.

        Raises:
            DatasetError: the file does not exist, is damaged, has another version, or has a missing or wrong entry.
        """
        content, names = _content(folder), names or FeatureNames()
        faults = list(_faults(content))
        if not faults:
            known = _cameras(content["features"], names)
            read = tuple(known) if cameras is None else tuple(camera for camera in cameras if camera in known)
            used = {camera: known[camera] for camera in read}
            if absent := dict(_absent(content["features"], names, used)):
                raise DatasetError(
                    f"{folder / INFO} lacks what is to be read: {'; '.join(absent.values())}",
                    f"set {' and '.join(absent)} to what it is called there, or record the dataset anew",
                )
            faults = list(_faults_of_features(content["features"], names, used))
        if faults:
            raise DatasetError(f"{folder / INFO} cannot be used: {'; '.join(faults)}", ANEW)
        return cls(
            spec=_spec(content, names, used, ends=(folder / ENDS).exists()),
            episodes=content["total_episodes"],
            frames=content["total_frames"],
            tasks=content["total_tasks"],
            data_path=content["data_path"],
            video_path=content.get("video_path") or VIDEO_PATH,
            cameras=tuple(known),
        )


def check_statistics(folder: Path) -> None:
    """Raise `DatasetError` if `meta/stats.json` is missing or damaged, as after a copy that was cut short."""
    read_json(folder, STATS)


def _content(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise DatasetError(
            f"demonstrations in {folder} do not exist",
            f"record some with `{shell_command('collect', 'CONFIG', '--out', folder)} --episodes N`",
        )
    if not (folder / INFO).exists():
        raise DatasetError(f"{folder} holds no demonstrations (no {INFO})", "give the folder of a LeRobotDataset")
    content = read_json(folder, INFO)
    version = content.get("codebase_version")
    if version != VERSION:
        raise DatasetError(
            f"{folder} is of LeRobotDataset version {shown(version).strip(chr(39))}, this program reads {VERSION}",
            "convert it with lerobot's own scripts, or record it anew",
        )
    return content


# -------------------------------------------------------------------------------------------------------------- entries


def _faults(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield texts about missing or wrong entries, without those of the features."""
    for name, most in TOTALS.items():
        if not _is_whole(content.get(name), most):
            yield f"{name} is {shown(content.get(name))}, expected a whole number from 1 to {most:,}"
    fps, robot, features = content.get("fps"), content.get("robot_type"), content.get("features")
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not LOWEST_FPS <= fps <= HIGHEST_FPS:
        yield f"fps is {shown(fps)}, expected a number from {LOWEST_FPS:g} to {HIGHEST_FPS:g}"
    if not isinstance(robot, str | None):
        yield f"robot_type is {shown(robot)}, expected a text or null"
    for name, fields, is_needed in (
        ("data_path", {"chunk_index", "file_index"}, True),
        ("video_path", {"chunk_index", "file_index", "video_key"}, False),
    ):
        template = content.get(name)
        if template is None and not is_needed:
            continue
        wrong = template_fault(template, fields) if isinstance(template, str) else "is no text"
        if wrong is not None:
            yield f"{name} is {shown(template)}, which {wrong}"
    if not isinstance(features, dict) or not all(isinstance(each, dict) for each in features.values()):
        yield f"features is {shown(features)}, expected a mapping of mappings"


def _is_whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


# ------------------------------------------------------------------------------------------------------------- features

Features = Mapping[str, Mapping[str, Any]]


def _cameras(features: Features, names: FeatureNames) -> dict[str, str]:
    """Return the features with images, by camera. Others below `observation.images`, such as depth in numbers, are
    none."""
    found = {
        name.removeprefix(IMAGES): name
        for name, each in features.items()
        if name.startswith(IMAGES) and each.get("dtype") in tuple(Images)
    }
    return found | names.images


def _settings(names: FeatureNames, cameras: Mapping[str, str]) -> dict[str, str]:
    """Return the feature that each setting names."""
    of_cameras = {f"data.features.images.{camera}": name for camera, name in cameras.items()}
    return {"data.features.action": names.action, "data.features.state": names.state, **of_cameras}


def _absent(features: Features, names: FeatureNames, cameras: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield settings that name a feature which is not there, each with a text."""
    for setting, name in _settings(names, cameras).items():
        if name not in features and name != STATE:
            known = ", ".join(map(shown, list(features)[:20]))
            near = did_you_mean(name, features, lead=", ")
            yield setting, f"feature {name!r} is missing (there are: {known}); {setting} names it{near}"


def _faults_of_features(features: Features, names: FeatureNames, cameras: Mapping[str, str]) -> Iterator[str]:
    """Yield texts about wrong features that are read. Others may be anything."""
    for setting, name in _settings(names, cameras).items():
        if name in (*COUNTERS, SUCCESS, PERTURBED):
            yield f"feature {name!r}, which {setting} names, is read as something else"
    for name in ("episode_index", "task_index"):
        if name not in features:
            yield f"feature {name!r} is missing"
    for name in (names.action, names.state, EXECUTED):
        shape = _shape(features[name]) if name in features else (1,)
        if len(shape) != 1 or shape[0] > MOST_NUMBERS:
            yield (
                f"feature {name!r} has shape {shown(features[name].get('shape'))}, expected one whole number from 1 to "
                f"{MOST_NUMBERS:,}"
            )
    shapes = {_shape(features[name]) for name in (names.action, EXECUTED) if name in features}
    if len(shapes - {()}) > 1:
        yield f"features {names.action!r} and {EXECUTED!r} differ in shape"
    yield from _faults_of_images(
        {camera: features[name] for camera, name in cameras.items() if name in features}, cameras
    )


def _faults_of_images(images: Features, keys: Mapping[str, str]) -> Iterator[str]:
    """Yield texts about the features of cameras."""
    for camera, each in images.items():
        key = keys[camera]
        if each.get("dtype") not in tuple(Images):
            yield f"feature {key!r} is kept as {shown(each.get('dtype'))}, expected image or video"
        if _size(each) is None:
            yield (
                f"feature {key!r} has shape {shown(each.get('shape'))}, expected height and width up to "
                f"{LONGEST_SIDE} and {', '.join(map(str, CHANNELS))} channels"
            )
        if fault := path_fault(key):
            yield f"feature {shown(key)} {fault}"
    sizes = {camera: _size(each) for camera, each in images.items()}
    if len(set(sizes.values())) > 1 and None not in sizes.values():
        each_size = ", ".join(f"{camera!r} {size[0]}x{size[1]}" for camera, size in sizes.items() if size is not None)
        yield (
            f"its cameras differ in image size ({each_size}), which this program does not support: name some of one "
            "size in env.cameras"
        )
    if len({shown(each.get("dtype")) for each in images.values()}) > 1:
        yield "some cameras are kept as images and some as videos, which this program does not support"


def _shape(feature: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a feature; empty if it has none, or a wrong one."""
    shape = feature.get("shape")
    if not isinstance(shape, list) or len(shape) > 3 or not all(_is_whole(each, 10**9) for each in shape):
        return ()
    return tuple(shape)


def _size(feature: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return height and width of a feature with images, of which some have channels first; None if it has none."""
    shape, names = _shape(feature), feature.get("names")
    if len(shape) != 3:
        return None
    is_named_first = isinstance(names, list) and bool(names) and str(names[0]).startswith("c")
    *last, channels = shape
    first, second = shape[0] in CHANNELS, channels in CHANNELS
    height, width = shape[1:] if first and (is_named_first or not second) else last
    return (height, width) if (first or second) and max(height, width) <= LONGEST_SIDE else None


def _spec(content: Mapping[str, Any], names: FeatureNames, cameras: Mapping[str, str], *, ends: bool) -> DatasetSpec:
    features = content["features"]
    first = features[next(iter(cameras.values()))] if cameras else None
    (actions,) = _shape(features[names.action])
    named = features[names.action].get("names")
    is_named = isinstance(named, list) and len(named) == actions
    return DatasetSpec(
        action_names=tuple(map(str, named)) if is_named else tuple(f"action_{index}" for index in range(actions)),
        state_dim=_shape(features[names.state])[0] if names.state in features else 0,
        cameras=tuple(cameras),
        image_size=(first and _size(first)) or (0, 0),
        fps=content["fps"],
        robot=content.get("robot_type"),
        images=Images(first["dtype"]) if first else Images.image,
        outcome={REWARD, SUCCESS} <= features.keys(),
        perturbed=PERTURBED in features,
        executed=EXECUTED in features,
        counted=FRAME in features,
        ends=ends,
        names=names,
    )
