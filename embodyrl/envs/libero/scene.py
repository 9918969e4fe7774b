"""What the file of a LIBERO task says of its scene: objects in the order of the state's poses, fixtures, the goal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from embodyrl.envs.libero.tasks import ROBOT_STATE

POSE = 7
"""Numbers of an object's pose: position [m] (3) and orientation (quaternion, scalar first)."""

_NUMBER = r"(-?[\d.]+(?:e-?\d+)?)"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The scene of a task, and its goal."""

    kinds: dict[str, str]
    """Name of each object -> its kind, `akita_black_bowl_1` -> `akita_black_bowl`, in the order of their poses."""
    fixtures: dict[str, tuple[float, float]]
    """Name of each fixture -> middle of the region in which it is drawn, x and y [m]. Its pose is not in the state."""
    goal: tuple[tuple[str, ...], ...]
    """What must hold at the end, such as `("on", "akita_black_bowl_1", "plate_1")`."""

    def place(self, name: str) -> slice:
        """Return which numbers of a state with `proprio: full` are the pose of an object."""
        first = ROBOT_STATE + POSE * list(self.kinds).index(name)
        return slice(first, first + POSE)


def read_scene(path: Path) -> Scene:
    """Read the file of a task.

    LIBERO builds the objects in the order of the file, and fixtures with doors and knobs after them; so do their
    numbers follow each other in the state.
    """
    text = path.read_text()
    kinds = _typed(text, "objects")
    start, _, goal = text.partition("(:goal")
    regions = {
        f"{target}_{name}": (sum(map(float, corners[::2])) / 2, sum(map(float, corners[1::2])) / 2)
        for name, target, *corners in re.findall(
            rf"\((\w+)\s+\(:target\s+(\w+)\)\s+\(:ranges\s+\(\s*\({_NUMBER} {_NUMBER} {_NUMBER} {_NUMBER}\)", start
        )
    }
    stands = {what: regions[where] for _, what, where in _statements(start.partition("(:init")[2]) if where in regions}
    return Scene(
        kinds=kinds,
        fixtures={name: stands[name] for name in _typed(text, "fixtures") if name in stands},
        goal=tuple(_statements(goal)),
    )


def _typed(text: str, section: str) -> dict[str, str]:
    """Return name -> kind of a section of lines such as `bowl_1 bowl_2 - bowl`."""
    found = re.search(rf"\(:{section}\s([^()]*)\)", text)
    listed = re.findall(r"([\w\s]+?)\s-\s+(\w+)", found[1]) if found else []
    return {name: kind for names, kind in listed for name in names.split()}


def _statements(text: str) -> list[tuple[str, ...]]:
    """Return statements such as `(On bowl_1 plate_1)` as words, the first in lower case."""
    return [(verb.lower(), *of.split()) for verb, of in re.findall(r"\((\w+)((?:\s+\w+)+)\s*\)", text)]
