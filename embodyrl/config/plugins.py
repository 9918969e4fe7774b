"""Imports the modules that a config lists under `plugins:`, so that they can register their components."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

import embodyrl.registry
from embodyrl.config.compose import Settings
from embodyrl.config.faults import Fault, KeyPath
from embodyrl.registry import Registry, near_match


def import_plugins(settings: Settings, folder: Path) -> list[Fault]:
    """Import every plug-in, from `folder` or from what is installed; returns what went wrong with each."""
    listed = settings.data.get("plugins")
    if not isinstance(listed, list) or not listed:
        return []  # a wrong type is for the schema check to report
    for registry in vars(embodyrl.registry).values():
        if isinstance(registry, Registry):
            registry.names()  # built-in names come first, so that a plug-in that takes one is told so
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    faults = []
    for index, name in enumerate(listed):
        if isinstance(name, str):
            problem = _import(name, folder)
            if problem is not None:
                path: KeyPath = ("plugins", index)
                faults.append(Fault(path, *problem, settings.origins[path].value))
    return faults


def _import(name: str, folder: Path) -> tuple[str, str] | None:
    """Import one module; what is wrong and what to do if that fails."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            near = near_match(name.removesuffix(".py"), [path.stem for path in folder.glob("*.py")])
            remedy = f"put {name}.py beside the config file, or install its package"
            return (
                f"plug-in {name!r} is neither in {folder} nor installed",
                f"did you mean {near!r}?" if near else remedy,
            )
        return f"plug-in {name!r} needs {error.name!r}, which is not installed", f"pip install {error.name}"
    except Exception as error:  # whatever a stranger's module raises
        return f"plug-in {name!r} failed while it was imported: {_describe(error)}", "mend the module"
    return None


def _describe(error: Exception) -> str:
    """The exception in one line, with the place in the plug-in that raised it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = [frame for frame in frames if frame.filename != __file__]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
