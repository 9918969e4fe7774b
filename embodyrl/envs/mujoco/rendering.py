"""Images of MuJoCo scenes, on a machine without a screen as well: which OpenGL renders them, and what does.

MuJoCo, robosuite and PyOpenGL each read the environment when they are first imported, and two answers in one process do
not go together. So there is one place that decides, before any of them is imported. Who draws nothing imports MuJoCo
with `import_mujoco`, which needs no OpenGL. Nothing of it is touched before the first renderer is made, so simulators
with state observations run where there is none.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import importlib.util
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.base import RenderError
from embodyrl.envs.options import RenderQuality
from embodyrl.errors import UserError
from embodyrl.placement.graphics import OPENGL, RenderingCheck, graphics_variables
from embodyrl.placement.plan import Inventory
from embodyrl.placement.startup_lock import one_at_a_time

OFFSCREEN = ("osmesa", "egl")
"""What draws without a screen: Mesa on the CPU; whatever driver there is, a GPU's or Mesa's."""

ACCEPTED = (*OFFSCREEN, "glfw", "glx", "enable", "enabled", "on", "true", "1", "")
"""Values of MUJOCO_GL that MuJoCo takes on Linux, besides those that forbid drawing."""

FORBIDDING = ("disable", "disabled", "off", "false", "0")
"""Values of MUJOCO_GL by which somebody says that nothing is to be drawn."""

REMEDY = (
    "install OSMesa or EGL (Debian and Ubuntu: apt install libosmesa6 or libegl1; a GPU's driver brings EGL along), "
    "and leave MUJOCO_GL unset or set it to osmesa or egl"
)

MOST_SHAPES = 10_000
"""Shapes that a scene can hold; MuJoCo leaves out what is more."""


class NoOpenGLError(RenderError, UserError):
    """Raised when images are asked for and no OpenGL draws them here; the text says what to install."""


def requested() -> str:
    """The lower-case value of MUJOCO_GL, "" if it is unset.

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
    """Decide for this process, and write it to the environment for whatever else draws in it.

    MUJOCO_GL is respected; else PYOPENGL_PLATFORM; else OSMesa where it is installed, else EGL.

    Raises:
        NoOpenGLError: MUJOCO_GL forbids drawing.
        UserError: MUJOCO_GL has a value that MuJoCo does not know.
    """
    name = requested()
    if name in FORBIDDING:
        raise NoOpenGLError(f"images are asked for, but MUJOCO_GL is {name!r}, which forbids drawing: unset it")
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
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def import_mujoco() -> Any:
    """Import `mujoco` without the OpenGL that it would load by itself, which may not be installed.

    `context` loads what draws afterwards, whatever MUJOCO_GL was here.
    """
    with environment(MUJOCO_GL="disable"):
        return importlib.import_module("mujoco")


def context(height: int, width: int) -> Any:
    """An OpenGL context that can draw `height x width` pixels off screen; it is made current.

    Raises:
        NoOpenGLError: none can be made here; the text says what to install.
    """
    name = choose()
    try:
        with one_at_a_time("initialise OpenGL"):
            made = importlib.import_module(f"mujoco.{name}").GLContext(width, height)
            made.make_current()
        if name == "glfw" and not importlib.import_module("glfw").get_current_context():
            raise RuntimeError("no window can be made, is there a display?")
        return made
    except Exception as error:  # ImportError, AttributeError or RuntimeError, as the libraries please
        raise NoOpenGLError(_cannot_draw(name, error)) from error


def _cannot_draw(name: str, error: Exception) -> str:
    return f"MuJoCo cannot draw images on this machine with {name} ({type(error).__name__}: {error}): {REMEDY}"


CHECK = """
import json, mujoco, numpy
scene = "<mujoco><worldbody><light pos='0 0 2'/><geom size='.3' rgba='1 0 0 1'/></worldbody></mujoco>"
model = mujoco.MjModel.from_xml_string(scene)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 32, 32)
renderer.update_scene(data)
image = renderer.render()
assert image.std() > 1, "it draws black images"
from OpenGL import GL
print(json.dumps(GL.glGetString(GL.GL_RENDERER).decode()))
"""
"""Renders a small scene and prints the name of the OpenGL renderer."""

CHECK_REMEDIES = {
    "osmesa": "apt install libosmesa6  (as root)",
    "egl": "apt install libegl1  (as root), or install the GPU's driver with its graphics libraries",
}


def checks(machine: Inventory) -> list[RenderingCheck]:
    """Return how to try whether MuJoCo renders: as MUJOCO_GL says, else each way that needs no screen.

    Where several could render, one that does is enough. Nothing to try without MuJoCo.
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
    """Draws images of one size with one OpenGL context, from any camera of a model.

    The context holds the meshes and textures of `model`: 130 MB that take 0.3 s to make in MetaWorld with shadows.
    It can draw any model made from the same XML, because what differs from episode to episode is in the scene.

    Args:
        model: the `mujoco.MjModel`. Its `vis` settings, which have no part in the physics, are changed.
        height, width: size of the images [pixels].
        quality: full, as the model says; or fast, without shadows, reflections and multisampling.

    Raises:
        NoOpenGLError: there is no OpenGL that works without a screen; the text says what to install.
    """

    def __init__(self, model: Any, height: int, width: int, quality: RenderQuality = RenderQuality.full) -> None:
        self._size = height, width
        self._gl = context(height, width)
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

        Equal states give equal images, bit for bit, whatever was painted before.

        Args:
            data: a `mujoco.MjData` of a model made from the same XML as the renderer's.
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
        image = np.empty((*self._size, 3), np.uint8)
        mujoco.mjr_render(view, self._scene, self._context)
        mujoco.mjr_readPixels(image, None, view, self._context)
        return np.ascontiguousarray(image[::-1])  # OpenGL counts rows from the bottom

    def close(self) -> None:
        """Release the OpenGL context; harmless when repeated, and done for a renderer that is forgotten."""
        self._finalizer()


def _release(gl: Any, context: Any) -> None:
    """Release what a renderer holds, with its own OpenGL context current.

    Textures and buffers are released by their numbers: another context that happened to be current would lose those of
    its own that have the same numbers, and draw something else from then on without a word.
    """
    gl.make_current()
    context.free()
    gl.free()


class Renderers:
    """Renderers that several environments of a process share, the least recently used of which makes room.

    Args:
        most: renderers that are kept; each costs what `Renderer` says.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Renderer] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Renderer]) -> Renderer:
        """The renderer called `key` (which names the model's XML and all that a renderer depends on), or a new one."""
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
