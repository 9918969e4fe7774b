"""Kinds of perturbation, the size of each at levels 1 .. 5, and what is drawn for an episode.

The kinds are the seven dimensions of LIBERO-Plus (Fei et al. 2025, arXiv:2510.13626). The sizes are ours: LIBERO-Plus
sorts its variants into levels by how many policies fail in them, and not by the size of a change.

A direction is drawn from the episode's seed and the kind alone, and the level is how far it goes: of one episode, a
higher level is more of the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import KINDS, MOST_LEVEL, PerturbationLevels, TrainingPerturbations
from embodyrl.seeding import derive_seed

Perturbation = tuple[tuple[str, int], ...]
"""Kinds and their levels."""

ORBIT_DEG = (3.0, 6.0, 10.0, 15.0, 20.0)
"""Angle by which a camera moves around what it looks at."""
DISTANCE = (0.03, 0.06, 0.10, 0.15, 0.20)
"""Share by which it comes closer or moves away."""
AIM_DEG = (1.0, 2.0, 3.0, 4.0, 5.0)
"""Angle by which it turns past what it looks at, and about its axis; all that a camera on a robot does."""
FIELD_OF_VIEW = (0.02, 0.04, 0.06, 0.08, 0.10)
"""Share by which its field of view changes."""

LIGHT_DEG = (10.0, 20.0, 30.0, 40.0, 50.0)
"""Angle by which lights turn."""
TINT = (0.06, 0.12, 0.20, 0.28, 0.36)
"""Share by which red, green and blue of the light differ from white."""
STRENGTH = (0.10, 0.20, 0.32, 0.46, 0.60)
"""Natural logarithm of the factor of its strength, up or down."""
SHADOWS_OFF = 3
"""Level from which half of the episodes have no shadows."""

COLOUR = (0.15, 0.30, 0.45, 0.60, 0.80)
"""Share of another colour that surfaces get."""
OTHER_TEXTURES = (0.0, 0.0, 0.35, 0.65, 1.0)
"""Share of the surfaces of table, wall and floor that get the texture of another surface of the scene."""
BRIGHTNESS = (0.05, 0.10, 0.15, 0.20, 0.25)
"""Share by which objects become brighter or darker; their hue stays, since a task description may name it."""

DISTRACTORS = (1, 2, 3, 4, 5)
"""Objects that have nothing to do with the task."""
SHIFT_M = (0.01, 0.02, 0.03, 0.04, 0.05)
"""Largest distance by which an object is moved."""
TURN_DEG = (6.0, 12.0, 18.0, 24.0, 30.0)
"""Largest angle by which an object is turned."""
TOWARDS_EDGE = (0.12, 0.24, 0.36, 0.48, 0.60)
"""Share of the way from a start state to the edge of those that the task allows."""

HAND_M = (0.02, 0.04, 0.06, 0.08, 0.10)
"""Distance by which the hand begins elsewhere, where a simulator places the hand."""
JOINTS_RAD = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Norm of the change of the joint angles, where it places joints."""


def generator(seed: int, kind: str) -> np.random.Generator:
    """Return the random numbers of a kind in an episode with this seed."""
    return np.random.default_rng(derive_seed(seed, f"perturb/{kind}"))


def level_of(perturb: Perturbation, kind: str) -> int:
    """Return the level of a kind, 0 if it is not there."""
    return next((level for name, level in perturb if name == kind), 0)


def checked(perturb: Iterable[tuple[str, int]]) -> Perturbation:
    """Return kinds and levels as an episode has them, in the order of `KINDS`.

    Raises:
        ValueError: a kind is unknown or named twice, or a level is not 1 .. 5.
    """
    pairs = [(str(kind), int(level)) for kind, level in perturb]
    found = dict(pairs)
    if len(found) < len(pairs) or found.keys() - set(KINDS) or any(not 1 <= n <= MOST_LEVEL for n in found.values()):
        raise ValueError(f"perturb = {pairs}: want kinds of {', '.join(KINDS)}, each once, with a level 1 .. 5")
    return tuple((kind, found[kind]) for kind in KINDS if kind in found)


# ---- kinds and levels of an episode


def perturbed(settings: PerturbationLevels | None) -> str:
    """Return what follows the description of episodes on the screen: `, perturbed (camera 2)`; empty without any."""
    return "" if settings is None else f", perturbed ({settings})"


def drawn_perturbation(settings: TrainingPerturbations | None, seed: int) -> Perturbation:
    """Draw the kinds and levels of a training episode at the end of `ramp`; none for the share that is as without."""
    draw = np.random.default_rng(seed)
    return () if settings is None or draw.random() >= settings.share else drawn_levels(settings, draw)


def drawn_levels(settings: PerturbationLevels, draw: np.random.Generator) -> Perturbation:
    """Draw a level for each kind that is named."""
    named = {
        "camera": settings.camera,
        "light": settings.light,
        "texture": settings.texture,
        "layout": settings.layout,
        "robot": settings.robot,
        "noise": settings.noise,
        "words": settings.words,
    }
    return tuple((kind, int(draw.integers(own[0], own[-1] + 1))) for kind, own in named.items() if own)


_BITS = 3


def packed(perturb: Perturbation) -> int:
    """Return kinds and levels as one number from 0 on, for memory that several processes share."""
    return sum(level << _BITS * KINDS.index(kind) for kind, level in perturb)


def unpacked(number: int) -> Perturbation:
    """Return what `packed` was given."""
    levels = ((kind, number >> _BITS * place & (1 << _BITS) - 1) for place, kind in enumerate(KINDS))
    return tuple((kind, level) for kind, level in levels if level)


# ---- what is drawn

Vector = NDArray[np.float64]


def direction(random: np.random.Generator, size: int) -> Vector:
    """Return a random unit vector `[size]`."""
    vector = random.standard_normal(size)
    return vector / np.linalg.norm(vector)


@dataclass(frozen=True, kw_only=True)
class CameraChange:
    """Change of a camera; all angles in radians."""

    around: tuple[float, float]
    """Azimuth and elevation around what it looks at."""
    aim: tuple[float, float]
    """Pan and tilt."""
    roll: float
    distance: float
    """Factor."""
    field_of_view: float
    """Factor."""

    @classmethod
    def draw(cls, level: int, random: np.random.Generator) -> CameraChange:
        """Draw one."""
        around, aim = (math.radians(sizes[level - 1]) * direction(random, 2) for sizes in (ORBIT_DEG, AIM_DEG))
        roll, distance, view = random.choice((-1.0, 1.0), 3).tolist()
        return cls(
            around=(float(around[0]), float(around[1])),
            aim=(float(aim[0]), float(aim[1])),
            roll=roll * math.radians(AIM_DEG[level - 1]),
            distance=1.0 + distance * DISTANCE[level - 1],
            field_of_view=1.0 + view * FIELD_OF_VIEW[level - 1],
        )


@dataclass(frozen=True, kw_only=True)
class LightChange:
    """Change of all lights."""

    rotation: Vector
    """Axis times angle [rad], `[3]`."""
    colour: Vector
    """Factors of red, green and blue, with the strength in them, `[3]`."""
    shadows: bool
    """Whether lights that cast shadows still do."""

    @classmethod
    def draw(cls, level: int, random: np.random.Generator) -> LightChange:
        """Draw one."""
        axis, tint = direction(random, 3), direction(random, 3)
        brighter, without_shadows = random.choice((-1.0, 1.0)), random.random() < 0.5
        return cls(
            rotation=math.radians(LIGHT_DEG[level - 1]) * axis,
            colour=(1.0 + TINT[level - 1] * tint) * math.exp(brighter * STRENGTH[level - 1]),
            shadows=not (without_shadows and level >= SHADOWS_OFF),
        )


@dataclass(frozen=True, kw_only=True)
class TextureChange:
    """Change of surfaces; `N` shapes."""

    colours: Vector
    """Colour that is mixed in, `[N, 3]`, 0 .. 1."""
    share: float
    """Share of it in surfaces that do not move."""
    others: NDArray[np.int64]
    """Number of the material that each gets, `[N]`; -1: it keeps its own."""
    brightness: Vector
    """Factor of the colour of objects, `[N]`."""

    @classmethod
    def draw(cls, level: int, random: np.random.Generator, shapes: int, materials: NDArray[np.int64]) -> TextureChange:
        """Draw one.

        Args:
            level: of it.
            random: draws it.
            shapes: `N`.
            materials: numbers of those with a texture.
        """
        # A colour darkens a texture, with which MuJoCo multiplies it, so dark ones are left out.
        colours, lots = random.uniform(0.3, 1.0, (shapes, 3)), random.random(shapes)
        others = materials[random.integers(len(materials), size=shapes)] if len(materials) else np.full(shapes, -1)
        signs = random.choice((-1.0, 1.0), shapes)
        return cls(
            colours=colours,
            share=COLOUR[level - 1],
            others=np.where(lots < OTHER_TEXTURES[level - 1], others, -1),
            brightness=1.0 + BRIGHTNESS[level - 1] * signs,
        )


def hand_offset(level: int, random: np.random.Generator) -> Vector:
    """Draw the offset of the hand's first position `[3]` [m]."""
    return HAND_M[level - 1] * direction(random, 3)


def joint_offsets(level: int, random: np.random.Generator, joints: int) -> Vector:
    """Draw the change of the first joint angles `[joints]` [rad]."""
    return JOINTS_RAD[level - 1] * direction(random, joints)


def towards_edge(level: int, random: np.random.Generator, start: Vector, low: Vector, high: Vector) -> Vector:
    """Return a start state between `start [N]` and a corner of its bounds `low, high [N]`, which is drawn."""
    corner = np.where(random.random(len(start)) < 0.5, low, high)
    moved: Vector = start + TOWARDS_EDGE[level - 1] * (corner - start)
    return moved


def object_shift(level: int, random: np.random.Generator) -> tuple[Vector, float]:
    """Draw the displacement of an object `[2]` [m] and the angle by which it turns [rad]."""
    where = SHIFT_M[level - 1] * random.uniform(0.5, 1.0) * direction(random, 2)
    return where, math.radians(TURN_DEG[level - 1]) * random.uniform(-1.0, 1.0)
