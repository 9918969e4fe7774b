"""Imports the modules that a config lists under `plugins:`, so that they can register their components, and the one of
`pipeline.function`. No other setting names code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import embodyrl
from embodyrl.config.compose import Settings
from embodyrl.config.issues import ConfigIssue, KeyPath
from embodyrl.config.schema import Config
from embodyrl.errors import did_you_mean, without_controls
from embodyrl.registry import all_registries

_announced: set[tuple[str, str]] = set()
NAME_CODE: tuple[KeyPath, ...] = (("plugins",), ("pipeline", "function"))
"""The settings that name code; they are looked at before all others."""


def import_plugins(settings: Settings, folder: Path) -> list[ConfigIssue]:
    """Import every plug-in, from `folder` or from what is installed, after saying so on stderr; returns what went wrong
    with each."""
    modules = dict(named_modules(settings))
    if not modules:
        return []
    for registry in all_registries():
        registry.names()  # built-in names come first, so that a plug-in that takes one is told so
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    for name in modules.values():
        _announce(name)
    faults = []
    for path, name in modules.items():
        problem = _import(name, folder)
        if problem is not None:
            faults.append(ConfigIssue((path,), *problem, settings.origins[path].value))
    return faults


def named_modules(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Where each module is named; values of a wrong type are for the schema check to report."""
    listed, function = (settings.get(path) for path in NAME_CODE)
    for index, name in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(name, str):
            yield ("plugins", index), name
    if isinstance(function, str) and ":" in function:
        yield ("pipeline", "function"), function.partition(":")[0]


def code_of_its_own(config: Config) -> list[str]:
    """The modules that a config has imported."""
    function = config.pipeline.function
    return list(dict.fromkeys([*config.plugins, *([function.partition(":")[0]] if function else [])]))


def where_from(name: str) -> str | None:
    """The file that a module would be imported from, found without running any of it; of a package that of its top,
    because looking into it would run that. None if there is none."""
    try:
        spec = importlib.util.find_spec(name if name in sys.modules else name.partition(".")[0])
    except (ImportError, ValueError):  # the name is none
        return None
    return None if spec is None else spec.origin or ", ".join(spec.submodule_search_locations or ())


def _announce(name: str) -> None:
    """Say what is about to be run, once per process."""
    place = where_from(name)
    if place is not None and (name, place) not in _announced:
        _announced.add((name, place))
        sys.stderr.write(without_controls(f"plug-in {name}: {place}\n"))
        sys.stderr.flush()


def _import(name: str, folder: Path) -> tuple[str, str] | None:
    """Import one module; what is wrong and what to do if that fails."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            beside, remedy = [path.stem for path in folder.glob("*.py")], f"put {name}.py there, or install its package"
            return (
                f"plug-in {name!r} is neither in {folder} nor installed",
                did_you_mean(name.removesuffix(".py"), beside, otherwise=remedy),
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
    program = str(Path(embodyrl.__file__).parent)
    outside = [frame for frame in frames if not frame.filename.startswith(program)]
    own = outside or [frame for frame in frames if frame.filename != __file__]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
