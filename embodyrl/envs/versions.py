"""Which versions a simulator computes with. A state may go on differently with others."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from embodyrl.registry import SIMULATORS, SystemLibrary
from embodyrl.version import __version__

ENGINES = ("mujoco", "sapien", "numpy")
"""Packages that compute what simulators need, whether or not they ask for them by name."""


def simulator_versions(name: str) -> dict[str, str]:
    """Versions of what the simulator `name` consists of, by package or module. Those of a plug-in that is in no
    installed package end with a hash of its file."""
    entry = SIMULATORS.entry(name)
    target = entry.target
    module = target.partition(":")[0] if isinstance(target, str) else getattr(target, "__module__", "")
    required = [each.module for each in entry.requires if not isinstance(each, SystemLibrary)]
    packages = [*required, *ENGINES] + ([] if _is_ours(module) else [module.partition(".")[0]])
    found = {package: version for package in packages if (version := _installed(package)) is not None}
    if not _is_ours(module) and module.partition(".")[0] not in found:
        found[module] = _of_file(module)
    return {"embodyrl": __version__, **found}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """What has another version now than before, in words; nothing if it is not known what was before."""
    for name in sorted(before.keys() | now.keys()) if before else ():
        if before.get(name) != now.get(name):
            yield f"{name} {before.get(name, 'missing')} -> {now.get(name, 'missing')}"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "embodyrl"


def _installed(package: str) -> str | None:
    """The version of an installed package that is imported by this name; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(package)
        return importlib.metadata.version(names[0]) if names else None


def _of_file(module: str) -> str:
    """What a module says of its version, and a hash of its file."""
    loaded = sys.modules.get(module)
    version, file = getattr(loaded, "__version__", None), getattr(loaded, "__file__", None)
    parts = [str(version)] if version is not None else []
    if file is not None:
        parts.append(hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12])
    return " ".join(parts) or "unknown"
