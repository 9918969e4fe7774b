"""Whether a saved config may run code. What a run leaves names plug-ins and the folder that they are in; whoever hands
such a folder on could name any. So a run signs what its config names with a key that only its user has, and a config
from a saved folder whose signature does not fit is believed only with `--trust`."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError

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
        """Why not to believe the config, in words that follow its path; None if it is this user's own.

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
    """What a config, as it stands in its file, names that runs code or reads environment variables."""
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
    """What stands beside a config file that a run wrote; None for one that was written by hand."""
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
    """Whether this user has a key, or gets one now."""
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
