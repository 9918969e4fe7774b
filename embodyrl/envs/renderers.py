"""Names of the renderer that a simulator process draws images with, as its driver gives them."""

from __future__ import annotations

import importlib
import os
import sys

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
