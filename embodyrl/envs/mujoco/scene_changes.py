"""Perturbations of what a MuJoCo scene looks like: cameras, lights, surfaces, and objects that are only seen.

The model and the state that the physics uses hold other values for the moments in which MuJoCo copies the scene for
drawing, and their own ones again before anything else happens. Further objects are added to the copy alone: they are
seen, and nothing can touch them. So the physics of an episode is the same bit for bit with and without.

Shapes: `G` shapes of a model, `N` cameras of it, `E` further objects.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.perturb.kinds import (
    DISTRACTORS,
    CameraChange,
    LightChange,
    TextureChange,
    generator,
    level_of,
)
from embodyrl.envs.types import EpisodeSpec

KINDS = frozenset({"camera", "light", "texture", "layout"})
"""Kinds of perturbation that are shown in a scene."""
PREFIX = "changes."
"""Prefix of the names of a snapshot's arrays that are of changes."""
FARTHEST = 3.0
"""Largest distance to what a camera looks at, in sizes of the scene (`stat.extent`)."""

COLUMNS = 11
"""Numbers of a further object."""

Floats = NDArray[np.float64]


def driven_joints(model: Any) -> NDArray[np.int64]:
    """Return the numbers of the joints that actuators drive, ascending."""
    mujoco = _mujoco()
    by_joint = (int(mujoco.mjtTrn.mjTRN_JOINT), int(mujoco.mjtTrn.mjTRN_JOINTINPARENT))
    return np.unique(model.actuator_trnid[np.isin(model.actuator_trntype, by_joint), 0]).astype(np.int64)


def robot_roots(model: Any) -> list[int]:
    """Return the bodies below the world that have driven joints somewhere."""
    return sorted(set(model.body_rootid[model.jnt_bodyid[driven_joints(model)]].tolist()))


class SceneChanges:
    """What an episode changes in the look of its scene.

    Args:
        episode: whose kinds of `KINDS` are followed.
        model: the `mujoco.MjModel`.
        looks: distance from each camera to what it looks at `[N]` [m]; 0 for one that moves, as on a robot's hand.
        shapes: further objects `[E, 11]`: kind of shape, size (3), position (3), angle, colour (3).
    """

    def __init__(self, episode: EpisodeSpec, model: Any, looks: Floats, shapes: Floats) -> None:
        self._looks, self._shapes = looks, shapes
        self._parts: list[_Cameras | _Lights | _Surfaces] = []
        for kind, make in (("camera", _Cameras), ("light", _Lights), ("texture", _Surfaces)):
            if level := level_of(episode.perturb, kind):
                self._parts.append(make(level, generator(episode.seed, kind), model, looks))

    @classmethod
    def begin(cls, episode: EpisodeSpec, model: Any, data: Any, cameras: Sequence[str]) -> SceneChanges | None:
        """Return the changes of an episode that has just begun; None without any.

        Args:
            episode: the episode.
            model: the `mujoco.MjModel`.
            data: the `mujoco.MjData` at its begin, with all poses computed.
            cameras: names of those that the policy has.
        """
        if not any(kind in KINDS for kind, _ in episode.perturb):
            return None
        level, shapes = level_of(episode.perturb, "layout"), np.zeros((0, COLUMNS))
        if level and cameras:
            camera = next((each for each in map(model.camera, cameras) if _stands(model, each.id)), None)
            number = model.camera(cameras[0]).id if camera is None else camera.id
            shapes = _Placing(model, data, number).place(DISTRACTORS[level - 1], generator(episode.seed, "layout"))
        return cls(episode, model, _looks(model, data), shapes)

    @classmethod
    def restored(cls, episode: EpisodeSpec, model: Any, snapshot: Mapping[str, NDArray[Any]]) -> SceneChanges | None:
        """Return the changes of an episode from its snapshot; None without any."""
        if not any(kind in KINDS for kind, _ in episode.perturb):
            return None
        return cls(episode, model, snapshot[f"{PREFIX}looks"], snapshot[f"{PREFIX}shapes"])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return what a snapshot has to hold of them."""
        return {f"{PREFIX}looks": self._looks, f"{PREFIX}shapes": self._shapes}

    @contextlib.contextmanager
    def applied(self, model: Any, data: Any, camera: int) -> Iterator[None]:
        """Change the scene for the length of a block, in which nothing is simulated, as camera number `camera` sees
        it."""
        kept = [(array, array.copy()) for part in self._parts for array in part.changed(model, data)]
        try:
            for part in self._parts:
                part.apply(model, data, camera)
            yield
        finally:
            for array, before in kept:
                array[...] = before

    def add_shapes(self, scene: Any) -> None:
        """Add the further objects to a `mujoco.MjvScene` that was just updated."""
        mujoco = _mujoco()
        for row in self._shapes:
            if scene.ngeom >= scene.maxgeom:
                return
            shape = scene.geoms[scene.ngeom]
            frame = rotation_about(2, row[7]).reshape(9)
            colour = np.array([*row[8:11], 1.0], np.float32)
            mujoco.mjv_initGeom(shape, int(row[0]), row[1:4], row[4:7], frame, colour)
            shape.category = mujoco.mjtCatBit.mjCAT_DYNAMIC  # decoration casts no shadow
            scene.ngeom += 1


def rotation_about(axis: int, angle: float) -> Floats:
    """Return the matrix `[3, 3]` of a rotation about the x, y or z axis (0, 1, 2) by an angle [rad]."""
    matrix, (one, other) = np.eye(3), [(1, 2), (2, 0), (0, 1)][axis]
    matrix[[one, other], [one, other]] = math.cos(angle)
    matrix[one, other], matrix[other, one] = -math.sin(angle), math.sin(angle)
    return matrix


def _rotation(vector: Floats) -> Floats:
    """Return the matrix `[3, 3]` of a rotation, axis times angle [rad] (Rodrigues)."""
    angle = float(np.linalg.norm(vector))
    x, y, z = vector / angle
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    matrix: Floats = np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross
    return matrix


# ---- the parts that change; each draws once, when an episode begins, what it needs for every image


class _Cameras:
    """Pose and field of view of the cameras."""

    def __init__(self, level: int, random: np.random.Generator, model: Any, looks: Floats) -> None:
        self._looks, self._change = looks, CameraChange.draw(level, random)
        around, aim = self._change.around, self._change.aim
        self._around = rotation_about(1, around[0]) @ rotation_about(0, around[1])
        self._aim = rotation_about(1, aim[0]) @ rotation_about(0, aim[1]) @ rotation_about(2, self._change.roll)

    def changed(self, model: Any, data: Any) -> list[NDArray[Any]]:
        """Return the arrays that `apply` changes."""
        return [data.cam_xpos, data.cam_xmat, model.cam_fovy]

    def apply(self, model: Any, data: Any, camera: int) -> None:
        """Change the camera with this number."""
        place, frame, distance = data.cam_xpos[camera], data.cam_xmat[camera].reshape(3, 3), self._looks[camera]
        turned = frame
        if distance:  # else it is on a robot, where it can only turn
            turned = frame @ self._around
            place += distance * (self._change.distance * turned[:, 2] - frame[:, 2])
        frame[...] = turned @ self._aim
        model.cam_fovy[camera] *= self._change.field_of_view


class _Lights:
    """Direction, colour, strength and shadows of all lights."""

    def __init__(self, level: int, random: np.random.Generator, model: Any, looks: Floats) -> None:
        change = LightChange.draw(level, random)
        self._turn, self._shadows = _rotation(change.rotation).T, change.shadows
        self._colour = change.colour.astype(np.float32)

    def changed(self, model: Any, data: Any) -> list[NDArray[Any]]:
        """Return the arrays that `apply` changes."""
        return [data.light_xdir, *self._colours(model), model.light_castshadow]

    def _colours(self, model: Any) -> list[NDArray[np.float32]]:
        """Return the colours of lights in a model, of the light at the camera as well."""
        head = model.vis.headlight
        own = [model.light_ambient, model.light_diffuse, model.light_specular]
        return [*own, head.ambient, head.diffuse, head.specular]

    def apply(self, model: Any, data: Any, camera: int) -> None:
        """Change the lights."""
        data.light_xdir[:] = data.light_xdir @ self._turn
        for colours in self._colours(model):
            colours *= self._colour
        if not self._shadows:
            model.light_castshadow[:] = 0


UNSET = np.array([0.5, 0.5, 0.5, 1.0], np.float32)
"""Colour of a shape that MuJoCo ignores where the shape has a material."""


class _Surfaces:
    """Colours and textures of what is no robot: of what stands still both, of objects the brightness."""

    def __init__(self, level: int, random: np.random.Generator, model: Any, looks: Floats) -> None:
        change = TextureChange.draw(level, random, model.ngeom, _textured(model))
        fixed = model.body_weldid[model.geom_bodyid] == 0
        robot = np.isin(model.body_rootid[model.geom_bodyid], robot_roots(model))
        still, objects = np.flatnonzero(fixed & ~robot), np.flatnonzero(~fixed & ~robot)
        self._shapes = np.concatenate([still, objects])
        own = np.concatenate([np.full(len(still), 1.0 - change.share), change.brightness[objects]])
        other = np.concatenate([change.share * change.colours[still], np.zeros((len(objects), 3))])
        self._own, self._other = own[:, None].astype(np.float32), other.astype(np.float32)
        # Textures of others fit shapes that are no meshes, whose own coordinates say where a texture is.
        mesh = model.geom_type == int(_mujoco().mjtGeom.mjGEOM_MESH)
        self._replaced = still[(change.others[still] >= 0) & ~mesh[still]]
        self._others = change.others[self._replaced]

    def changed(self, model: Any, data: Any) -> list[NDArray[Any]]:
        """Return the arrays that `apply` changes."""
        return [model.geom_rgba, model.geom_matid]

    def apply(self, model: Any, data: Any, camera: int) -> None:
        """Change the surfaces, from the colours that they have now: environments recolour some while they play."""
        colours, materials = model.geom_rgba[self._shapes], model.geom_matid[self._shapes]
        of_material = (materials >= 0) & (colours == UNSET).all(axis=1)
        if of_material.any():
            colours[of_material, :3] = model.mat_rgba[materials[of_material], :3]
        model.geom_rgba[self._shapes, :3] = np.minimum(self._own * colours[:, :3] + self._other, 1.0)
        model.geom_matid[self._replaced] = self._others


def _textured(model: Any) -> NDArray[np.int64]:
    """Return the numbers of the materials that have a texture."""
    textures = np.asarray(model.mat_texid)  # `[materials, roles]`; in older versions of MuJoCo `[materials]`
    return np.flatnonzero((textures >= 0).any(axis=1) if textures.ndim == 2 else textures >= 0)


# ---- where things are


def _stands(model: Any, camera: int) -> bool:
    return bool(model.body_weldid[model.cam_bodyid[camera]] == 0)


def _ray(model: Any, data: Any, start: Floats, towards: Floats) -> tuple[float, int]:
    """Return the distance to the first shape in a direction and its number; -1 and -1 if there is none."""
    found = np.array([-1], np.int32)
    along = np.ascontiguousarray(towards / np.linalg.norm(towards))
    distance = _mujoco().mj_ray(model, data, np.ascontiguousarray(start), along, None, 1, -1, found)
    return float(distance), int(found[0])


def _looks(model: Any, data: Any) -> Floats:
    """Return the distance from each camera to what it looks at, `[N]`; 0 for one that moves."""
    distances = np.zeros(model.ncam)
    for number in range(model.ncam):
        if _stands(model, number):
            ahead, _ = _ray(model, data, data.cam_xpos[number].copy(), -data.cam_xmat[number].reshape(3, 3)[:, 2])
            farthest = FARTHEST * model.stat.extent
            distances[number] = min(ahead, farthest) if ahead > 0 else model.stat.extent
    return distances


COLOURS = np.array(
    [[0.85, 0.2, 0.2], [0.2, 0.6, 0.25], [0.2, 0.35, 0.8], [0.9, 0.75, 0.15], [0.55, 0.3, 0.65], [0.35, 0.25, 0.2]]
)
"""Colours of further objects, before they are varied."""
ATTEMPTS = 60
"""Most places that are tried for each."""
STEEPEST = 0.15
"""Largest difference in height below an object, in its widths."""
SMALLEST, LARGEST = 0.022, 0.042
"""Half the width of further objects, as a share of the distance from the camera."""
GAP = 2.0
"""Free space around them, in half widths."""


class _Placing:
    """Places objects on what stands still, where a camera sees them and away from all that moves.

    Args:
        model: the `mujoco.MjModel`.
        data: the `mujoco.MjData`, with all poses computed.
        camera: number of the camera.
    """

    def __init__(self, model: Any, data: Any, camera: int) -> None:
        self._model, self._data = model, data
        self._where, self._frame = data.cam_xpos[camera].copy(), data.cam_xmat[camera].reshape(3, 3).copy()
        self._wide = math.tan(math.radians(float(model.cam_fovy[camera])) / 2)
        ahead, _ = _ray(model, data, self._where, -self._frame[:, 2])
        self._height = float(self._where[2] - ahead * self._frame[2, 2]) if ahead > 0 else None
        """Height of what the camera looks at; None: it looks at nothing."""
        moving = model.body_weldid[model.geom_bodyid] != 0
        marks = np.concatenate([data.geom_xpos[moving], data.site_xpos])
        sizes = np.concatenate([np.minimum(model.geom_rbound[moving], model.stat.extent), np.zeros(model.nsite)])
        self._taken = [(place[:2].copy(), float(size)) for place, size in zip(marks, sizes, strict=True)]

    def place(self, count: int, random: np.random.Generator) -> Floats:
        """Return up to `count` objects `[E, 11]`, see `SceneChanges`: fewer where there is no room."""
        rows = []
        for _ in range(count):
            for attempt in range(ATTEMPTS):
                # First on the table, say, that the camera looks at; then anywhere, such as on the floor beside it.
                row = self._tried(random, self._height if 2 * attempt < ATTEMPTS else None)
                if row is not None:
                    rows.append(row)
                    break
        return np.array(rows).reshape(-1, COLUMNS)

    def _tried(self, random: np.random.Generator, height: float | None) -> Floats | None:
        """Return an object at a random place; None if it cannot stand there, or not at this height."""
        across, up = random.uniform(-0.85, 0.85), random.uniform(-0.85, 0.6)
        share, turn, kind = random.uniform(SMALLEST, LARGEST), random.uniform(0.0, math.pi), int(random.integers(4))
        tall, colour = random.uniform(0.7, 1.8), COLOURS[random.integers(len(COLOURS))] + random.uniform(-0.1, 0.1, 3)
        towards = self._frame @ np.array([across * self._wide, up * self._wide, -1.0])
        distance, hit = _ray(self._model, self._data, self._where, towards)
        if distance <= 0 or self._model.body_weldid[self._model.geom_bodyid[hit]] != 0:
            return None
        foot, half = self._where + distance * towards / np.linalg.norm(towards), share * distance
        if height is not None and abs(foot[2] - height) > half:
            return None
        if not (self._is_free(foot, half) and self._is_level(foot, half)):
            return None
        self._taken.append((foot[:2].copy(), half))
        size, height = _sized(kind, half, tall)
        numbers = _mujoco().mjtGeom
        shape = (numbers.mjGEOM_BOX, numbers.mjGEOM_CYLINDER, numbers.mjGEOM_ELLIPSOID, numbers.mjGEOM_CAPSULE)[kind]
        centre = foot + np.array([0.0, 0.0, height])
        return np.array([float(int(shape)), *size, *centre, turn, *np.clip(colour, 0.0, 1.0)])

    def _is_free(self, foot: Floats, half: float) -> bool:
        return all(np.linalg.norm(place - foot[:2]) > GAP * half + min(size, 3 * half) for place, size in self._taken)

    def _is_level(self, foot: Floats, half: float) -> bool:
        """Return whether there is the same height below all four corners."""
        for right, ahead in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            above = foot + half * np.array([right, ahead, 1.0])
            distance, hit = _ray(self._model, self._data, above, np.array([0.0, 0.0, -1.0]))
            if hit < 0 or abs(distance - half) > STEEPEST * half:
                return False
        return True


def _sized(kind: int, half: float, tall: float) -> tuple[tuple[float, float, float], float]:
    """Return the size of a shape, by the number of its kind, and the height of its middle."""
    high = half * tall
    if kind == 0:
        return (half, 0.75 * half, high), high
    if kind == 3:  # the length of a capsule is that of its straight part
        return (0.6 * half, 0.6 * half, high), high + 0.6 * half
    return (half, half, high), high


def _mujoco() -> Any:
    """Return the module, which the environment has imported."""
    return sys.modules["mujoco"]
