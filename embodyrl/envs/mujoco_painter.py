"""Pictures of MuJoCo scenes without a screen.

Nothing of OpenGL is touched before the first painter is made, so simulators with state observations run where there is
none.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import mujoco_gl
from embodyrl.envs.options import RenderQuality

MOST_SHAPES = 10_000
"""Shapes that a scene can hold; MuJoCo leaves out what is more."""


class Painter:
    """Draws pictures of one size with one OpenGL context, from any camera of a model.

    The context holds the meshes and textures of `model`: 130 MB that take 0.3 s to make in MetaWorld with shadows.
    It can draw any model made from the same XML, because what differs from episode to episode is in the scene.

    Args:
        model: the `mujoco.MjModel`. Its `vis` settings, which have no part in the physics, are changed.
        height, width: size of the pictures [pixels].
        quality: full, as the model says; or fast, without shadows, reflections and multisampling.

    Raises:
        NoOpenGLError: there is no OpenGL that works without a screen; the text says what to install.
    """

    def __init__(self, model: Any, height: int, width: int, quality: RenderQuality = RenderQuality.full) -> None:
        self._size = height, width
        self._gl = mujoco_gl.context(height, width)
        import mujoco  # only now: which OpenGL it loads is decided

        self._mujoco = mujoco
        model.vis.global_.offheight, model.vis.global_.offwidth = height, width
        if quality is RenderQuality.fast:
            model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        self.options = mujoco.MjvOption()
        """What is drawn: groups of shapes, sites, transparency, ... as `mujoco.MjvOption` has it."""
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._scene = mujoco.MjvScene(model, maxgeom=MOST_SHAPES)
        if quality is RenderQuality.fast:
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._finalizer = weakref.finalize(self, _release, self._gl, self._context)
        self._finalizer.atexit = False

    def paint(self, data: Any, camera: str) -> NDArray[np.uint8]:
        """The scene in state `data` as its model's camera called `camera` sees it, a new array `[H, W, 3]`.

        Equal states give equal pictures, bit for bit, whatever was painted before.

        Args:
            data: a `mujoco.MjData` of a model made from the same XML as the painter's.
            camera: name of a camera in the model.

        Raises:
            KeyError: the model has no such camera.
        """
        mujoco, model = self._mujoco, data.model
        self._gl.make_current()
        self._camera.fixedcamid = model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self.options, None, self._camera, everything, self._scene)
        view = mujoco.MjrRect(0, 0, self._size[1], self._size[0])
        picture = np.empty((*self._size, 3), np.uint8)
        mujoco.mjr_render(view, self._scene, self._context)
        mujoco.mjr_readPixels(picture, None, view, self._context)
        return np.ascontiguousarray(picture[::-1])  # OpenGL counts rows from the bottom

    def close(self) -> None:
        """Release the OpenGL context; harmless when repeated, and done for a painter that is forgotten."""
        self._finalizer()


def _release(gl: Any, context: Any) -> None:
    """Release what a painter holds, with its own OpenGL context current.

    Textures and buffers are released by their numbers: another context that happened to be current would lose those of
    its own that have the same numbers, and draw something else from then on without a word.
    """
    gl.make_current()
    context.free()
    gl.free()


class Painters:
    """Painters that several environments of a process share, the least recently used of which makes room.

    Args:
        most: painters that are kept; each costs what `Painter` says.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Painter] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Painter]) -> Painter:
        """The painter called `key` (which names the model's XML and all that a painter depends on), or a new one."""
        if key not in self._kept:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)[1].close()
            self._kept[key] = make()
        self._kept.move_to_end(key)
        return self._kept[key]

    def close(self) -> None:
        """Release all of them."""
        while self._kept:
            self._kept.popitem()[1].close()
