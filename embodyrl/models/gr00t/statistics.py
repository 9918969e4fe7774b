"""The ranges of a robot's states and actions, from the files that public training code writes (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodyrl.models.errors import PolicyError, did_you_mean

LEROBOT_STATE, LEROBOT_ACTION = "observation.state", "action"
LEROBOT_TAG = "new_embodiment"
"""The robot that a LeRobotDataset, which names none, is taken to be."""
ENTRIES = ("min", "max", "mean", "std")


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Of the numbers in a state or an action, in order."""

    min: Sequence[float]
    max: Sequence[float]
    mean: Sequence[float]
    std: Sequence[float]
    parts: Sequence[str]
    """What they are called."""

    def __len__(self) -> int:
        return len(self.min)


@dataclass(frozen=True, kw_only=True)
class Robot:
    """What a checkpoint knows of one robot."""

    tag: str
    state: Ranges
    action: Ranges
    cameras: Sequence[str] | None
    """Pictures that it was trained with; None: the file does not say."""


def as_metadata(content: Mapping[str, Any], tag: str = LEROBOT_TAG) -> dict[str, Any]:
    """Contents of Isaac's metadata.json, also where those of a LeRobotDataset's stats.json are given; they name no
    robot, and are taken to be those of `tag`."""
    if LEROBOT_ACTION not in content:
        return dict(content)
    state, action = content.get(LEROBOT_STATE), content[LEROBOT_ACTION]
    return {tag: {"statistics": {"state": {} if state is None else {"state": state}, "action": {"action": action}}}}


def choose_robot(
    metadata: Mapping[str, Any],
    tag: str | None,
    *,
    video_keys: Sequence[str] | None,
    state_keys: Sequence[str] | None,
    action_keys: Sequence[str] | None,
) -> Robot:
    """One of the robots that metadata.json describes.

    Args:
        metadata: contents of the file.
        tag: the robot's name; None: the only one there is.
        video_keys: pictures that are used, in order; None: all.
        state_keys: parts of the state that are used, in order; None: all.
        action_keys: parts of an action.

    Raises:
        PolicyError: there is no such robot, or it has no such part, or numbers are missing.
    """
    known = ", ".join(sorted(metadata)) or "none"
    if tag is None:
        if len(metadata) != 1:
            raise PolicyError(f"the checkpoint has statistics of several robots: set embodiment_tag to one of {known}")
        tag = next(iter(metadata))
    if tag not in metadata:
        hint = did_you_mean(tag, metadata)
        raise PolicyError(f"the checkpoint has no statistics of embodiment_tag = {tag!r}{hint} (known: {known})")
    entry = metadata[tag]
    videos = entry.get("modalities", {}).get("video")
    return Robot(
        tag=tag,
        state=_ranges(entry["statistics"].get("state", {}), state_keys, f"{tag}.state", "state_keys"),
        action=_ranges(entry["statistics"].get("action", {}), action_keys, f"{tag}.action", "action_keys"),
        cameras=None if videos is None else _chosen(videos, video_keys, f"{tag}.video", "video_keys"),
    )


def _chosen(known: Mapping[str, Any], keys: Sequence[str] | None, where: str, option: str) -> list[str]:
    chosen = list(known) if keys is None else list(keys)
    for key in chosen:
        if key not in known:
            raise PolicyError(
                f"{option} names {key!r}, which the statistics of {where} lack{did_you_mean(key, known)} (known: "
                f"{', '.join(known) or 'none'})"
            )
    return chosen


def _ranges(known: Mapping[str, Any], keys: Sequence[str] | None, where: str, option: str) -> Ranges:
    chosen = _chosen(known, keys, where, option)
    columns: dict[str, list[float]] = {name: [] for name in ENTRIES}
    for key in chosen:
        missing = [name for name in ENTRIES if name not in known[key]]
        if missing:
            raise PolicyError(f"the statistics of {where}.{key} lack {', '.join(missing)}")
        for name in ENTRIES:
            columns[name] += known[key][name]
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        raise PolicyError(f"the statistics of {where} are damaged: min, max, mean and std differ in length")
    return Ranges(parts=chosen, **columns)
