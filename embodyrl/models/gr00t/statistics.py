"""The ranges of a robot's states and actions, from the files that public training code writes (imports no torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodyrl.errors import did_you_mean
from embodyrl.models.errors import PolicyError

LEROBOT_STATE, LEROBOT_ACTION = "observation.state", "action"
LEROBOT_TAG = "new_embodiment"
"""The robot that a LeRobotDataset, which names none, is taken to be."""
ENTRIES = ("min", "max", "mean", "std")
REMEDY = "set model.statistics to Isaac's metadata.json, or to meta/stats.json of a LeRobotDataset"


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
    origin: str,
    video_keys: Sequence[str] | None,
    state_keys: Sequence[str] | None,
    action_keys: Sequence[str] | None,
) -> Robot:
    """One of the robots that metadata.json describes. Of the others, nothing is read.

    Args:
        metadata: contents of the file.
        tag: the robot's name; None: the only one there is.
        origin: the file, for messages.
        video_keys: pictures that are used, in order; None: all.
        state_keys: parts of the state that are used, in order; None: all.
        action_keys: parts of an action.

    Raises:
        PolicyError: there is no such robot, or it has no such part, or numbers are missing or none.
    """
    known = ", ".join(sorted(metadata)) or "none"
    if tag is None:
        if len(metadata) > 1:
            raise PolicyError(f"{origin} has statistics of several robots: set embodiment_tag to one of {known}")
        if not metadata:
            raise PolicyError(f"{origin} has statistics of no robot: {REMEDY}")
        tag = next(iter(metadata))
    if tag not in metadata:
        hint = did_you_mean(tag, metadata, lead=" - ")
        raise PolicyError(f"{origin} has no statistics of embodiment_tag = {tag!r}{hint} (known: {known})")
    reader = _Reader(origin)
    entry = reader.entries(metadata[tag], tag)
    numbers = reader.entries(entry.get("statistics"), tag)
    state = reader.entries(numbers.get("state", {}), f"{tag}.state")
    action = reader.entries(numbers.get("action"), f"{tag}.action")
    cameras = reader.entries(entry.get("modalities", {}), f"{tag}.modalities").get("video")
    if cameras is not None:
        cameras = reader.chosen(reader.entries(cameras, f"{tag}.video"), video_keys, f"{tag}.video", "video_keys")
    robot = Robot(
        tag=tag,
        state=reader.ranges(state, state_keys, f"{tag}.state", "state_keys"),
        action=reader.ranges(action, action_keys, f"{tag}.action", "action_keys"),
        cameras=cameras,
    )
    if not robot.action:
        raise PolicyError(
            f"{origin}: the statistics of {tag}.action have no numbers, expected one per entry of an "
            f"action: {REMEDY}, and model.action_keys to its parts"
        )
    return robot


@dataclass(frozen=True)
class _Reader:
    """Takes parts of a file's contents as what they should be, or says what is wrong with them."""

    origin: str
    """The file."""

    def damaged(self, where: str, found: object, expected: str) -> PolicyError:
        """What is raised where something else is found than was expected."""
        text = "nothing" if found is None else repr(found)
        shown = text if len(text) <= 60 else f"{text[:60]}.."
        return PolicyError(f"{self.origin}: the statistics of {where} are {shown}, expected {expected}: {REMEDY}")

    def entries(self, found: object, where: str) -> Mapping[str, Any]:
        """An entry that has entries."""
        if not isinstance(found, Mapping):
            raise self.damaged(where, found, "an object with entries")
        return found

    def numbers(self, found: object, where: str) -> list[float]:
        """An entry that is a list of finite numbers."""
        if not isinstance(found, list):
            raise self.damaged(where, found, "a list of numbers")
        for index, number in enumerate(found):
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise self.damaged(f"{where}[{index}]", number, "a finite number")
        return found

    def chosen(self, known: Mapping[str, Any], keys: Sequence[str] | None, where: str, option: str) -> list[str]:
        """The names of the parts that are used."""
        chosen = list(known) if keys is None else list(keys)
        for key in chosen:
            if key not in known:
                hint = did_you_mean(key, known, lead=" - ")
                raise PolicyError(
                    f"{option} names {key!r}, which the statistics of {where} lack{hint} (known: "
                    f"{', '.join(known) or 'none'})"
                )
        return chosen

    def ranges(self, known: Mapping[str, Any], keys: Sequence[str] | None, where: str, option: str) -> Ranges:
        """Of all parts that are used, one after the other."""
        chosen = self.chosen(known, keys, where, option)
        columns: dict[str, list[float]] = {name: [] for name in ENTRIES}
        for key in chosen:
            for name, column in self._part(known[key], f"{where}.{key}").items():
                columns[name] += column
        return Ranges(parts=chosen, **columns)

    def _part(self, found: object, where: str) -> dict[str, list[float]]:
        part = self.entries(found, where)
        missing = [name for name in ENTRIES if name not in part]
        if missing:
            raise PolicyError(
                f"{self.origin}: the statistics of {where} lack {', '.join(missing)} (found: "
                f"{', '.join(part) or 'nothing'}): {REMEDY}"
            )
        columns = {name: self.numbers(part[name], f"{where}.{name}") for name in ENTRIES}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise PolicyError(
                f"{self.origin}: the statistics of {where} differ in length "
                f"({', '.join(f'{name} {length}' for name, length in lengths.items())}), expected as many numbers of "
                f"each: {REMEDY}"
            )
        return columns
