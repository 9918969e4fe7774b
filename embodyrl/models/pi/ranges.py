"""What states and actions of a robot are normalised by, read from public files with care (imports no torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodyrl.models.errors import PolicyError
from embodyrl.models.pi.files import Statistics
from embodyrl.models.pi.options import Normalization, PiConfig, StateInput

NUMBERS = {Normalization.zscore: ("mean", "std"), Normalization.quantile: ("q01", "q99")}
"""What each way to normalise needs."""
KNOWN = [name for names in NUMBERS.values() for name in names]
REMEDY = "download the file again, or set model.statistics to another one"


@dataclass(frozen=True)
class Ranges:
    """Two numbers for each entry of a state or an action."""

    first: Sequence[float]
    """Means, or 1st percentiles."""
    second: Sequence[float]
    """Standard deviations, or 99th percentiles."""

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, kw_only=True)
class Robot:
    """What a checkpoint knows of one robot."""

    states: Ranges | None
    """None: the model does not look at states."""
    actions: Ranges


def sees_state(model: PiConfig) -> bool:
    """Whether the state reaches the network, or actions are relative to it."""
    return model.state is not StateInput.none or model.relative_entries > 0


def robot_of(statistics: Statistics, model: PiConfig, *, proprio: int | None, action_dim: int | None) -> Robot:
    """The robot that statistics describe, without the zeros that openpi once padded states and actions with.

    Args:
        statistics: of one data set.
        model: the model's options.
        proprio: numbers in the simulator's state; None: not known.
        action_dim: the same of an action.

    Raises:
        PolicyError: they lack numbers, or are damaged.
    """
    states = read_ranges(statistics, "state", model.normalization, proprio) if sees_state(model) else None
    actions = read_ranges(statistics, "actions", model.normalization, action_dim)
    if not len(actions):
        raise PolicyError(f"{statistics.file}: {statistics.names['actions']} has nothing but zeros: {REMEDY}")
    return Robot(states=states, actions=actions)


def read_ranges(statistics: Statistics, kind: str, normalization: Normalization, size: int | None) -> Ranges:
    """The numbers that a normalisation needs, in the length that the simulator has.

    Args:
        statistics: of one data set.
        kind: `state` or `actions`.
        normalization: what is needed.
        size: numbers that the simulator has; statistics that are longer, or all of them if it is None (not known), end
            with the last entry that is no padding.

    Raises:
        PolicyError: they lack what is needed, or are damaged.
    """
    where = f"{statistics.file}: {statistics.names[kind]}"
    columns = _columns(statistics, kind, normalization, where)
    length, real = len(columns[NUMBERS[normalization][0]]), _without_padding(list(columns.values()))
    kept = length if size is not None and length <= size else real
    first, second = (columns[name][:kept] for name in NUMBERS[normalization])
    return Ranges(first, second)


def _columns(statistics: Statistics, kind: str, normalization: Normalization, where: str) -> dict[str, Sequence[float]]:
    """All numbers of the entry that are there, of one length."""
    entry = statistics.content.get(statistics.names[kind])
    if not isinstance(entry, Mapping):
        raise PolicyError(
            f"{statistics.file} has no entry {statistics.names[kind]!r} (has: {', '.join(statistics.content) or 'none'}"
            "): set model.statistics to the file of a data set that was recorded with it"
        )
    found = {name: entry[name] for name in KNOWN if entry.get(name) is not None}
    lacking = [name for name in NUMBERS[normalization] if name not in found]
    if lacking:
        other = next(each for each in Normalization if each is not normalization)
        raise PolicyError(
            f"{where} lacks {', '.join(lacking)} (has: {', '.join(found) or 'none'}), which model.normalization = "
            f"{normalization.value} needs: set model.statistics to a file with them, or model.normalization to "
            f"{other.value} if the model was trained so"
        )
    columns = {name: _finite(numbers, f"{where}.{name}") for name, numbers in found.items()}
    lengths = {name: len(numbers) for name, numbers in columns.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise PolicyError(f"{where} is damaged: {told} numbers, as many of each were expected: {REMEDY}")
    return columns


def _finite(numbers: Any, where: str) -> Sequence[float]:
    """The list, if it is one of finite numbers."""
    if not isinstance(numbers, list):
        raise PolicyError(f"{where} is {numbers!r}, a list of numbers was expected: {REMEDY}")
    for place, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise PolicyError(f"{where}[{place}] is {number!r}, a finite number was expected: {REMEDY}")
    return numbers


def _without_padding(columns: Sequence[Sequence[float]]) -> int:
    """How many entries are left without the last ones that are zero in every column: padding has no mean and no width,
    whereas the mean alone may well be zero."""
    return max((place + 1 for column in columns for place, number in enumerate(column) if number), default=0)
