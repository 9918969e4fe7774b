"""Reads a config of RLinf: a YAML file with Hydra's `defaults`, resolved from the files beside it, and its references.

Only plain values are read. Nothing that Hydra or OmegaConf could execute is: no `_target_`, no resolver, no variable of
the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodyrl.config.files import read_document
from embodyrl.config.issues import ConfigError
from embodyrl.errors import RemediedError

HYDRAS_OWN = ("hydra/", "override ")
"""Beginnings of entries of `defaults` that are about Hydra itself."""
DEEPEST = 8
"""Files, or references, that may name each other in a row."""
MOST_FILES = 100
"""Files that a config may be composed of."""
REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_][\w.]*)\}")


class RLinfError(RemediedError):
    """Raised for a file that is no config of RLinf, or of which nothing can be converted."""

    exit_code = 2


@dataclass
class RLinfConfig:
    """All values of a config, by their full names."""

    path: Path
    values: dict[str, Any]
    """Numbers, texts, lists and nulls; references that cannot be resolved stay as they are written."""
    missing: list[str] = field(default_factory=list)
    """Files that `defaults` names and that are not beside it."""


def read_rlinf(path: Path) -> RLinfConfig:
    """Read a config with the files that it is composed of.

    Raises:
        RLinfError: there is no such file, or it is no config of RLinf.
        ConfigError: a file is not legal YAML.
    """
    if not path.is_file():
        raise RLinfError(f"{path} is no file", "give a YAML file of RLinf, as examples/embodiment/config/....yaml")
    composer = _Composer(path.parent)
    data = composer.compose(path)
    data.pop("hydra", None)
    if not isinstance(data.get("actor"), Mapping) or not isinstance(data.get("env"), Mapping):
        found = ", ".join(map(str, data)) or "nothing"
        raise RLinfError(
            f"{path} is no config of RLinf for robots: it has no sections actor and env (found: {found})",
            "give one of its examples/embodiment/config/*.yaml; a config of embodyrl needs no conversion",
        )
    return RLinfConfig(path, dict(_leaves(data, data, ())), composer.missing)


@dataclass
class _Composer:
    """Reads a config's file and those that its `defaults` name, in one folder."""

    folder: Path
    missing: list[str] = field(default_factory=list)
    files: int = 0

    def compose(self, path: Path, depth: int = 0) -> dict[str, Any]:
        """Return a file's values on top of those of its `defaults`. Without `_self_` the file comes last."""
        self.files += 1
        if depth > DEEPEST or self.files > MOST_FILES:
            many = f"{DEEPEST} files in a row" if depth > DEEPEST else f"{MOST_FILES} files"
            raise RLinfError(f"the defaults of {path} lead to more than {many}", "remove the cycle, or files")
        document = read_document(path, str(path), any_interpolation=True)
        if document.faults:
            raise ConfigError(document.faults)
        data = document.data
        own = {key: value for key, value in data.items() if key != "defaults"}
        entries = data.get("defaults") or []
        if not isinstance(entries, list):
            raise RLinfError(f"`defaults` of {path} is no list", "write `- group/name` lines, as Hydra reads them")
        merged: dict[str, Any] = {}
        for entry in entries if "_self_" in entries else [*entries, "_self_"]:
            _merge(merged, own if entry == "_self_" else self._part(entry, path, depth))
        return merged

    def _part(self, entry: Any, path: Path, depth: int) -> dict[str, Any]:
        """Return the values that an entry of `defaults` stands for, in their section."""
        chosen = _chosen(entry, path)
        if chosen is None:
            return {}
        name, package = chosen
        file = self.folder / f"{name}.yaml"
        if not file.is_file():
            self.missing.append(f"{name}.yaml")
            return {}
        part = self.compose(file, depth + 1)
        for key in reversed(package):
            part = {key: part}
        return part


def _chosen(entry: Any, path: Path) -> tuple[str, list[str]] | None:
    """Return the file that an entry of `defaults` names, and the section that it fills; None if it is Hydra's own, or
    chooses no file.

    Raises:
        RLinfError: it is no text `group/name@package`, and no `group@package: name`.
    """
    group, name = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", entry)
    if group and name is None:
        return None
    if not isinstance(group, str) or not isinstance(name, str) or not name:
        raise RLinfError(
            f"`defaults` of {path} has {entry!r:.80}", "write `- group/name@section` or `- group@section: name`"
        )
    if group:
        group, _, package = group.partition("@")
        text = f"{group}/{name}@{package or group.replace('/', '.')}"
    else:
        text = name
    if text.startswith(HYDRAS_OWN):
        return None
    name, _, package = text.partition("@")
    if ".." in name.split("/"):
        raise RLinfError(f"`defaults` of {path} has {entry!r:.80}", "name a file below the config's own folder")
    package = package or ".".join(name.split("/")[:-1])
    return name.lstrip("/"), [part for part in package.split(".") if part not in ("", "_global_", "_here_")]


def _merge(into: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _leaves(root: Mapping[str, Any], data: Mapping[str, Any], where: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(root, value, (*where, str(key)))
        else:
            yield ".".join((*where, str(key))), _resolved(root, where, value, DEEPEST)


def _resolved(root: Mapping[str, Any], where: tuple[str, ...], value: Any, left: int) -> Any:
    """Return the value that a reference `${a.b}` or `${..b}` leads to, over up to `left` further ones. Anything else
    stays as it is written: what a resolver would compute, and text with a reference inside."""
    found = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if found is None or left == 0:
        return value
    dots, name = found.groups()
    start = where[: len(where) - len(dots) + 1] if dots else ()
    path = (*start, *name.split("."))
    target: Any = root
    for key in path:
        if not isinstance(target, Mapping) or key not in target:
            return value
        target = target[key]
    return value if isinstance(target, Mapping) else _resolved(root, path[:-1], target, left - 1)


def is_open(value: Any) -> bool:
    """Return whether a value is, or holds, text that OmegaConf would replace and that is left as it is written."""
    return "${" in value if isinstance(value, str) else isinstance(value, list) and any(map(is_open, value))
