"""What a policy sees of a Gymnasium environment: numbers, images in its observations, and images of its scene."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from embodyrl.envs.base import RenderError, check_cameras
from embodyrl.envs.gymnasium.tasks import OBSERVATION, RENDER
from embodyrl.envs.images import resize
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import Renderer, Renderers
from embodyrl.envs.mujoco.scene_changes import SceneChanges
from embodyrl.envs.options import GymnasiumConfig, RenderQuality
from embodyrl.errors import UserError, did_you_mean

ENVIRONMENT_STATE = "environment_state"
"""Usual name of the entry of a Dict observation that is the state of the environment."""

FOR_PEOPLE = (480, 480)
"""Size of images for people that are taken by a camera of the scene [pixels]."""


class Views:
    """Reads the observations of one environment.

    Args:
        task: id of the environment, for messages.
        env: the environment.
        config: its `cameras` are `render`, `observation`, images of a Dict observation, or cameras of its MuJoCo scene,
            in the order of the images; `image_size` is height and width of every image [pixels].
        renderers: renderers of MuJoCo scenes that the environments of a process share.

    Raises:
        UserError: the environment has no such camera, or observations that are neither numbers nor images.
    """

    def __init__(self, task: str, env: Any, config: GymnasiumConfig, renderers: Renderers | None = None) -> None:
        self._task, self._env, self._cameras, self._quality = task, env, config.cameras, config.render_quality
        self._height, self._width = config.image_size
        self._renderers = renderers or Renderers(most=1)
        space = env.observation_space
        self._has_parts = isinstance(space, spaces.Dict)
        parts = dict(_parts(space)) if self._has_parts else {OBSERVATION: space}
        images = sorted(name for name, part in parts.items() if _is_image(part))
        self._scene = [name for name in scene_cameras(env) if name not in images]
        self.scene_cameras = [name for name in config.cameras if name in self._scene]
        """Those of `env.cameras` that are cameras of the MuJoCo scene."""
        self.changes: SceneChanges | None = None
        """What the episode changes in the look of the scene; None: nothing."""
        check_cameras(config.cameras, [*images, *self._scene, RENDER], task)
        self._numbers = {name: part for name, part in parts.items() if name not in images}
        for name, part in self._numbers.items():
            _check_numbers(
                task, f"observations {part}" if name == OBSERVATION else f"an observation {name!r} {part}", part
            )
        self._is_vector = isinstance(space, spaces.Box) and not images
        self.proprio_dim = sum(int(spaces.flatdim(part)) for part in self._numbers.values())
        """`S`, numbers in an observation, without images."""
        self.environment_state = self._range_of(config.environment_state)
        """See `SimulatorSpec.environment_state`."""
        if not config.cameras and not self.proprio_dim:
            raise UserError(
                f"the Gymnasium environment {task!r} shows nothing but images: set env.cameras: [{', '.join(images)}]"
            )

    def _range_of(self, entry: str | None) -> tuple[int, int]:
        """Return where in the state the numbers of an entry are; (0, 0) without one."""
        named = entry or ENVIRONMENT_STATE
        if named not in self._numbers:
            if entry is None:
                return 0, 0
            hint = did_you_mean(entry, self._numbers, lead=" - ")
            raise UserError(
                f"env.environment_state names {entry!r}, which is no entry of numbers in the observations of "
                f"{self._task!r}{hint} (entries: {', '.join(self._numbers) or 'none'})"
            )
        before = itertools.takewhile(lambda name: name != named, self._numbers)
        first = sum(int(spaces.flatdim(self._numbers[name])) for name in before)
        return first, first + int(spaces.flatdim(self._numbers[named]))

    def read(self, observation: Any) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32] | None]:
        """Images `[V, H, W, 3]` or None, and proprio `[S]` or None."""
        if self._is_vector and not self._cameras:
            return None, np.array(observation, np.float32).reshape(-1)
        images = [self._image(camera, observation) for camera in self._cameras]
        numbers = [
            np.asarray(spaces.flatten(part, self._part(observation, name)), np.float32).reshape(-1)
            for name, part in self._numbers.items()
        ]
        return np.stack(images) if images else None, np.concatenate(numbers) if numbers else None

    def check(self) -> None:
        """Reset the environment and render once, if a camera needs rendering.

        Raises:
            UserError: the environment cannot render.
        """
        rendered = [camera for camera in self._cameras if camera == RENDER or camera in self._scene]
        if rendered:
            self._env.reset(seed=0)
            try:
                self.render() if rendered[0] == RENDER else self._scene_image(rendered[0], self._height, self._width)
            except RenderError as error:
                raise UserError(f"env.cameras names {rendered[0]!r}, but {error}") from error

    def render(self) -> NDArray[np.uint8]:
        """Render the environment's own image, in its own size `[H, W, 3]`.

        Raises:
            RenderError: it has none.
        """
        if (film_camera := getattr(self._env.unwrapped, "film_camera", None)) is not None:
            return self._scene_image(film_camera, *FOR_PEOPLE)
        if (own := getattr(self._env.unwrapped, "mujoco_renderer", None)) is not None:
            rendering.choose()
            if own.viewer is not None:  # which else draws in the OpenGL context of whatever was rendered last
                own.viewer.make_context_current()
        if self._env.unwrapped.render_mode != "rgb_array":
            raise RenderError(f"the Gymnasium environment {self._task!r} has no render mode 'rgb_array'")
        try:
            with physics_kept(self._env):
                image = np.asarray(self._env.render(), np.uint8)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise RenderError(f"the Gymnasium environment {self._task!r} cannot render: {why}") from error
        if image.ndim != 3 or image.shape[2] != 3:
            raise RenderError(f"the Gymnasium environment {self._task!r} rendered {image.shape}, want [H, W, 3]")
        return image

    def _image(self, camera: str, observation: Any) -> NDArray[np.uint8]:
        """Return the image of one camera, at the size of the config."""
        if camera in self._scene:
            return self._scene_image(camera, self._height, self._width)
        image = self.render() if camera == RENDER else np.asarray(self._part(observation, camera))
        return resize(image, self._height, self._width)

    def _scene_image(self, camera: str, height: int, width: int) -> NDArray[np.uint8]:
        """Render the MuJoCo scene from one of its cameras."""
        env = self._env.unwrapped
        key = self._task, height, width
        renderer = self._renderers.get(key, lambda: _renderer(env.model, height, width, self._quality))
        for group in getattr(env, "hidden_groups", ()):
            renderer.options.geomgroup[group] = 0
        with physics_kept(self._env):
            if (mark_goals := getattr(env, "_render_callback", None)) is not None:
                mark_goals()
            return renderer.render(env.data, camera, self.changes)

    def _part(self, observation: Any, name: str) -> Any:
        """Return the part of an observation that `_parts` calls `name`."""
        if not self._has_parts:
            return observation
        for key in name.split("."):
            observation = observation[key]
        return observation


def _renderer(model: Any, height: int, width: int, quality: RenderQuality) -> Renderer:
    """Make a renderer of a scene, and leave the scene's settings to the package's own renderer."""
    size, detail = model.vis.global_, model.vis.quality
    before = size.offheight, size.offwidth, detail.shadowsize, detail.offsamples
    try:
        return Renderer(model, height, width, quality)
    finally:
        size.offheight, size.offwidth, detail.shadowsize, detail.offsamples = before


@contextlib.contextmanager
def physics_kept(env: Any) -> Iterator[None]:
    """Undo what rendering does to the physics of gymnasium-robotics, so that episodes do not depend on who watches: it
    moves the marks of goals to their places first, and has MuJoCo compute all forces anew."""
    inner = env.unwrapped
    if not hasattr(inner, "_render_callback"):
        yield
        return
    data, sites = inner.data, inner.model.site_pos.copy()
    values = {name: getattr(data, name) for name in dir(data) if not name.startswith("_")}
    kept = {name: value.copy() for name, value in values.items() if isinstance(value, np.ndarray)}
    try:
        yield
    finally:
        inner.model.site_pos[:] = sites
        for name, before in kept.items():
            now = getattr(data, name)
            if now.shape == before.shape:  # else an array of contacts, which the next step computes anew
                now[...] = before


def scene_cameras(env: Any) -> list[str]:
    """Return the names of the cameras of an environment's MuJoCo scene; none if it has no such scene."""
    model = getattr(env.unwrapped, "model", None)
    mujoco: Any = sys.modules.get("mujoco")
    if mujoco is None or not isinstance(model, mujoco.MjModel):
        return []
    return [name for name in (model.camera(number).name for number in range(model.ncam)) if name]


def _parts(space: spaces.Dict, prefix: str = "") -> Iterator[tuple[str, spaces.Space[Any]]]:
    """Yield the entries of a Dict space, and in place of a Dict that holds images its entries, as `outer.inner`."""
    for name, part in space.spaces.items():
        if isinstance(part, spaces.Dict) and _holds_images(part.spaces):
            yield from _parts(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part


def _holds_images(entries: Mapping[str, spaces.Space[Any]]) -> bool:
    return any(
        _holds_images(part.spaces) if isinstance(part, spaces.Dict) else _is_image(part) for part in entries.values()
    )


def _is_image(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3


def _check_numbers(task: str, what: str, space: spaces.Space[Any]) -> None:
    """Raise `UserError` unless `space` flattens to a vector and is not an image of an unsupported format."""
    pixels = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) > 1
    if pixels or not space.is_np_flattenable:
        raise UserError(
            f"the Gymnasium environment {task!r} has {what}: supported are vectors (Box, Discrete, and Dict or Tuple "
            f"of them) and images (Box of uint8 [H, W, 3], by itself or as an entry of a Dict)"
        )
