"""Robots of a checkpoint: which numbers states and actions have, and how each group of them is normalised.

Formulas as in Isaac-GR00T's processor of N1.7. Imports no torch, so that a config can be checked early.

Shapes: `S` numbers of a state, `D` numbers of an action, `T` steps of a chunk with statistics of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import did_you_mean
from embodyrl.models.errors import PolicyError
from embodyrl.models.vla.folder import finite_numbers, impossible, wrong

Vector = NDArray[np.float64]
"""`[D]`, or `[T, D]` where each step of a chunk has its own statistics."""
POSE = 9
"""Numbers of an end effector's pose: position, and the first two rows of the rotation matrix."""


class Way(StrEnum):
    """How numbers are normalised."""

    min_max = "min_max"
    mean_std = "mean_std"
    sin_cos = "sin_cos"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Numbers of a state or an action that belong together."""

    key: str
    size: int
    way: Way
    first: Vector
    """Lower ends, or means; nothing where the way is sin_cos."""
    second: Vector
    """Upper ends, or standard deviations."""


@dataclass(frozen=True, kw_only=True)
class ActionGroup(Group):
    """Numbers of an action."""

    reference: slice | None = None
    """Where in the state the numbers are that these are relative to; None: they are absolute."""
    pose: bool = False
    """Whether they are a pose in the frame of the reference, not a difference to it."""


@dataclass(frozen=True, kw_only=True)
class Robot:
    """What a checkpoint knows of one robot."""

    tag: str
    state: Sequence[Group]
    action: Sequence[ActionGroup]
    cameras: Sequence[str] | None
    """Names of its images, in order; None: the files do not name them."""
    frames: int
    """Images of each camera, the last one the newest."""
    steps: int | None
    """Steps of a chunk that mean something; None: all."""
    clip: bool
    """Whether normalised numbers are clipped to -1 .. 1."""

    @property
    def state_dim(self) -> int:
        """`S`."""
        return sum(group.size for group in self.state)

    @property
    def encoded_state_dim(self) -> int:
        """Numbers of a normalised state."""
        return sum(group.size * (2 if group.way is Way.sin_cos else 1) for group in self.state)

    @property
    def action_dim(self) -> int:
        """`D`."""
        return sum(group.size for group in self.action)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a checkpoint's processor normalises, for all of its robots."""

    percentiles: bool = False
    """Whether ranges are 1st and 99th percentiles instead of smallest and largest numbers."""
    relative: bool = False
    """Whether actions that are marked so are relative to the state."""
    clip: bool = True
    """Whether normalised numbers are clipped to -1 .. 1."""
    sin_cos: bool = False
    """Whether groups of the state that are marked so become sines and cosines."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Unchecked contents of a checkpoint's files about its robots."""

    modalities: Mapping[str, Any]
    """By robot: `video`, `state` and `action`, each with the keys of its groups."""
    statistics: Mapping[str, Any]
    """By robot: `state`, `action` and `relative_action`, each with numbers by group."""
    settings: Settings
    origin: str
    """File of the modalities, for messages."""
    numbers: str
    """File of the statistics, for messages."""

    def robot(self, tag: str | None) -> Robot:
        """Return a robot.

        Args:
            tag: its name; None: the only one.

        Raises:
            PolicyError: it does not exist, or entries are missing, damaged, or ask for what is not implemented.
        """
        tag = self.choose(tag)
        modalities = self._object(self.modalities[tag], f"modality_configs.{tag}")
        parts = {name: self._object(modalities.get(name), f"{tag}.{name}") for name in ("video", "state", "action")}
        cameras = self._keys(parts["video"], f"{tag}.video") if parts["video"] else None
        state = tuple(self._state(parts["state"], tag))
        action = tuple(self._actions(parts["action"], tag, state))
        if not action:
            raise PolicyError(f"{self.origin}: {tag}.action names no groups: an action has no numbers")
        return Robot(
            tag=tag,
            state=state,
            action=action,
            cameras=cameras,
            frames=max(1, self._steps(parts["video"], f"{tag}.video") or 1),
            steps=self._steps(parts["action"], f"{tag}.action"),
            clip=self.settings.clip,
        )

    def choose(self, tag: str | None) -> str:
        """Return the name of a robot; see `robot`."""
        known = [name for name in self.modalities if name in self.statistics]
        listed = ", ".join(sorted(known)) or "none"
        if tag is None:
            if len(known) != 1:
                raise PolicyError(
                    f"{self.numbers} has statistics of {len(known)} robots",
                    f"set model.embodiment_tag to one of {listed}",
                )
            return known[0]
        for names, where, what in (
            (self.statistics, self.numbers, "statistics"),
            (self.modalities, self.origin, "modality_configs"),
        ):
            if tag not in names:
                hint = did_you_mean(tag, names, lead=" - ")
                raise PolicyError(
                    f"{where} has no {what} of embodiment_tag = {tag!r}{hint} (known: {listed})",
                    "choose one of these, or set model.statistics to the meta/stats.json of demonstrations",
                )
        return tag

    # ------------------------------------------------------------------------------------------------- its parts

    def _state(self, part: Mapping[str, Any], tag: str) -> Iterator[Group]:
        waves = self._marked(part, "sin_cos_embedding_keys", f"{tag}.state") if self.settings.sin_cos else ()
        scaled = self._marked(part, "mean_std_embedding_keys", f"{tag}.state")
        for key in self._keys(part, f"{tag}.state"):
            if key in waves:
                size = self._size(tag, "state", key)
                yield Group(key=key, size=size, way=Way.sin_cos, first=np.zeros(size), second=np.ones(size))
                continue
            way = Way.mean_std if key in scaled else Way.min_max
            first, second = self._columns(tag, "state", key, way, self.settings.percentiles)
            yield Group(key=key, size=first.shape[-1], way=way, first=first, second=second)

    def _actions(self, part: Mapping[str, Any], tag: str, state: Sequence[Group]) -> Iterator[ActionGroup]:
        keys, where = self._keys(part, f"{tag}.action"), f"{self.origin}: {tag}.action.action_configs"
        described = part.get("action_configs") or [{}] * len(keys)
        if not isinstance(described, list) or len(described) != len(keys):
            raise wrong(where, described, f"a list of {len(keys)} objects, one for each of {', '.join(keys)},")
        scaled = self._marked(part, "mean_std_embedding_keys", f"{tag}.action")
        for key, each in zip(keys, described, strict=True):
            entry = self._object(each, f"{tag}.action.action_configs")
            rep, kind, form = (
                _enum(entry.get(name, usual))
                for name, usual in (("rep", "absolute"), ("type", "non_eef"), ("format", "default"))
            )
            if rep not in ("absolute", "relative"):
                raise PolicyError(f"{where}: rep of {key!r} is {rep!r:.60}, known: absolute, relative")
            if not self.settings.relative or rep == "absolute":
                way = Way.mean_std if key in scaled else Way.min_max
                first, second = self._columns(tag, "action", key, way, self.settings.percentiles)
                yield ActionGroup(key=key, size=first.shape[-1], way=way, first=first, second=second)
                continue
            pose = kind == "eef"
            if pose and form != "xyz+rot6d":
                raise PolicyError(
                    f"{where}: {key!r} are poses as {form!r:.60}; of relative ones only XYZ_ROT6D is implemented",
                    "take another robot or checkpoint",
                )
            first, second = self._columns(tag, "relative_action", key, Way.min_max, False)
            reference = self._reference(entry.get("state_key") or key, state, where)
            size = first.shape[-1]
            if reference.stop - reference.start != size or (pose and size != POSE):
                raise PolicyError(
                    f"{where}: {key!r} has {size} numbers, and is relative to {reference.stop - reference.start} of "
                    f"the state{f'; a pose has {POSE}' if pose else ''}",
                    "take another robot or checkpoint",
                )
            yield ActionGroup(
                key=key, size=size, way=Way.min_max, first=first, second=second, reference=reference, pose=pose
            )

    def _reference(self, key: Any, state: Sequence[Group], where: str) -> slice:
        place = 0
        for group in state:
            if group.key == key:
                return slice(place, place + group.size)
            place += group.size
        known = ", ".join(group.key for group in state) or "nothing"
        raise PolicyError(
            f"{where}: actions are relative to {key!r:.60}, which the state has not (has: {known})",
            "take another robot or checkpoint",
        )

    # ------------------------------------------------------------------------------------------------------- entries

    def _object(self, found: object, where: str) -> Mapping[str, Any]:
        if not isinstance(found, Mapping):
            raise wrong(f"{self.origin}: {where}", found, "a JSON object")
        return found

    def _keys(self, part: Mapping[str, Any], where: str) -> list[str]:
        found = part.get("modality_keys")
        if not isinstance(found, list) or not all(isinstance(key, str) for key in found):
            raise wrong(f"{self.origin}: {where}.modality_keys", found, "a list of names")
        return found

    def _marked(self, part: Mapping[str, Any], name: str, where: str) -> Sequence[str]:
        found = part.get(name) or []
        if not isinstance(found, list):
            raise wrong(f"{self.origin}: {where}.{name}", found, "a list of names")
        return found

    def _steps(self, part: Mapping[str, Any], where: str) -> int | None:
        found = part.get("delta_indices")
        if found is not None and not (isinstance(found, list) and all(type(each) is int for each in found)):
            raise wrong(f"{self.origin}: {where}.delta_indices", found, "a list of whole numbers")
        return None if not found else len(found)

    def _entry(self, tag: str, part: str, key: str) -> Mapping[str, Any]:
        groups: Any = self.statistics[tag].get(part) if isinstance(self.statistics[tag], Mapping) else None
        if not isinstance(groups, Mapping) or not isinstance(groups.get(key), Mapping):
            known = ", ".join(groups) if isinstance(groups, Mapping) else ""
            raise PolicyError(
                f"{self.numbers} has no statistics of {tag}.{part}.{key}, which {self.origin} names (has: "
                f"{known or 'nothing'})",
                "download both files of the same checkpoint",
            )
        entry: Mapping[str, Any] = groups[key]
        return entry

    def _size(self, tag: str, part: str, key: str) -> int:
        entry = self._entry(tag, part, key)
        return int(self._column(entry, next(iter(entry), "mean"), f"{tag}.{part}.{key}").shape[-1])

    def _columns(self, tag: str, part: str, key: str, way: Way, percentiles: bool) -> tuple[Vector, Vector]:
        """Return lower and upper ends, or means and standard deviations."""
        names = ("mean", "std") if way is Way.mean_std else ("q01", "q99") if percentiles else ("min", "max")
        entry, where = self._entry(tag, part, key), f"{tag}.{part}.{key}"
        first, second = (self._column(entry, name, where) for name in names)
        if first.shape != second.shape:
            raise wrong(f"{self.numbers}: {where}.{names[1]}", list(second.shape), f"as many as {names[0]} has")
        if part == "state" and first.ndim > 1:
            if len(first) != 1:
                raise wrong(
                    f"{self.numbers}: {where}", list(first.shape), "a list of numbers, as a state has no steps,"
                )
            first, second = first[0], second[0]
        if (fault := impossible(names, first.ravel().tolist(), second.ravel().tolist())) is not None:
            raise PolicyError(f"{self.numbers}: {where}: {fault}", "download it again")
        return first, second

    def _column(self, entry: Mapping[str, Any], name: str, where: str) -> Vector:
        place = f"{self.numbers}: {where}.{name}"
        found = entry.get(name)
        rows = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
        columns = [finite_numbers(row, place) for row in rows]
        if not columns[0] or len({len(column) for column in columns}) != 1:
            raise wrong(place, found, "lists of equally many numbers")
        numbers = np.array(columns, np.float64)
        return numbers if rows is found else numbers[0]


def _enum(found: object) -> str:
    """Return the value of an enumeration of Isaac-GR00T, which files write by name or by value."""
    text = str(found).lower()
    return {"xyz_rot6d": "xyz+rot6d", "xyz_rotvec": "xyz+rotvec"}.get(text, text)
