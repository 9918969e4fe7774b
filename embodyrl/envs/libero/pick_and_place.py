"""Pick an object of a LIBERO scene up and place it: the rules by which the scripted expert moves.

What is done follows from the present state (and from the height at which the object stood), not from a plan: pushes are
made up for, and the rules may take over from a policy at any time. Motions are proportional to distances and limited
in speed. The hand goes through funnels: it descends as it comes to be above where it goes to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.libero.scene import Scene

Array = NDArray[np.float64]

METRES, RADIANS = 0.05, 0.5
"""Displacement [m] and rotation [rad] of an action of 1."""
FASTEST, TURNING = 0.8, 0.4
"""Largest length of those parts of an action that displace the hand, and that turn it."""
OPEN, CLOSE = -1.0, 1.0
"""Actions of the gripper."""
WIDE = 0.07
"""Distance of the fingers from which on they are taken to be open [m]."""
HOVER, CARRY = 0.10, 0.10
"""Height above a grasp from which the hand descends, and above start and place at which objects are carried [m]."""
SLOPE, THROAT = 3.0, 0.01
"""Steepness of funnels (height over radius), and radius of their narrow ends [m]."""
CENTRED = 0.025
"""Distance from the place, seen from above, within which an object is released [m]."""
BASE, REACH = np.array([-0.66, 0.0]), 0.775
"""Where the robot stands at a table, and how far from there the upright hand reaches down to the table [m]."""
FINGER = 0.053
"""Distance of an open finger's middle from the middle between both [m]."""
MARGIN = 0.025
"""Least distance of a finger's middle from what stands beside the object [m]."""
TIP = 0.025
"""What must be free below the middle of the fingers [m]: their tips, and some more."""
SIDES = tuple(math.radians(side) for side in (90, 60, 120, 30, 150, 15, 165, 180, -90, -60, -120))
"""Directions from a bowl's middle to its grasp, seen from above, those with little turning first. The hand starts with
its fingers along 90 degrees; cabinets stand at -90."""


@dataclass(frozen=True, kw_only=True)
class Grasp:
    """How an object of a kind is grasped from above."""

    height: float
    """Height of the fingers' middle above the object's origin [m]."""
    shut: float
    """Distance of the fingers below which they hold it [m]."""
    rim: float = 0.0
    """Distance of the grasp from the origin, for hollow objects that are held at their rim [m]."""
    axes: tuple[int, ...] = ()
    """Axes of the object along which fingers may close, that with the least turn is chosen; (): any direction."""
    below: float = 0.0
    """Extent of the object below its origin [m]."""


CAN = Grasp(height=0.012, shut=0.068, axes=(0, 2), below=0.038)
CARTON = Grasp(height=0.051, shut=0.057, axes=(0,), below=0.07)
GRASPS = {
    "akita_black_bowl": Grasp(height=0.034, shut=0.0105, rim=0.048),
    "alphabet_soup": CAN,
    "bbq_sauce": Grasp(height=0.032, shut=0.052, axes=(0, 1), below=0.055),
    "butter": Grasp(height=0.003, shut=0.044, axes=(1,), below=0.009),
    "chocolate_pudding": Grasp(height=0.001, shut=0.051, axes=(1,), below=0.013),
    "cream_cheese": Grasp(height=0.003, shut=0.047, axes=(1,), below=0.009),
    "ketchup": Grasp(height=0.045, shut=0.06, axes=(0, 2), below=0.072),
    "milk": CARTON,
    "orange_juice": CARTON,
    "salad_dressing": Grasp(height=0.045, shut=0.057, axes=(0, 2), below=0.073),
    "tomato_sauce": CAN,
}
"""Kind of object -> how it is grasped. A carton is held at the ends of its gable: fingers that touch the edge below it
stick there in MuJoCo."""

OBSTACLES = {
    "akita_black_bowl": (0.054, 0.052),
    "glazed_rim_porcelain_ramekin": (0.045, 0.043),
    "cookies": (0.04, 0.009),
}
"""Kind of object beside which a finger may have to go down -> its radius, and its height above its origin [m]."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an object goes."""

    point: Array
    """Where the object's origin is released `[3]` [m]."""
    above: float
    """How far above it may still be then [m]."""
    inside: float = CENTRED
    """Distance from it, seen from above, within which an object that lies deeper has arrived [m]."""


class PickAndPlace:
    """Plays an episode of a task whose goal is one object on, or in, something else."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        ((_, self._what, self._where),) = scene.goal
        self._grasp = GRASPS[scene.kinds[self._what]]
        self.stood: float | None = None
        """Height of the object's origin when the episode began [m]; None before."""

    def act(self, state: Array) -> Array:
        """Return the action `[7]` in a state `[S]` with `proprio: full`."""
        pose, hand, width = state[self._scene.place(self._what)], state[:3], float(state[6] - state[7])
        if self.stood is None:
            self.stood = float(pose[2])
        place = self._place(state)
        if _arrived(pose[:3], place):
            up = pose[2] + self._grasp.height + HOVER - hand[2] if width > WIDE else 0.0
            return _action(np.array([0.0, 0.0, max(0.0, up)]), np.zeros(3), OPEN)
        if self._is_held(hand, width, pose):
            return _action(self._carry(pose[:3], place.point), np.zeros(3), CLOSE)
        side = self._side(state, pose)
        goal = pose[:3] + np.array([self._grasp.rim * math.cos(side), self._grasp.rim * math.sin(side), 0.0])
        goal[2] += self._grasp.height
        off = goal - hand
        turn = _turn_between(_rotation(state[3:6]), _upright(side))
        ready = math.hypot(off[0], off[1]) < 0.012 and abs(off[2]) < 0.01 and np.linalg.norm(turn) < 0.15
        off[2] += min(HOVER, _funnel(off))
        return _action(off, turn, CLOSE if ready else OPEN)

    def _is_held(self, hand: Array, width: float, pose: Array) -> bool:
        """Return whether the fingers are shut where they grasp the object."""
        off = _matrix(pose[3:]).T @ (hand - pose[:3]) if self._grasp.rim else hand - pose[:3]
        aside = abs(math.hypot(off[0], off[1]) - self._grasp.rim)
        return width < self._grasp.shut and aside < 0.025 and abs(off[2] - self._grasp.height) < 0.025

    def _carry(self, position: Array, point: Array) -> Array:
        """Return the displacement [m] of an object that is held: straight up first, then across, then down."""
        assert self.stood is not None, "the state has been seen"
        off = point - position
        off[2] += min(max(self.stood - point[2], 0.0) + CARRY, _funnel(off))
        risen = 1.0 - min(max((off[2] - 0.02) / 0.03, 0.0), 1.0)
        off[:2] *= risen
        return off

    def _place(self, state: Array) -> Place:
        """Return where the object goes."""
        where, below, kinds = self._where, self._grasp.below, self._scene.kinds
        if where in kinds:
            top = 0.045 if kinds[where] == "akita_black_bowl" else 0.0
            return Place(point=state[self._scene.place(where)][:3] + np.array([0, 0, top + below]), above=0.018)
        if where.endswith("_contain_region"):  # let go within the rim of the basket
            basket = state[self._scene.place(where.removesuffix("_contain_region"))][:3]
            return Place(point=basket + np.array([0, 0, 0.126 + below]), above=0.015, inside=0.06)
        if where.endswith("_cook_region"):
            x, y = self._scene.fixtures[where.removesuffix("_cook_region")]
            return Place(point=np.array([x + 0.15, y, 0.931 + below]), above=0.012)
        x, y = self._scene.fixtures[where.removesuffix("_top_side")]
        return Place(point=np.array([x, y, 1.128 + below]), above=0.012)

    def _side(self, state: Array, pose: Array) -> float:
        """Return the direction along which the fingers close, seen from above [rad]; for a rim, that of the grasp from
        the middle."""
        if self._grasp.rim:
            return next((side for side in SIDES if self._is_free(state, pose, side)), SIDES[0])
        turned = _matrix(pose[3:])
        sides = [math.atan2(turned[1, axis], turned[0, axis]) for axis in self._grasp.axes] or [SIDES[0]]
        return min(sides, key=lambda side: abs(_half_turn(side - SIDES[0])))

    def _is_free(self, state: Array, pose: Array, side: float) -> bool:
        """Return whether the rim can be grasped on a side: it is in reach, and nothing stands below the outer
        finger."""
        outwards = np.array([math.cos(side), math.sin(side)])
        grasp = pose[:2] + self._grasp.rim * outwards
        if np.linalg.norm(grasp - BASE) > REACH:
            return False
        finger, tip = grasp + FINGER * outwards, pose[2] + self._grasp.height - TIP
        for name, kind in self._scene.kinds.items():
            radius, height = OBSTACLES.get(kind, (0.0, -math.inf))
            other = state[self._scene.place(name)]
            beside = np.linalg.norm(finger - other[:2]) < radius + MARGIN
            if name != self._what and beside and other[2] + height > tip:
                return False
        return True


def _arrived(position: Array, place: Place) -> bool:
    """Return whether an object at `position` [m] may be let go, or has been."""
    off = position - place.point
    aside = math.hypot(off[0], off[1])
    return bool((aside < CENTRED and off[2] < place.above) or (aside < place.inside and off[2] < -0.03))


def _funnel(off: Array) -> float:
    """Return the height [m] above a goal at which to be at this distance `[3]` from it."""
    return SLOPE * max(0.0, math.hypot(off[0], off[1]) - THROAT)


def _action(off: Array, turn: Array, gripper: float) -> Array:
    """Return the action `[7]` that moves the hand by `off` [m], turns it by `turn` (axis times angle, rad) as fast as
    is allowed, and opens or closes."""
    return np.array([*_limited(off / METRES, FASTEST), *_limited(0.5 * turn / RADIANS, TURNING), gripper])


def _limited(vector: Array, most: float) -> Array:
    """Return a vector, shortened to the length `most`."""
    length = float(np.linalg.norm(vector))
    return vector if length <= most else vector * (most / length)


def _half_turn(angle: float) -> float:
    """Return an angle [rad] of fingers, which are the same after half a turn, within -pi/2 .. pi/2."""
    return (angle + math.pi / 2) % math.pi - math.pi / 2


def _upright(side: float) -> Array:
    """Return the rotation `[3, 3]` of a hand that points down with its fingers along a direction [rad]."""
    yaw = _half_turn(side - math.pi / 2)
    cosine, sine = math.cos(yaw), math.sin(yaw)
    return np.array([[cosine, sine, 0.0], [sine, -cosine, 0.0], [0.0, 0.0, -1.0]])


def _matrix(quaternion: Array) -> Array:
    """Convert a unit quaternion (w, x, y, z) to a rotation matrix `[3, 3]`."""
    w, (x, y, z) = quaternion[0], quaternion[1:]
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return np.asarray(np.eye(3) + 2.0 * (w * cross + cross @ cross))


def _rotation(vector: Array) -> Array:
    """Convert axis times angle [rad] to a rotation matrix `[3, 3]`."""
    angle = float(np.linalg.norm(vector))
    axis = vector / angle if angle else vector
    return _matrix(np.array([math.cos(angle / 2), *(math.sin(angle / 2) * axis)]))


def _turn_between(now: Array, wanted: Array) -> Array:
    """Return the rotation `[3]` (axis times angle, rad, along the axes of the world) from one matrix to another."""
    turn = wanted @ now.T
    cosine = min(max((float(np.trace(turn)) - 1.0) / 2.0, -1.0), 1.0)
    axis = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
    length = float(np.linalg.norm(axis))
    return axis / length * math.acos(cosine) if length > 1e-9 else np.zeros(3)
