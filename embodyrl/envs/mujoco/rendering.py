"""Rendering of MuJoCo scenes, with or without a screen: choice of the OpenGL backend, and the renderer.

MuJoCo, robosuite and PyOpenGL each read the environment when they are first imported, and two different choices in one
process conflict. So this module alone decides, before any of them is imported. Code that renders nothing imports MuJoCo
with `import_mujoco`, which needs no OpenGL. OpenGL is loaded with the first renderer, so simulators with state
observations also run on machines without it.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import importlib.util
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.base import RenderError
from embodyrl.envs.mujoco.scene_changes import SceneChanges
from embodyrl.envs.options import RenderQuality
from embodyrl.errors import UserError
from embodyrl.placement.graphics import OPENGL, RenderingCheck, graphics_variables
from embodyrl.placement.plan import Inventory
from embodyrl.placement.startup_lock import one_at_a_time

OFFSCREEN = ("osmesa", "egl")
"""OpenGL backends without a screen: Mesa on the CPU; any driver, a GPU's or Mesa's."""

ACCEPTED = (*OFFSCREEN, "glfw", "glx", "enable", "enabled", "on", "true", "1", "")
"""Values of MUJOCO_GL that MuJoCo accepts on Linux, besides those that forbid rendering."""

FORBIDDING = ("disable", "disabled", "off", "false", "0")
"""Values of MUJOCO_GL that forbid rendering."""

REMEDY = (
    "install OSMesa or EGL (Debian and Ubuntu: apt install libosmesa6 or libegl1; a GPU's driver includes EGL), "
    "and leave MUJOCO_GL unset or set it to osmesa or egl"
)

MOST_SHAPES = 10_000
"""Most shapes in a scene; MuJoCo leaves out further ones."""


class NoOpenGLError(RenderError, UserError):
    """Raised when images are needed and no OpenGL renders them here; the text names what to install."""


def requested() -> str:
    """Return the value of MUJOCO_GL in lower case, "" if it is unset.

    Raises:
        UserError: MuJoCo does not know the value.
    """
    name = os.environ.get("MUJOCO_GL", "").lower().strip()
    if name not in ACCEPTED + FORBIDDING:
        raise UserError(
            f"the environment variable MUJOCO_GL is {name!r}, which MuJoCo does not know: set it to osmesa or egl, or "
            f"unset it"
        )
    return name


def choose() -> str:
    """Choose the OpenGL backend of this process, and set the environment for other libraries that render in it.

    MUJOCO_GL is respected; else PYOPENGL_PLATFORM; else OSMesa where it is installed, else EGL.

    Raises:
        NoOpenGLError: MUJOCO_GL forbids rendering.
        UserError: MUJOCO_GL has a value that MuJoCo does not know.
    """
    name = requested()
    if name in FORBIDDING:
        raise NoOpenGLError(f"images are asked for, but MUJOCO_GL is {name!r}, which forbids rendering: unset it")
    if not name:
        platform = os.environ.get("PYOPENGL_PLATFORM", "").lower()
        installed = "osmesa" if ctypes.util.find_library("OSMesa") else "egl"
        name = platform if platform in OFFSCREEN else installed
        os.environ["MUJOCO_GL"] = name
    if name not in OFFSCREEN:
        return "glfw"
    os.environ.setdefault("PYOPENGL_PLATFORM", name)
    return name


@contextlib.contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Set environment variables within the block; None removes one."""
    before = {name: os.environ.get(name) for name in variables}
    _set_environment(variables)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def import_mujoco() -> Any:
    """Import `mujoco` without OpenGL, which it would load by itself and which may not be installed.

    `context` loads OpenGL afterwards, whatever MUJOCO_GL was here.
    """
    with environment(MUJOCO_GL="disable"):
        return importlib.import_module("mujoco")


def context(height: int, width: int) -> Any:
    """Create an OpenGL context for `height x width` pixels off screen and make it current.

    Raises:
        NoOpenGLError: none can be created here; the text names what to install.
    """
    name = choose()
    try:
        with one_at_a_time("initialise OpenGL"):
            made = importlib.import_module(f"mujoco.{name}").GLContext(width, height)
            made.make_current()
        if name == "glfw" and not importlib.import_module("glfw").get_current_context():
            raise RuntimeError("no window can be made, is there a display?")
        return made
    except Exception as error:  # ImportError, AttributeError or RuntimeError, depending on the library
        raise NoOpenGLError(_cannot_render(name, error)) from error


def _cannot_render(name: str, error: Exception) -> str:
    return f"MuJoCo cannot render images on this machine with {name} ({type(error).__name__}: {error}): {REMEDY}"


CHECK = """
import json, mujoco, numpy
scene = "<mujoco><worldbody><light pos='0 0 2'/><geom size='.3' rgba='1 0 0 1'/></worldbody></mujoco>"
model = mujoco.MjModel.from_xml_string(scene)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 32, 32)
renderer.update_scene(data)
image = renderer.render()
assert image.std() > 1, "it renders black images"
from OpenGL import GL
print(json.dumps(GL.glGetString(GL.GL_RENDERER).decode()))
"""
"""Renders a small scene and prints the name of the OpenGL renderer."""

CHECK_REMEDIES = {
    "osmesa": "apt install libosmesa6  (as root)",
    "egl": "apt install libegl1  (as root), or install the GPU's driver with its graphics libraries",
}


def checks(machine: Inventory) -> list[RenderingCheck]:
    """Return the checks that MuJoCo renders: with the backend of MUJOCO_GL, else with each backend without a screen.

    One backend that works is enough. Without MuJoCo there are no checks.
    """
    if importlib.util.find_spec("mujoco") is None:
        return []
    asked = os.environ.get("MUJOCO_GL")
    chosen = asked or graphics_variables(OPENGL, machine.graphics, machine.gpus, 0).get("MUJOCO_GL")
    return [
        RenderingCheck(
            subject=f"OpenGL (MUJOCO_GL={way})" if asked else f"OpenGL {way}",
            program=CHECK,
            variables={"MUJOCO_GL": way, "PYOPENGL_PLATFORM": way if way in CHECK_REMEDIES else None},
            remedy="unset MUJOCO_GL, or set it to osmesa or egl" if asked else CHECK_REMEDIES[way],
            usual=way == chosen or chosen is None,
            required=bool(asked),
            note="; simulators use it" if way == chosen else "",
        )
        for way in ([asked] if asked else CHECK_REMEDIES)
    ]


class Renderer:
    """Renders images of one size with one OpenGL context, from any camera of a model.

    The context holds the meshes and textures of `model`: 130 MB, created in 0.3 s, in MetaWorld with shadows. It can
    render any model made from the same XML, because the differences between episodes are in the scene.

    Args:
        model: the `mujoco.MjModel`. Its `vis` settings, which do not affect the physics, are changed.
        height, width: size of the images [pixels].
        quality: full, with the model's settings; or fast, without shadows, reflections and multisampling.

    Raises:
        NoOpenGLError: no OpenGL works without a screen; the text names what to install.
    """

    def __init__(self, model: Any, height: int, width: int, quality: RenderQuality = RenderQuality.full) -> None:
        self._size = height, width
        self._gl = context(height, width)
        import mujoco  # only now, after `context` has chosen its OpenGL

        self._mujoco = mujoco
        model.vis.global_.offheight, model.vis.global_.offwidth = height, width
        if quality is RenderQuality.fast:
            model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        self.options = mujoco.MjvOption()
        """Rendering options: groups of shapes, sites, transparency, ... (a `mujoco.MjvOption`)."""
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

    def render(self, data: Any, camera: str, changes: SceneChanges | None = None) -> NDArray[np.uint8]:
        """Render the scene in state `data` from a camera of its model, as a new array `[H, W, 3]`.

        Equal states give equal images, bit for bit, whatever was rendered before.

        Args:
            data: a `mujoco.MjData` of a model made from the same XML as the renderer's.
            camera: name of a camera in the model.
            changes: what the episode changes in the look of the scene, for this image alone; None: nothing.

        Raises:
            KeyError: the model has no such camera.
        """
        mujoco, model = self._mujoco, data.model
        self._gl.make_current()
        self._camera.fixedcamid = model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        with nullcontext() if changes is None else changes.applied(model, data, self._camera.fixedcamid):
            mujoco.mjv_updateScene(model, data, self.options, None, self._camera, everything, self._scene)
        if changes is not None:
            changes.add_shapes(self._scene)
        view = mujoco.MjrRect(0, 0, self._size[1], self._size[0])
        image = np.empty((*self._size, 3), np.uint8)
        mujoco.mjr_render(view, self._scene, self._context)
        mujoco.mjr_readPixels(image, None, view, self._context)
        return np.ascontiguousarray(image[::-1])  # OpenGL counts rows from the bottom

    def close(self) -> None:
        """Release the OpenGL context; may be called twice. Garbage collection of the renderer does it as well."""
        self._finalizer()


def _release(gl: Any, context: Any) -> None:
    """Release a renderer's resources, with its own OpenGL context current.

    Textures and buffers are released by number: with another context current, that context would lose its own ones with
    the same numbers, and silently render something else from then on.
    """
    gl.make_current()
    context.free()
    gl.free()


class Renderers:
    """Cache of renderers that several environments of a process share; the least recently used is dropped.

    Args:
        most: number of renderers kept; see `Renderer` for the memory of each.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Renderer] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Renderer]) -> Renderer:
        """Return the renderer for `key` (the model's XML and everything a renderer depends on), made on first use."""
        if key not in self._kept:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)[1].close()
            self._kept[key] = make()
        self._kept.move_to_end(key)
        return self._kept[key]

    def close(self) -> None:
        """Release all renderers."""
        while self._kept:
            self._kept.popitem()[1].close()
