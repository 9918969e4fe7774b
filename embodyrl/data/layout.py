"""LeRobotDataset v3.0 on disk: names of files and columns, features of frames; episodes and minibatches in memory.

    meta/info.json                                  features of a frame, numbers of frames and episodes
    meta/stats.json                                 minimum, maximum, mean, ... of every feature
    meta/tasks.parquet                              task descriptions
    meta/episodes/chunk-000/file-000.parquet        positions and statistics of each episode
    meta/ends.parquet                               what followed the last action of each episode (ours alone)
    data/chunk-000/file-000.parquet                 a row per frame; images as PNG if they are stored as images
    videos/<feature>/chunk-000/file-000.mp4         images if they are stored as videos

The layout is that of huggingface/lerobot, `src/lerobot/datasets`. Imports nothing heavy, so that a config is checked
quickly.

Shapes: `T` frames of an episode, `V` cameras, `H, W` pixels, `S` proprio dims, `D` action dims, `M` samples of a
minibatch, `C` actions in a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import FeatureNames
from embodyrl.envs import Observation
from embodyrl.errors import RemediedError

VERSION = "v3.0"
INFO = Path("meta/info.json")
STATS = Path("meta/stats.json")
TASKS = Path("meta/tasks.parquet")
ENDS = Path("meta/ends.parquet")
PERTURB = Path("meta/perturb.json")
EPISODES = "meta/episodes"
NUMBERED = "chunk-{chunk_index:03d}/file-{file_index:03d}"
EPISODES_PATH = f"{EPISODES}/{NUMBERED}.parquet"
DATA_PATH = f"data/{NUMBERED}.parquet"
VIDEO_PATH = f"videos/{{video_key}}/{NUMBERED}.mp4"

FILES_PER_CHUNK = 1000
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200
"""Size from which on a new file is started."""

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
REWARD, SUCCESS, DONE, PERTURBED = "next.reward", "next.success", "next.done", "perturbed"
EXECUTED, TERMINATED = "executed_action", "next.terminated"
FRAME = "frame_index"
COUNTERS = (FRAME, "episode_index", "index", "task_index")


class DatasetError(RemediedError):
    """Raised when a folder contains no usable demonstrations."""


ANEW = "record or download the dataset anew"
"""Remedy for a dataset of which a part is missing or damaged."""


class Images(StrEnum):
    """Storage of images. Both are lossless."""

    image = "image"
    video = "video"


class FilePosition(NamedTuple):
    """Numbers of a file in the dataset."""

    chunk_index: int = 0
    file_index: int = 0

    def following(self) -> FilePosition:
        """Return the next file."""
        if self.file_index + 1 == FILES_PER_CHUNK:
            return FilePosition(self.chunk_index + 1, 0)
        return FilePosition(self.chunk_index, self.file_index + 1)


# -------------------------------------------------------------------------------------------------- features of frames


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Features of every frame of a dataset."""

    action_names: tuple[str, ...]
    """Names of the `D` numbers of an action."""
    state_dim: int = 0
    """`S`; 0: no state observation."""
    cameras: tuple[str, ...] = ()
    """Names of the `V` cameras."""
    image_size: tuple[int, int] = (0, 0)
    """`(H, W)` of every camera [pixels]."""
    fps: float
    """Frames per second [Hz]."""
    robot: str | None = None
    """Name of the robot, for readers."""
    images: Images = Images.image
    outcome: bool = False
    """Whether rewards and success are stored."""
    perturbed: bool = False
    """Whether frames are marked in which another action than the recorded one was executed."""
    executed: bool = False
    """Whether the actions that were executed are stored, too."""
    ends: bool = False
    """Whether it is stored what was observed after the last action of each episode, and whether that ended it."""
    counted: bool = True
    """Whether frames are numbered within their episode."""
    names: FeatureNames = field(default_factory=FeatureNames)
    """Names of the features with actions, states and images."""

    @property
    def action_dim(self) -> int:
        """`D`."""
        return len(self.action_names)

    @property
    def image_keys(self) -> list[str]:
        """Names of the features with images."""
        return [self.names.images.get(camera, IMAGES + camera) for camera in self.cameras]

    @property
    def frame_bytes(self) -> int:
        """Memory of a frame [bytes]."""
        height, width = self.image_size
        return len(self.cameras) * height * width * 3 + 4 * (self.state_dim + self.action_dim + 2)

    def features(self) -> dict[str, dict[str, Any]]:
        """Return the features as in `meta/info.json`."""
        names = ["height", "width", "channels"]
        found: dict[str, dict[str, Any]] = {}
        if self.state_dim:
            found[STATE] = _feature("float32", [self.state_dim])
        for key in self.image_keys:
            found[key] = _feature(self.images.value, [*self.image_size, 3], names)
        found[ACTION] = _feature("float32", [self.action_dim], list(self.action_names))
        if self.outcome:
            found |= {REWARD: _feature("float32", [1]), SUCCESS: _feature("bool", [1]), DONE: _feature("bool", [1])}
        if self.perturbed:
            found[PERTURBED] = _feature("bool", [1])
        if self.executed:
            found[EXECUTED] = _feature("float32", [self.action_dim], list(self.action_names))
        return found | {"timestamp": _feature("float32", [1])} | {name: _feature("int64", [1]) for name in COUNTERS}


def size_text(size: Sequence[int]) -> str:
    """Return the height and width of images as text: `96x128`."""
    return "x".join(map(str, size))


def _feature(dtype: str, shape: list[int], names: list[str] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "names": names}


# ------------------------------------------------------------------------------------------------------ a demonstration


@dataclass(frozen=True, kw_only=True)
class Episode:
    """`T` frames: observations and actions."""

    task: str
    """The task description."""
    actions: NDArray[np.float32]
    """`[T, D]` in the simulator's units: the actions to learn."""
    proprio: NDArray[np.float32] | None = None
    """`[T, S]` state observation."""
    images: NDArray[np.uint8] | None = None
    """`[T, V, H, W, 3]`"""
    rewards: NDArray[np.float32] | None = None
    """`[T]`: the simulator's reward for the action."""
    success: NDArray[np.bool_] | None = None
    """`[T]`: whether the task was solved after the action."""
    perturbed: NDArray[np.bool_] | None = None
    """`[T]`: whether another action than the recorded one was executed. None: never."""
    executed: NDArray[np.float32] | None = None
    """`[T, D]`: the actions that were executed. None: `actions`, or where `perturbed` says otherwise, unknown."""
    last_proprio: NDArray[np.float32] | None = None
    """`[S]` state observation after the last action, if it is known."""
    last_images: NDArray[np.uint8] | None = None
    """`[V, H, W, 3]`, images after the last action, if they are known."""
    terminated: bool = False
    """Whether the simulator ended the episode at its last action, for another reason than a time limit."""

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def has_last(self) -> bool:
        """Whether it is known what was observed after the last action."""
        return self.last_proprio is not None or self.last_images is not None

    def undisturbed(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return where no action of frames `begin` .. `end - 1` was perturbed."""
        before = np.concatenate([[0], np.cumsum(np.zeros(len(self)) if self.perturbed is None else self.perturbed)])
        return np.asarray(before[end] == before[begin])

    def check(self, spec: DatasetSpec) -> None:
        """Raise `ValueError` if the episode does not fit a dataset."""
        height, width = spec.image_size
        wanted: dict[str, tuple[int, ...] | None] = {
            "actions": (spec.action_dim,),
            "proprio": (spec.state_dim,) if spec.state_dim else None,
            "images": (len(spec.cameras), height, width, 3) if spec.cameras else None,
            "rewards": () if spec.outcome else None,
            "success": () if spec.outcome else None,
            "perturbed": () if spec.perturbed else None,
            "executed": (spec.action_dim,) if spec.executed else None,
        }
        of_the_end: dict[str, tuple[int, ...] | None] = {
            "last_proprio": wanted["proprio"] if spec.ends else None,
            "last_images": wanted["images"] if spec.ends else None,
        }
        if not len(self):
            raise ValueError("an episode has at least one frame")
        of_frames = {name: None if shape is None else (len(self), *shape) for name, shape in wanted.items()}
        for name, shape in (of_frames | of_the_end).items():
            array = getattr(self, name)
            if (array is None) != (shape is None):
                raise ValueError(f"{name} is {'missing' if array is None else 'there'}, but the dataset says otherwise")
            if array is not None and array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
            if array is not None and array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"{name} holds a number that is not finite")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A minibatch: observations, and the chunks of actions that follow them."""

    observation: Observation
    """Observations of `M` samples."""
    actions: NDArray[np.float32]
    """`[M, C, D]` in the simulator's units."""
    repeated: NDArray[np.bool_] | None = None
    """`[M, C]`, True for actions beyond the end of their episode, which repeat its last one; None: there are none."""
