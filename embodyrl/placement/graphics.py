"""Which graphics driver simulator processes draw with, told by environment variables before their interpreters start.

The libraries read these when they are imported, so a simulator cannot choose by itself any more. What the user has set
stays as it is.
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
    """What a machine can draw with."""

    opengl: tuple[str, ...] = ()
    """Ways to OpenGL without a screen whose library is installed: `egl`, `osmesa`."""
    software_vulkan: str | None = None
    """Manifest of Mesa's Vulkan driver for the CPU (lavapipe), if it is installed."""
    has_device: bool = False
    """Whether the kernel offers a graphics device of any make."""
    preset: Mapping[str, str] = field(default_factory=dict)
    """Those of the variables in question that the user has set."""


@dataclass(frozen=True, kw_only=True)
class RenderingCheck:
    """A program that tries whether something renders here. `embodyrl doctor` runs it in a process of its own."""

    subject: str
    """What is tried, in a few words."""
    program: str
    """Python code. It prints, last of all and as JSON, the name of what renders; null if nothing can."""
    variables: Mapping[str, str | None]
    """Environment variables of the process; None removes one."""
    remedy: str
    """What to do where it fails."""
    usual: bool = True
    """Whether simulators render this way: where a run needs images, a failure is a fault."""
    required: bool = False
    """Whether a failure is a fault for any run, because the user asked for this way."""
    note: str = ""
    """Said after the name of what renders."""


def read_graphics(root: Path, environment: Mapping[str, str]) -> Graphics:
    """Return what this machine can draw with.

    Args:
        root: the root folder.
        environment: this process's variables.
    """
    manifests = sorted(path for folder in _MANIFESTS for path in (root / folder).glob("lvp_icd*.json"))
    return Graphics(
        opengl=tuple(name for name, library in _LIBRARIES.items() if ctypes.util.find_library(library)),
        software_vulkan=str(manifests[0]) if manifests else None,
        has_device=any((root / "dev/dri").glob("renderD*")),
        preset={name: environment[name] for name in (*_VARIABLES, _THREADS) if environment.get(name)},
    )


def graphics_variables(kind: str | None, graphics: Graphics, gpus: Sequence[Gpu], rank: int) -> dict[str, str]:
    """Environment variables for a process that may draw; none that the user has set.

    Args:
        kind: `OPENGL`, `VULKAN`, or None for a simulator that draws in another way, or not at all.
        graphics: what there is.
        gpus: the NVIDIA GPUs that may be used.
        rank: number of the process; processes take turns on several GPUs.
    """
    if kind is None:
        return {}
    chosen = {_THREADS: "1"}  # Mesa on the CPU would start a thread per core in every process
    chosen |= _opengl(graphics, gpus, rank) if kind == OPENGL else _vulkan(graphics, gpus)
    return {name: value for name, value in chosen.items() if name not in graphics.preset}


def _opengl(graphics: Graphics, gpus: Sequence[Gpu], rank: int) -> dict[str, str]:
    """EGL where there is an NVIDIA GPU, else OSMesa, which draws on the CPU and needs no device; else EGL."""
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
    """Return where nothing but the CPU draws, drivers of graphics cards are not even tried."""
    if gpus or graphics.has_device or graphics.software_vulkan is None or "VK_DRIVER_FILES" in graphics.preset:
        return {}
    return {"VK_ICD_FILENAMES": graphics.software_vulkan}
