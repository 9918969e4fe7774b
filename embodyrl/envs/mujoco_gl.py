"""Which OpenGL draws MuJoCo's pictures, on a machine without a screen as well.

MuJoCo, robosuite and PyOpenGL each read the environment when they are first imported, and two answers in one process do
not go together. So there is one place that decides, before any of them is imported. Who draws nothing imports MuJoCo
with `import_mujoco`, which needs no OpenGL.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import os
from collections.abc import Iterator
from typing import Any

from embodyrl.envs.base import RenderError
from embodyrl.errors import UserError
from embodyrl.placement.turns import one_at_a_time

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


class NoOpenGLError(RenderError, UserError):
    """Raised when pictures are asked for and no OpenGL draws them here; the text says what to install."""


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
        raise NoOpenGLError(f"pictures are asked for, but MUJOCO_GL is {name!r}, which forbids drawing: unset it")
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
    return f"MuJoCo cannot draw pictures on this machine with {name} ({type(error).__name__}: {error}): {REMEDY}"
