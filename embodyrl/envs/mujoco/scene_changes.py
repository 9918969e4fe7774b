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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Surfaces:
    """Shapes of a model whose surfaces change; those of the robot and the invisible ones do not."""

    still: NDArray[np.int64]
    """Numbers of those that cannot move: table, walls, floor."""
    objects: NDArray[np.int64]
    """Numbers of those that can."""
    primitive: NDArray[np.bool_]
    """`[G]`: it is no mesh, so that any texture fits it."""

    @classmethod
    def of(cls, model: Any) -> Surfaces:
        """Return those of a model."""
        fixed = model.body_weldid[model.geom_bodyid] == 0
        own = np.isin(model.body_rootid[model.geom_bodyid], robot_roots(model))
        mesh = int(_mujoco().mjtGeom.mjGEOM_MESH)
        return cls(
            still=np.flatnonzero(fixed & ~own), objects=np.flatnonzero(~fixed & ~own), primitive=model.geom_type != mesh
        )


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
        levels = {kind: level_of(episode.perturb, kind) for kind in KINDS}
        drawn = {kind: generator(episode.seed, kind) for kind, level in levels.items() if level}
        self._camera = CameraChange.draw(levels["camera"], drawn["camera"]) if levels["camera"] else None
        self._light = LightChange.draw(levels["light"], drawn["light"]) if levels["light"] else None
        self._texture: TextureChange | None = None
        if levels["texture"]:
            self._surfaces = Surfaces.of(model)
            self._texture = TextureChange.draw(levels["texture"], drawn["texture"], model.ngeom, _textured(model))

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
        kept = [(array, array.copy()) for array in self._changed(model, data)]
        try:
            if self._camera is not None:
                self._move(model, data, camera, self._camera)
            if self._light is not None:
                _light(model, data, self._light)
            if self._texture is not None:
                self._paint(model, self._texture)
            yield
        finally:
            for array, before in kept:
                array[...] = before

    def _changed(self, model: Any, data: Any) -> list[NDArray[Any]]:
        """Return the arrays that `applied` changes."""
        arrays: list[NDArray[Any]] = []
        if self._camera is not None:
            arrays += [data.cam_xpos, data.cam_xmat, model.cam_fovy]
        if self._light is not None:
            arrays += [data.light_xdir, *_brightness(model), model.light_castshadow]
        if self._texture is not None:
            arrays += [model.geom_rgba, model.geom_matid]
        return arrays

    def _move(self, model: Any, data: Any, camera: int, change: CameraChange) -> None:
        frame, distance = data.cam_xmat[camera].reshape(3, 3).copy(), float(self._looks[camera])
        if distance:  # else it is on a robot, where it can only turn
            target = data.cam_xpos[camera] - distance * frame[:, 2]
            frame = frame @ rotation_about(1, change.around[0]) @ rotation_about(0, change.around[1])
            data.cam_xpos[camera] = target + distance * change.distance * frame[:, 2]
        aim = rotation_about(1, change.aim[0]) @ rotation_about(0, change.aim[1]) @ rotation_about(2, change.roll)
        data.cam_xmat[camera] = (frame @ aim).reshape(9)
        model.cam_fovy[camera] *= change.field_of_view

    def _paint(self, model: Any, change: TextureChange) -> None:
        still, objects = self._surfaces.still, self._surfaces.objects
        colours = _own_colours(model)
        model.geom_rgba[still, :3] = (1.0 - change.share) * colours[still] + change.share * change.colours[still]
        model.geom_rgba[objects, :3] = np.clip(colours[objects] * change.brightness[objects, None], 0.0, 1.0)
        other = still[(change.others[still] >= 0) & self._surfaces.primitive[still]]
        model.geom_matid[other] = change.others[other]

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


def _brightness(model: Any) -> list[NDArray[Any]]:
    """Return what the colours of lights are in a model, the light at the camera included."""
    head, parts = model.vis.headlight, ("ambient", "diffuse", "specular")
    return [*(getattr(model, f"light_{part}") for part in parts), *(getattr(head, part) for part in parts)]


def _light(model: Any, data: Any, change: LightChange) -> None:
    data.light_xdir[:] = data.light_xdir @ _rotation(change.rotation).T
    for colours in _brightness(model):
        colours *= change.colour.astype(colours.dtype)
    if not change.shadows:
        model.light_castshadow[:] = 0


def _textured(model: Any) -> NDArray[np.int64]:
    """Return the numbers of the materials that have a texture."""
    textures = np.asarray(model.mat_texid)  # `[materials, roles]`; in older versions of MuJoCo `[materials]`
    return np.flatnonzero((textures >= 0).any(axis=1) if textures.ndim == 2 else textures >= 0)


UNSET = np.array([0.5, 0.5, 0.5, 1.0], np.float32)
"""Colour of a shape that MuJoCo ignores where the shape has a material."""


def _own_colours(model: Any) -> NDArray[np.float32]:
    """Return the colours that MuJoCo draws the shapes of a model with, `[G, 3]`."""
    colours: NDArray[np.float32] = model.geom_rgba[:, :3].copy()
    if model.nmat:
        of_material = (model.geom_matid >= 0) & (model.geom_rgba == UNSET).all(axis=1)
        colours[of_material] = model.mat_rgba[model.geom_matid[of_material], :3]
    return colours


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
