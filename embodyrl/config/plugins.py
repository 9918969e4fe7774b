"""Imports the modules that a config lists under `plugins:` and that of `pipeline.function`, if the config is trusted.
No other setting names code.

A checkpoint, run directory or exported policy of someone else must not run code on the receiver's machine without
consent. A run therefore signs the code that its config names, with a key that only its user has. A saved config with
another signature, or none, is trusted only with `--trust`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import importlib.util
import json
import os
import secrets
import stat
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import embodyrl
from embodyrl.config.compose import Settings
from embodyrl.config.issues import ConfigIssue, KeyPath
from embodyrl.config.schema import Config
from embodyrl.errors import UserError, did_you_mean, without_controls
from embodyrl.registry import all_registries

_announced: set[tuple[str, str]] = set()
NAME_CODE: tuple[KeyPath, ...] = (("plugins",), ("pipeline", "function"))
"""Settings that name code. They are applied before all others."""


def import_plugins(settings: Settings, folder: Path) -> list[ConfigIssue]:
    """Import every plug-in, from `folder` or from the installed packages, after announcing it on stderr. Returns a
    fault for each that failed."""
    modules = dict(named_modules(settings))
    if not modules:
        return []
    for registry in all_registries():
        registry.names()  # registers built-in names first, so that a plug-in that takes one gets the error
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
    """Yield the path and name of each module. Values of a wrong type are left to the schema check."""
    listed, function = (settings.get(path) for path in NAME_CODE)
    for index, name in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(name, str):
            yield ("plugins", index), name
    if isinstance(function, str) and ":" in function:
        yield ("pipeline", "function"), function.partition(":")[0]


def code_of_its_own(config: Config) -> list[str]:
    """Return the modules that a config imports."""
    function = config.pipeline.function
    return list(dict.fromkeys([*config.plugins, *([function.partition(":")[0]] if function else [])]))


def where_from(name: str) -> str | None:
    """Return the file that a module would be imported from, without running it; None if there is none. For a submodule
    it is the file of the top package, because finding the submodule would run that."""
    try:
        spec = importlib.util.find_spec(name if name in sys.modules else name.partition(".")[0])
    except (ImportError, ValueError):  # not a module name
        return None
    if spec is None:
        return None
    places = [spec.origin] if spec.origin else spec.submodule_search_locations or ()
    return ", ".join(map(os.path.normpath, places))


def _announce(name: str) -> None:
    """Print the module that is about to be imported, once per process."""
    place = where_from(name)
    if place is not None and (name, place) not in _announced:
        _announced.add((name, place))
        sys.stderr.write(without_controls(f"plug-in {name}: {place}\n"))
        sys.stderr.flush()


def _import(name: str, folder: Path) -> tuple[str, str] | None:
    """Import one module; returns message and remedy if that fails, else None."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            beside, remedy = [path.stem for path in folder.glob("*.py")], f"put {name}.py there, or install its package"
            return (
                f"plug-in {name!r} is neither in {os.path.normpath(folder)} nor installed",
                did_you_mean(name.removesuffix(".py"), beside, otherwise=remedy),
            )
        return f"plug-in {name!r} needs {error.name!r}, which is not installed", f"pip install {error.name}"
    except SystemExit as error:
        text = f"plug-in {name!r} ended the program while it was imported: {_describe_exit(error, folder)}"
        return text, 'take that out, or put it under `if __name__ == "__main__":`'
    except Exception as error:  # a plug-in may raise anything
        text = _describe(error, Path(where_from(name) or folder).parent)
        remedy = next((remedy for part, remedy in _OF_DATACLASSES.items() if part in text), "fix the module")
        return f"plug-in {name!r} failed while it was imported: {text}", remedy
    return None


def ended_by_code(error: SystemExit, settings: Settings, folder: Path) -> ConfigIssue:
    """Return the fault of a config whose code ended the program while the config was checked."""
    path = next((path for path, _ in named_modules(settings)), ())
    what = f"code of this config ended the program while the config was checked: {_describe_exit(error, folder)}"
    origin = settings.origins.get(path)
    return ConfigIssue((path,), what, "take that out, and yield an issue instead", origin.value if origin else None)


def _describe_exit(error: SystemExit, folder: Path) -> str:
    return _describe(error, folder).replace("SystemExit:", "sys.exit:")


_OF_DATACLASSES = {
    "cannot inherit non-frozen dataclass": "write @dataclass(frozen=True, kw_only=True) above the class",
    "non-default argument": "write @dataclass(frozen=True, kw_only=True) above the class",
    "is a field but has no type annotation": "write its type, as in `width: float = setting(0.2)`",
    "mutable default": "write setting(...) around the default, which copies lists and maps for every instance",
}
"""Remedies for what Python's `dataclass` says of options, by a part of its text."""


def _describe(error: BaseException, folder: Path) -> str:
    """Return the exception in one line, with the last line in the plug-in's folder that led to it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({os.path.normpath(error.filename or '')}:{error.lineno})"
    program = str(Path(embodyrl.__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if "importlib" not in frame.filename]
    outside = [frame for frame in frames if not frame.filename.startswith(program)]
    places = [(os.path.normpath(frame.filename), frame.lineno) for frame in outside or frames]
    own = [(file, line) for file, line in places if file.startswith(f"{folder}{os.sep}")] or places
    place = " ({}:{})".format(*own[-1]) if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


ORIGIN_FILE = "origin.json"
"""In a run directory and a checkpoint: source of the config, folder of its plug-ins, signature."""
TRAINING_FILE = "training.yaml"
"""In an exported policy: the config of the run that it comes from."""
SAVED = (ORIGIN_FILE, "manifest.json", "policy.json", "base.json", TRAINING_FILE)
"""Files that mark a folder as a run's, a checkpoint or an exported policy, not written manually."""
OF_A_RUN = ("checkpoints", "metrics.jsonl", "run.log", ".lock")
"""What marks a run directory whose origin is missing: a stranger can leave it out, and an own run has it."""
KEY_FILE = "embodyrl/key"
KEY_PLACE = f"$XDG_STATE_HOME (~/.local/state)/{KEY_FILE}"
"""Location of the key, for messages."""
_KEY_BYTES = 32


class UntrustedError(UserError):
    """Raised when a config of someone else names code; none of it was run."""

    exit_code = 2


@dataclass(frozen=True)
class Saved:
    """Origin of a saved config, from the files beside it."""

    folder: Path
    """Folder of the run, checkpoint or policy."""
    source: str
    """Source of the run's config, for messages."""
    plugin_dir: Path
    """Folder of its plug-ins."""
    signature: str | None
    is_relative: bool
    """Whether `plugin_dir` was given relative to the folder."""

    def doubts(self, claims: Iterable[str]) -> str | None:
        """Return why the config is not trusted, as text that follows its path; None if it is this user's own.

        Args:
            claims: see the function `claims`.
        """
        if self.is_relative:
            return "has plug-ins in a folder that is named relative to it"
        if self.plugin_dir.resolve().is_relative_to(_whole(self.folder.resolve())):
            return "looks for plug-ins in its own folder"
        expected = sign(self.plugin_dir, claims)
        if expected is None or self.signature is None or not hmac.compare_digest(expected, self.signature):
            return "was not made by you on this machine"
        return None


def claims(settings: Mapping[str, Any]) -> list[str]:
    """Return every value of an unresolved config that runs code or reads environment variables, as JSON or
    `path=text`."""
    pipeline = settings.get("pipeline")
    named = [settings.get("plugins"), pipeline.get("function") if isinstance(pipeline, dict) else None]
    return [json.dumps(value, default=str) for value in named if value] + list(_interpolated(settings, ""))


def _interpolated(value: Any, place: str) -> Iterator[str]:
    """Yield every text with `${`, after its path."""
    if isinstance(value, str) and "${" in value:
        yield f"{place}={value}"
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _interpolated(child, f"{place}/{key}")


def read_saved(config_file: Path) -> Saved | None:
    """Read the origin of a config file that a run wrote; None for one that was written manually."""
    folder = config_file.absolute().parent
    if _whole(folder) == folder and not any(os.path.lexists(folder / name) for name in (*SAVED, *OF_A_RUN)):
        return None
    found = read_origin(folder)
    named = Path(found.get("plugin_dir", folder))
    relative = "plugin_dir" in found and not named.is_absolute()
    return Saved(folder, found.get("source", str(config_file)), folder / named, found.get("signature"), relative)


def read_origin(folder: Path) -> dict[str, str]:
    """Return the texts in origin.json. Empty if it is missing or damaged: a run without plug-ins does not need it."""
    path = folder / ORIGIN_FILE
    try:
        contents = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    found = contents if isinstance(contents, dict) else {}
    return {name: text for name, text in found.items() if isinstance(text, str) and text and "\0" not in text}


def sign(plugin_dir: Path, claims: Iterable[str]) -> str | None:
    """Sign the claims of a config and the folder of its plug-ins (HMAC-SHA-256); None without a key."""
    key = _key()
    signed = json.dumps([str(plugin_dir), sorted(claims)]).encode()
    return None if key is None else hmac.new(key, signed, hashlib.sha256).hexdigest()


def can_sign() -> bool:
    """Return whether this user has a key; creates one if possible."""
    return _key() is not None


def _whole(folder: Path) -> Path:
    """Return the run directory of a checkpoint, else the folder itself."""
    return folder.parent.parent if folder.parent.name == OF_A_RUN[0] else folder


def _key() -> bytes | None:
    """Return this user's key, created on first use. None if it cannot be stored, or if others can read or write it."""
    try:
        path = _state_folder() / KEY_FILE
        if not path.exists():
            _make_key(path)
        with path.open("rb") as file:
            facts, key = os.fstat(file.fileno()), file.read(_KEY_BYTES + 1)
    except (OSError, RuntimeError):
        return None
    is_own = facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & 0o077
    return key if is_own and len(key) == _KEY_BYTES else None


def _state_folder() -> Path:
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".local" / "state"


def _make_key(path: Path) -> None:
    """Write a new key atomically, unless another process has written one meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    number, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with os.fdopen(number, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
