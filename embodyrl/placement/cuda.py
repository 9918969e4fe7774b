"""Whether torch will find a CUDA device, and why not, from files alone: importing torch takes seconds."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from embodyrl.placement.topology import ROOT, has_unlisted_gpus, visible_names

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Oldest major version of the driver on Linux by major version of CUDA, from the release notes of the CUDA toolkit
(minor version compatibility)."""


ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Variable that lets torch grow its segments of GPU memory in place: rollouts and updates ask for blocks of different
sizes, and the free parts of segments of a fixed size would be too small for the other phase."""
PRODUCTS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variable without which products on a GPU may add up in another order each time. The first product of a process reads
it, whether or not that one has to be deterministic, so it is set for all."""
SET_ALREADY = (*ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with which a user decides."""


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """What the installed torch was built for."""

    version: str
    cuda: str | None
    """Version of CUDA, as in `12.8`; None: built for the CPU."""


def torch_build() -> TorchBuild | None:
    """Return what torch was built for, from its file of versions; None if it is not installed, or has no such file."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin is not None else None
    if file is None or not file.is_file():
        return None
    values = dict(re.findall(r"^(__version__|cuda)\b[^=]*= *['\"]([^'\"]+)['\"]", file.read_text(), re.MULTILINE))
    return TorchBuild(version=values.get("__version__", "?"), cuda=values.get("cuda"))


def has_nvidia_gpu(root: Path = ROOT) -> bool:
    """Return whether the NVIDIA driver shows a GPU, or has one under WSL."""
    gpus = root / "proc/driver/nvidia/gpus"
    return (gpus.is_dir() and any(gpus.iterdir())) or has_unlisted_gpus(root)


def set_up_cuda(root: Path = ROOT, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set `ALLOCATOR` and `PRODUCTS` on machines with a GPU, unless the user has set these variables. To be called
    before torch first uses the GPU."""
    set_up_allocator(root, environment)
    if has_nvidia_gpu(root):
        set_up_products(environment)


def set_up_allocator(root: Path = ROOT, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set `ALLOCATOR` on machines with a GPU, unless the user has set one of these variables."""
    if has_nvidia_gpu(root) and not any(name in environment for name in SET_ALREADY):
        environment.update(ALLOCATOR)


def set_up_products(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set `PRODUCTS`, unless the user has."""
    for name, value in PRODUCTS.items():
        environment.setdefault(name, value)


def driver_version(root: Path = ROOT) -> str | None:
    """Return the version of the loaded NVIDIA driver, as in `550.54.14`; None if the kernel does not say."""
    file = root / "proc/driver/nvidia/version"
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text(), re.M) if file.is_file() else None
    return None if found is None else found[1]


def why_no_cuda(
    root: Path = ROOT, environment: Mapping[str, str] = os.environ, *, build: TorchBuild | None = None
) -> str | None:
    """Return a reason for which torch cannot use CUDA here, with the remedy; None if the files show none.

    Args:
        root: the root folder.
        environment: the process's variables.
        build: of torch; None: of the one that is installed.
    """
    if not has_nvidia_gpu(root):
        return "there is no NVIDIA GPU: set engine.device=auto or cpu"
    if "CUDA_VISIBLE_DEVICES" in environment and not visible_names(environment):
        return f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']!r} hides all GPUs: unset it"
    build = build or torch_build()
    if build is None:
        return None
    if build.cuda is None:
        return f"torch {build.version} is built for the CPU: make setup TORCH=cuda"
    driver, oldest = driver_version(root), OLDEST_DRIVERS.get(int(build.cuda.partition(".")[0]))
    if driver is not None and oldest is not None and int(driver.partition(".")[0]) < oldest:
        return (
            f"the NVIDIA driver {driver} is too old for torch {build.version} (CUDA {build.cuda}), which needs "
            f"{oldest} or newer: update the driver, or install a torch for an older CUDA"
        )
    return None
