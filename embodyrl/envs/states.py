"""Format of saved slot states, and the simulator versions they may depend on.

A state is a JSON header and the raw bytes of named arrays, never a pickle. In this order: 16 bytes, `embodyrl-state`
and two zeros; 4 bytes, the length of the header; the header, a JSON object whose entry `arrays` lists [name, dtype,
shape] of each array; these arrays in row-major order. All little-endian.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import struct
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import EnvConfig
from embodyrl.errors import RunError
from embodyrl.registry import SIMULATORS, SystemLibrary
from embodyrl.version import __version__

MAGIC = b"embodyrl-state\0\0"
VERSION = 2
KINDS = "biuf"
"""Kinds of numbers that an array may hold: bool, integers, floats."""
ENGINES = ("mujoco", "sapien", "numpy")
"""Packages that decide a simulator's numbers, whether or not it requires them directly."""


class StateError(RunError):
    """Raised when a saved state does not fit this simulator or is damaged."""


def pack(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Encode `header` (JSON values) and `arrays` as bytes."""
    parts = {name: np.asarray(array, array.dtype.newbyteorder("<"), order="C") for name, array in arrays.items()}
    listing = [[name, array.dtype.str, list(array.shape)] for name, array in parts.items()]
    text = json.dumps({"version": VERSION, **header, "arrays": listing}).encode()
    return b"".join([MAGIC, struct.pack("<I", len(text)), text, *(array.tobytes() for array in parts.values())])


def unpack(state: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Decode the header and arrays of `pack`; the arrays are copies in native byte order.

    Raises:
        StateError: the bytes are something else, or damaged.
    """
    start = len(MAGIC) + 4
    if state[: len(MAGIC)] != MAGIC or len(state) < start:
        raise StateError("the state was not saved by this kind of simulator")
    (length,) = struct.unpack_from("<I", state, len(MAGIC))
    try:
        header = json.loads(state[start : start + length])
        listing = [(name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in header.pop("arrays")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError("the state is damaged: its header cannot be read") from error
    if header["version"] != VERSION:
        raise StateError(f"the state has version {header['version']}, want {VERSION}")
    position, arrays = start + length, {}
    want = position + sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in listing)
    if len(state) != want or any(dtype.kind not in KINDS for _, dtype, _ in listing):
        raise StateError(f"the state is damaged: {len(state)} bytes, want {want}")
    for name, dtype, shape in listing:
        flat = np.frombuffer(state, dtype, math.prod(shape), position)
        arrays[name] = flat.reshape(shape).astype(dtype.newbyteorder("="))
        position += flat.nbytes
    return header, arrays


def simulator_versions(name: str) -> dict[str, str]:
    """Return the versions of the packages and modules that make up the simulator `name`. The version of a plug-in
    outside installed packages ends with a hash of its file."""
    entry = SIMULATORS.entry(name)
    target = entry.target
    module = target.partition(":")[0] if isinstance(target, str) else getattr(target, "__module__", "")
    required = [each.module for each in entry.requires if not isinstance(each, SystemLibrary)]
    packages = [*required, *ENGINES] + ([] if _is_ours(module) else [module.partition(".")[0]])
    found = {package: version for package in packages if (version := installed_version(package)) is not None}
    if not _is_ours(module) and module.partition(".")[0] not in found:
        found[module] = version_of_file(module)
    return {"embodyrl": __version__, **found}


def versions_of_env(env: EnvConfig) -> dict[str, str]:
    """Return the versions of everything that makes up the simulators of a run, see `simulator_versions`."""
    return {name: version for source in env.sources for name, version in simulator_versions(source.env.name).items()}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield each version that changed, as text; nothing if the versions before are unknown."""
    for name in sorted(before.keys() | now.keys()) if before else ():
        if before.get(name) != now.get(name):
            yield f"{name} {before.get(name, 'missing')} -> {now.get(name, 'missing')}"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "embodyrl"


def installed_version(package: str) -> str | None:
    """Return the version of the installed package with this import name; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        names = _distributions().get(package)
        return importlib.metadata.version(names[0]) if names else None


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the installed packages by the names that they are imported by; takes half a second."""
    return importlib.metadata.packages_distributions()


def version_of_file(module: str) -> str:
    """Return a module's `__version__`, if any, and a hash of its file."""
    loaded = sys.modules.get(module)
    version, file = getattr(loaded, "__version__", None), getattr(loaded, "__file__", None)
    parts = [str(version)] if version is not None else []
    if file is not None:
        parts.append(hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12])
    return " ".join(parts) or "unknown"
