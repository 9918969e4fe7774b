"""What the Python objects of an environment remember of an episode: numbers, texts, arrays, random generators.

They are found by following attributes from the outermost wrapper on, so that no list of them is kept per package; each
has a path such as `env/env/_goal`. They are restored after a reset, which makes the objects that an episode has, and
only what differs from the reset's is written.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.mujoco.physics import is_view
from embodyrl.envs.states import KINDS

FOLLOWED = ("gymnasium", "gymnasium_robotics", "dm_control", "gym_aloha", "gym_hil", "robosuite", "embodyrl")
"""Packages whose objects are followed."""
CONSTANT = (
    *("gymnasium.spaces", "gymnasium.envs.registration", "gymnasium.envs.mujoco.mujoco_rendering"),
    *("dm_control.mujoco.index", "robosuite.models.arenas", "robosuite.models.objects", "robosuite.models.tasks"),
)
"""Modules whose objects decide nothing in an episode: descriptions, and renderers, which are not used."""
PLAIN = "plain"
"""Name of the array that holds everything but arrays, as JSON."""
ARRAY, SCALAR = "array.", "scalar."
"""Prefixes of the names of arrays, and of numpy's scalars."""
OBJECTS = "/env/"
"""Prefix of the paths of an environment's objects, whose attributes come and go."""
GENERATORS = (np.random.Generator, np.random.RandomState)
SEQUENCES = (list, tuple, set, frozenset, deque)
Holder = dict[Any, Any] | list[Any] | tuple[Any, ...] | deque[Any]
"""A dict, the attributes of an object, or the entries of a sequence."""


class _Found(NamedTuple):
    """What there is below a root."""

    places: dict[str, tuple[Holder, Any]]
    """Path of each value that is remembered -> what holds it, and under which name or index."""
    holders: dict[str, Holder]
    """Path -> dict, attributes of an object, or sequence."""


def save(root: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Return copies of all that the objects below `root` remember."""
    plain, arrays = {}, {}
    for path, (holder, key) in sorted(_find(root).places.items()):
        value = holder[key]
        if isinstance(value, np.ndarray | np.generic):
            arrays[(ARRAY if isinstance(value, np.ndarray) else SCALAR) + path] = np.array(value)
        else:
            plain[path] = _as_json(value)
    return {PLAIN: np.frombuffer(json.dumps(plain).encode(), np.uint8), **arrays}


def restore(root: dict[str, Any], saved: Mapping[str, NDArray[Any]]) -> None:
    """Give the objects below `root`, which were reset, what `save` found below such a root.

    Raises:
        KeyError, ValueError: it was another one.
    """
    values: dict[str, Any] = dict(json.loads(saved[PLAIN].tobytes()))
    values |= {name.removeprefix(ARRAY): array.copy() for name, array in saved.items() if name.startswith(ARRAY)}
    values |= {name.removeprefix(SCALAR): array[()] for name, array in saved.items() if name.startswith(SCALAR)}
    places, holders = _find(root)
    for path in places.keys() - values.keys():  # an attribute is left of earlier episodes, and had not been set yet
        holder, key = places[path]
        if not isinstance(holder, dict) or not path.startswith(OBJECTS):
            raise ValueError(f"it lacks {path}")
        del holder[key]
    for path, value in values.items():
        if path in places:
            _write(path, *places[path], value)
        else:
            parent, _, key = path.rpartition("/")
            if not isinstance(inside := holders.get(parent), dict):
                raise ValueError(f"it has {path}, which is not here")
            inside[key] = value


def _write(path: str, holder: Holder, key: Any, value: Any) -> None:
    """Set the value at `path`, unless it has this value already."""
    now = holder[key]
    if isinstance(now, GENERATORS):
        if not isinstance(value, dict):
            raise ValueError(f"{path} is no random generator")
        _set_state(now, value)
    elif not _same(now, value):
        if isinstance(holder, tuple):
            raise ValueError(f"{path} is part of a tuple, and differs")
        holder[key] = type(now)(value) if isinstance(now, SEQUENCES) and isinstance(value, list) else value


def _same(now: Any, value: Any) -> bool:
    if isinstance(now, np.ndarray | np.generic) or isinstance(value, np.ndarray | np.generic):
        return type(now) is type(value) and now.shape == value.shape and now.tobytes() == value.tobytes()
    return bool(_as_json(now) == value)


def _find(root: dict[str, Any]) -> _Found:
    """Return all that is remembered below `root`, breadth first and by name, so that paths are always the same."""
    found, seen = _Found({}, {"": root}), {id(root)}
    waiting: deque[tuple[str, Holder]] = deque([("", root)])
    while waiting:
        path, holder = waiting.popleft()
        for key, value in _entries(holder):
            below = f"{path}/{key}"
            if _is_remembered(value):
                found.places[below] = holder, key
            else:
                inner = _as_holder(value)
                if inner is not None and id(inner) not in seen:
                    seen.add(id(inner))
                    found.holders[below] = inner
                    waiting.append((below, inner))
    return found


def _entries(holder: Holder) -> list[tuple[Any, Any]]:
    """Return names or indices, and values, in an order that does not depend on when they were made."""
    return sorted(holder.items(), key=lambda each: str(each[0])) if isinstance(holder, dict) else [*enumerate(holder)]


def _as_holder(value: object) -> Holder | None:
    """Return what values below `value` are in; None if it is not followed."""
    if isinstance(value, dict | list | tuple | deque):
        return value
    module = type(value).__module__
    if module.partition(".")[0] not in FOLLOWED or module.startswith(CONSTANT):
        return None
    return getattr(value, "__dict__", None)


def _is_remembered(value: object) -> bool:
    """Return whether `value` is saved itself. Views of MuJoCo's memory are saved with the scene."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in KINDS and not is_view(value)
    return isinstance(value, GENERATORS) or _is_plain(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, SEQUENCES):
        return all(_is_plain(each) for each in value)
    if isinstance(value, str):
        return not value.startswith("/")  # a file, which is elsewhere on another machine
    return value is None or (isinstance(value, bool | int | float) and not isinstance(value, np.generic))


def _as_json(value: Any) -> Any:
    """Return a plain value, or the state of a generator, as JSON has it."""
    if isinstance(value, GENERATORS):
        return _lists(_state(value))
    if isinstance(value, set | frozenset):
        return sorted(map(_as_json, value), key=str)
    return [_as_json(each) for each in value] if isinstance(value, SEQUENCES) else value


def _lists(state: Any) -> Any:
    """Return the state of a generator with lists in place of arrays."""
    if isinstance(state, dict):
        return {name: _lists(each) for name, each in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _state(generator: np.random.Generator | np.random.RandomState) -> Any:
    """Return its whole state; that of a `RandomState` includes a number drawn in advance."""
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: np.random.Generator | np.random.RandomState, state: Any) -> None:
    if isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
