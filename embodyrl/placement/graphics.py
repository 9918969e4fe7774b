"""The graphics driver of simulator processes, chosen by environment variables before their interpreters start.

The libraries read these when they are imported, so a simulator cannot choose later. Variables that the user has set
stay unchanged.
"""

from __future__ import annotations

import ctypes.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from embodyrl.placement.topology import Gpu

OPENGL = "opengl"
"""Graphics of the MuJoCo simulators."""
VULKAN = "vulkan"
"""Graphics of SAPIEN (ManiSkill)."""

_VARIABLES = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "MUJOCO_EGL_DEVICE_ID", "VK_DRIVER_FILES", "VK_ICD_FILENAMES")
_THREADS = "LP_NUM_THREADS"
_WITHOUT_SCREEN = ("egl", "osmesa")
_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
_MANIFESTS = ("etc/vulkan/icd.d", "usr/local/share/vulkan/icd.d", "usr/share/vulkan/icd.d")


@dataclass(frozen=True, kw_only=True)
class Graphics:
    """Renderers of a machine."""

    opengl: tuple[str, ...] = ()
    """Ways to OpenGL without a screen whose library is installed: `egl`, `osmesa`."""
    software_vulkan: str | None = None
    """Manifest of Mesa's Vulkan driver for the CPU (lavapipe), if it is installed."""
    has_device: bool = False
    """True if the kernel offers a graphics device of any make."""
    preset: Mapping[str, str] = field(default_factory=dict)
    """The graphics variables that the user has set."""


@dataclass(frozen=True, kw_only=True)
class RenderingCheck:
    """A program that tries whether something renders here. `embodyrl doctor` runs it in a process of its own."""

    subject: str
    """Its name in a few words."""
    program: str
    """Python code. It prints last, as JSON, the name of the renderer; null if nothing can render."""
    variables: Mapping[str, str | None]
    """Environment variables of the process; None removes one."""
    remedy: str
    """Advice if it fails."""
    usual: bool = True
    """Simulators render this way: if a run needs images, a failure is an issue."""
    required: bool = False
    """A failure is an issue for any run, because the user asked for this way."""
    note: str = ""
    """Printed after the renderer's name."""


def read_graphics(root: Path, environment: Mapping[str, str]) -> Graphics:
    """Return the renderers of this machine."""
    manifests = sorted(path for folder in _MANIFESTS for path in (root / folder).glob("lvp_icd*.json"))
    return Graphics(
        opengl=tuple(name for name, library in _LIBRARIES.items() if ctypes.util.find_library(library)),
        software_vulkan=str(manifests[0]) if manifests else None,
        has_device=any((root / "dev/dri").glob("renderD*")),
        preset={name: environment[name] for name in (*_VARIABLES, _THREADS) if environment.get(name)},
    )


def graphics_variables(kind: str | None, graphics: Graphics, gpus: Sequence[Gpu], rank: int) -> dict[str, str]:
    """Environment variables for a process that may render; none that the user has set.

    Args:
        kind: `OPENGL`, `VULKAN`, or None for a simulator that renders in another way, or not at all.
        graphics: of the machine.
        gpus: the NVIDIA GPUs that may be used.
        rank: number of the process; processes take turns on several GPUs.
    """
    if kind is None:
        return {}
    chosen = {_THREADS: "1"}  # Mesa on the CPU would start a thread per core in every process
    chosen |= _opengl(graphics, gpus, rank) if kind == OPENGL else _vulkan(graphics, gpus)
    return {name: value for name, value in chosen.items() if name not in graphics.preset}


def _opengl(graphics: Graphics, gpus: Sequence[Gpu], rank: int) -> dict[str, str]:
    """Return the variables of EGL where there is an NVIDIA GPU, else of OSMesa, which renders on the CPU and needs no
    device; else of EGL."""
    order = ("egl", "osmesa") if gpus else ("osmesa", "egl")
    wanted = [graphics.preset.get("MUJOCO_GL", "").lower(), graphics.preset.get("PYOPENGL_PLATFORM", "").lower()]
    installed = [name for name in order if name in graphics.opengl]
    name = next((name for name in [*wanted, *installed] if name), None)
    if name not in _WITHOUT_SCREEN:
        return {}
    variables = {"MUJOCO_GL": name, "PYOPENGL_PLATFORM": name}
    if name == "egl" and gpus:
        variables["MUJOCO_EGL_DEVICE_ID"] = str(gpus[rank % len(gpus)].index)
    return variables


def _vulkan(graphics: Graphics, gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the variables that select the CPU's driver where nothing else can render, so that drivers of graphics
    cards are not even tried."""
    if gpus or graphics.has_device or graphics.software_vulkan is None or "VK_DRIVER_FILES" in graphics.preset:
        return {}
    return {"VK_ICD_FILENAMES": graphics.software_vulkan}
