"""The modules that a config lists under `plugins:`, and the one of `pipeline.function`: importing them, and whose
config may have it done. No other setting names code.

A checkpoint, run directory or exported policy from elsewhere must not run code where its receiver only wants to look. A
run therefore signs what its config names with a key that only its user has, and a config from a saved folder whose
signature does not fit is believed only with `--trust`.
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
    """Yield where each module is named; values of a wrong type are for the schema check to report."""
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


ORIGIN_FILE = "origin.json"
"""In a run directory and a checkpoint: where the config and its plug-ins came from."""
TRAINING_FILE = "training.yaml"
"""In an exported policy: the config of the run that it comes from."""
SAVED = (ORIGIN_FILE, "manifest.json", "policy.json", "base.json", TRAINING_FILE)
"""A folder with one of these was written by a run, not by hand."""
KEY_FILE = "embodyrl/key"
KEY_PLACE = f"$XDG_STATE_HOME (~/.local/state)/{KEY_FILE}"
"""Where it is, for people."""
_KEY_BYTES = 32


class UntrustedError(UserError):
    """Raised when a config from elsewhere names code; none of it was run."""

    exit_code = 2


@dataclass(frozen=True)
class Saved:
    """A saved config, and what stands beside it."""

    folder: Path
    """Of the run, the checkpoint or the policy."""
    source: str
    """What the run loaded its config from, for people."""
    plugin_dir: Path
    """Where its plug-ins were."""
    signature: str | None
    is_relative: bool
    """Whether `plugin_dir` was given relative to the folder."""

    def doubts(self, claims: Iterable[str]) -> str | None:
        """Return why not to believe the config, in words that follow its path; None if it is this user's own.

        Args:
            claims: all that it names.
        """
        if self.is_relative:
            return "has plug-ins in a folder that is named relative to it"
        if self.plugin_dir.resolve().is_relative_to(_whole(self.folder.resolve())):
            return "has plug-ins in a folder inside it"
        expected = sign(self.plugin_dir, claims)
        if expected is None or self.signature is None or not hmac.compare_digest(expected, self.signature):
            return "was not made by you on this machine"
        return None


def claims(settings: Mapping[str, Any]) -> list[str]:
    """Return what a config, as it stands in its file, names that runs code or reads environment variables."""
    pipeline = settings.get("pipeline")
    named = [settings.get("plugins"), pipeline.get("function") if isinstance(pipeline, dict) else None]
    return [json.dumps(value, default=str) for value in named if value] + list(_interpolated(settings, ""))


def _interpolated(value: Any, place: str) -> Iterator[str]:
    """Every text with `${`, with its place."""
    if isinstance(value, str) and "${" in value:
        yield f"{place}={value}"
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _interpolated(child, f"{place}/{key}")


def read_saved(config_file: Path) -> Saved | None:
    """Return what stands beside a config file that a run wrote; None for one that was written by hand."""
    folder = config_file.absolute().parent
    if not any((folder / name).exists() for name in SAVED):
        return None
    found = read_origin(folder)
    named = Path(found.get("plugin_dir", folder))
    relative = "plugin_dir" in found and not named.is_absolute()
    return Saved(folder, found.get("source", str(config_file)), folder / named, found.get("signature"), relative)


def read_origin(folder: Path) -> dict[str, str]:
    """The texts in origin.json; none where it is missing or damaged, since a run without plug-ins can do without."""
    path = folder / ORIGIN_FILE
    try:
        contents = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    found = contents if isinstance(contents, dict) else {}
    return {name: text for name, text in found.items() if isinstance(text, str) and text and "\0" not in text}


def sign(plugin_dir: Path, claims: Iterable[str]) -> str | None:
    """The signature of what a config names and the folder of its plug-ins; None without a key."""
    key = _key()
    signed = json.dumps([str(plugin_dir), sorted(claims)]).encode()
    return None if key is None else hmac.new(key, signed, hashlib.sha256).hexdigest()


def can_sign() -> bool:
    """Return whether this user has a key, or gets one now."""
    return _key() is not None


def _whole(folder: Path) -> Path:
    """The run directory of a checkpoint, else the folder itself."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def _key() -> bytes | None:
    """This user's key, made on first use; None where none can be kept, or others could read or write it."""
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
    """Write a new key whole, unless another process has meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    number, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with os.fdopen(number, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
