"""Pictures of a MuJoCo scene without a screen, for people.

Nothing of OpenGL is touched before the first picture, so simulators with state observations run where there is none.
"""

from __future__ import annotations

import ctypes.util
import importlib
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.base import RenderError

REMEDY = (
    "install one of them (Debian and Ubuntu: apt install libosmesa6 or libegl1), or set MUJOCO_GL to one that works"
)


class Painter:
    """Draws square pictures of one MuJoCo model.

    Args:
        model: the `mujoco.MjModel`.
        size: height and width [pixels].

    Raises:
        RenderError: there is no OpenGL that works without a screen; the text says what to install.
    """

    def __init__(self, model: Any, size: int) -> None:
        import mujoco

        self._mujoco, self._model, self._size = mujoco, model, size
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, size)
        model.vis.global_.offheight = max(model.vis.global_.offheight, size)
        self._gl = _gl_context(size)
        self._gl.make_current()
        self._scene = mujoco.MjvScene(model, maxgeom=2000)
        self._options, self._camera = mujoco.MjvOption(), mujoco.MjvCamera()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)

    def paint(self, data: Any, camera: str) -> NDArray[np.uint8]:
        """The scene in state `data` (`mujoco.MjData`) as the model's camera called `camera` sees it `[H, W, 3]`."""
        mujoco = self._mujoco
        self._gl.make_current()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = self._model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._options, None, self._camera, everything, self._scene)
        view = mujoco.MjrRect(0, 0, self._size, self._size)
        picture = np.empty((self._size, self._size, 3), np.uint8)
        mujoco.mjr_render(view, self._scene, self._context)
        mujoco.mjr_readPixels(picture, None, view, self._context)
        return np.ascontiguousarray(picture[::-1])  # OpenGL counts rows from the bottom

    def close(self) -> None:
        """Release the OpenGL context."""
        self._gl.make_current()
        self._context.free()
        self._gl.free()


def _gl_context(size: int) -> Any:
    """An OpenGL context without a screen: what MUJOCO_GL says, else OSMesa where it is installed, else EGL."""
    name = os.environ.get("MUJOCO_GL") or ("osmesa" if ctypes.util.find_library("OSMesa") else "egl")
    try:
        return importlib.import_module(f"mujoco.{name.lower()}").GLContext(size, size)
    except Exception as error:  # ImportError, AttributeError or RuntimeError, as the libraries please
        raise RenderError(
            f"MuJoCo cannot draw on this machine: neither OSMesa nor EGL works ({name}: {error}); {REMEDY}"
        ) from error
