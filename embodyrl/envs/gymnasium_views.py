"""What a policy sees of a Gymnasium environment: which parts of its observations are pictures and which are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from embodyrl.envs import mujoco_gl
from embodyrl.envs.base import RenderError, check_cameras
from embodyrl.envs.resize import resize
from embodyrl.errors import UserError

RENDER = "render"
"""Camera that is the environment's `render()`."""

OBSERVATION = "observation"
"""Camera that is the whole observation, where that is a picture."""


class Views:
    """Reads the observations of one environment.

    Args:
        task: id of the environment, for messages.
        env: the environment.
        cameras: `render`, `observation`, or keys of a Dict observation, in the order of the pictures.
        image_size: height and width of every picture [pixels].

    Raises:
        UserError: the environment has no such camera, or observations that are neither numbers nor pictures.
    """

    def __init__(self, task: str, env: Any, cameras: Sequence[str], image_size: Sequence[int]) -> None:
        self._task, self._env, self._cameras = task, env, cameras
        self._height, self._width = image_size
        space = env.observation_space
        self._has_parts = isinstance(space, spaces.Dict)
        parts = dict(space.spaces) if self._has_parts else {OBSERVATION: space}
        pictures = sorted(name for name, part in parts.items() if _is_picture(part))
        check_cameras(cameras, [*pictures, RENDER], task)
        self._numbers = {name: part for name, part in parts.items() if name not in pictures}
        for name, part in self._numbers.items():
            _check_numbers(
                task, f"observations {part}" if name == OBSERVATION else f"an observation {name!r} {part}", part
            )
        self._is_vector = isinstance(space, spaces.Box) and not pictures
        self.proprio_dim = sum(int(spaces.flatdim(part)) for part in self._numbers.values())
        """`S`, numbers in an observation that are not pixels."""
        if not cameras and not self.proprio_dim:
            raise UserError(
                f"the Gymnasium environment {task!r} shows nothing but pictures: set env.cameras: "
                f"[{', '.join(pictures)}]"
            )

    def read(self, observation: Any) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32] | None]:
        """Images `[V, H, W, 3]` or None, and proprio `[S]` or None."""
        if self._is_vector and not self._cameras:
            return None, np.array(observation, np.float32).reshape(-1)
        parts = observation if self._has_parts else {OBSERVATION: observation}
        images = [self._image(camera, parts) for camera in self._cameras]
        numbers = [
            np.asarray(spaces.flatten(part, parts[name]), np.float32).reshape(-1)
            for name, part in self._numbers.items()
        ]
        return np.stack(images) if images else None, np.concatenate(numbers) if numbers else None

    def check(self) -> None:
        """Reset the environment and draw once, where a camera needs that.

        Raises:
            UserError: the environment cannot draw.
        """
        if RENDER in self._cameras:
            self._env.reset(seed=0)
            try:
                self.render()
            except RenderError as error:
                raise UserError(f"env.cameras names {RENDER!r}, but {error}") from error

    def render(self) -> NDArray[np.uint8]:
        """The environment's own picture, in its own size `[H, W, 3]`.

        Raises:
            RenderError: it has none.
        """
        if hasattr(self._env.unwrapped, "mujoco_renderer"):
            mujoco_gl.choose()
        if self._env.unwrapped.render_mode != "rgb_array":
            raise RenderError(f"the Gymnasium environment {self._task!r} has no render mode 'rgb_array'")
        try:
            picture = np.asarray(self._env.render(), np.uint8)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise RenderError(f"the Gymnasium environment {self._task!r} cannot draw: {why}") from error
        if picture.ndim != 3 or picture.shape[2] != 3:
            raise RenderError(f"the Gymnasium environment {self._task!r} drew {picture.shape}, want [H, W, 3]")
        return picture

    def _image(self, camera: str, parts: dict[str, Any]) -> NDArray[np.uint8]:
        picture = self.render() if camera == RENDER else np.asarray(parts[camera])
        return resize(picture, self._height, self._width)


def _is_picture(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3


def _check_numbers(task: str, what: str, space: spaces.Space[Any]) -> None:
    """Raise `UserError` unless `space` flattens to a vector that is not a picture of some other kind."""
    pixels = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) > 1
    if pixels or not space.is_np_flattenable:
        raise UserError(
            f"the Gymnasium environment {task!r} has {what}: supported are vectors (Box, Discrete, and Dict or Tuple "
            f"of them) and pictures (Box of uint8 [H, W, 3], by itself or as an entry of a Dict)"
        )
