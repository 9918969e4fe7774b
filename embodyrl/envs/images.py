"""Resizing of images, the time that a simulator process spends on rendering, names of its renderers, and frames of
earlier decisions."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.states import StateError, pack, unpack

_rendering_s = 0.0


@contextmanager
def timed_rendering() -> Iterator[None]:
    """Count the seconds of the block as rendering; blocks are not nested.

    `SlotSimulator` and ManiSkill's batch use it. Any other simulator writes

        with timed_rendering():
            images = ...

    around its rendering, which otherwise counts as physics.
    """
    global _rendering_s
    start = time.perf_counter()
    try:
        yield
    finally:
        _rendering_s += time.perf_counter() - start


def rendering_seconds() -> float:
    """Return the seconds that this process has spent on rendering so far."""
    return _rendering_s


def resize(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize `image [H, W, 3]` to `[height, width, 3]` by area averaging.

    Every new pixel is the average of the area that it covers in the old image, rounded to the nearest value. Areas are
    integers, so the result does not depend on a processor's floating-point arithmetic.
    """
    if image.shape[:2] == (height, width):
        return image
    rows = _sums(image.astype(np.int64), height)
    sums = _sums(rows.swapaxes(0, 1), width).swapaxes(0, 1)
    area = image.shape[0] * image.shape[1]
    averages: NDArray[np.uint8] = ((2 * sums + area) // (2 * area)).astype(np.uint8)
    return averages


def _sums(values: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Return the sums over `parts` equal parts of the first axis, times `parts`. A value on the border of two parts
    counts for each by its share."""
    length = len(values)
    whole, share = np.divmod(np.arange(parts + 1) * length, parts)  # borders of the parts: at a value, or inside one
    before = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
    cut = values[np.minimum(whole, length - 1)]  # the end cuts nothing: its share is 0
    return np.diff(parts * before[whole] + share[:, None, None] * cut, axis=0)


# ------------------------------------------------------------------------------------------------------------ renderers

_OPENGL = ("mujoco.egl", "mujoco.osmesa", "mujoco.glfw", "OpenGL.GL")
"""Modules of which one is loaded in a process that has rendered with OpenGL."""
_VARIABLES = ("MUJOCO_GL", "VK_ICD_FILENAMES", "VK_DRIVER_FILES")


def renderer_names() -> dict[str, str]:
    """Return what this process renders with: strings of OpenGL's current context, Vulkan's devices, and the variables
    that chose them. To be called after it has rendered; empty where nothing has."""
    found = _opengl() | _vulkan()
    return found | {name: os.environ[name] for name in _VARIABLES if found and os.environ.get(name)}


def _opengl() -> dict[str, str]:
    if not any(name in sys.modules for name in _OPENGL):
        return {}
    platform, gl = importlib.import_module("OpenGL.platform"), importlib.import_module("OpenGL.GL")
    if not platform.GetCurrentContext():  # without a context the calls below are undefined
        return {}
    texts = {name: gl.glGetString(getattr(gl, f"GL_{name.upper()}")) for name in ("vendor", "renderer", "version")}
    return {f"OpenGL {name}": text.decode(errors="replace") for name, text in texts.items() if text}


def _vulkan() -> dict[str, str]:
    if "sapien" not in sys.modules:
        return {}
    summary = str(sys.modules["sapien"].render.get_device_summary())
    return {"Vulkan devices": " ".join(summary.split())}


# --------------------------------------------------------------------------------------------------------------- frames

Images = NDArray[np.uint8]


class Frames:
    """The last `F` images of each slot's episode, newest first. An episode begins with its first one
    repeated.

    Args:
        count: `F`, at least 2.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._shown: dict[int, Images] = {}
        """By slot, `[F, V, H, W, 3]`."""

    def begin(self, slots: Sequence[int], images: Images) -> Images:
        """Take the first images `[B, V, H, W, 3]` of episodes; returns `[B, F * V, H, W, 3]`."""
        for slot, image in zip(slots, images, strict=True):
            self._shown[slot] = np.repeat(image[None], self.count, axis=0)
        return self.stacked(slots)

    def add(self, slots: Sequence[int], images: Images) -> Images:
        """Take the images `[B, V, H, W, 3]` after a chunk; returns `[B, F * V, H, W, 3]`."""
        for slot, image in zip(slots, images, strict=True):
            self._shown[slot] = np.concatenate([image[None], self._shown[slot][:-1]])
        return self.stacked(slots)

    def stacked(self, slots: Sequence[int]) -> Images:
        """Return all frames of these slots, `[B, F * V, H, W, 3]`: all cameras of the newest, then of that before."""
        images: Images = np.stack([self._shown[slot] for slot in slots])
        return images.reshape(len(slots), -1, *images.shape[3:])

    def save(self, slot: int, state: bytes) -> bytes:
        """Return the simulator's state of a slot together with the slot's frames."""
        return pack({"frames": self.count}, {"simulator": np.frombuffer(state, np.uint8), "images": self._shown[slot]})

    def restore(self, slot: int, state: bytes) -> bytes:
        """Take a slot's frames from what `save` returned; returns the simulator's state.

        Raises:
            StateError: it was saved with another `env.frames`.
        """
        header, arrays = unpack(state)
        if header.get("frames") != self.count:
            raise StateError(f"the state has {header.get('frames', 1)} frames, but env.frames = {self.count}")
        self._shown[slot] = arrays["images"]
        return arrays["simulator"].tobytes()
