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
    missing: list[str] = []
    data = _compose(path, path.parent, missing, 0)
    data.pop("hydra", None)
    if not isinstance(data.get("actor"), Mapping) or not isinstance(data.get("env"), Mapping):
        found = ", ".join(map(str, data)) or "nothing"
        raise RLinfError(
            f"{path} is no config of RLinf for robots: it has no sections actor and env (found: {found})",
            "give one of its examples/embodiment/config/*.yaml; a config of embodyrl needs no conversion",
        )
    return RLinfConfig(path, dict(_leaves(data, data, ())), missing)


def _compose(path: Path, folder: Path, missing: list[str], depth: int) -> dict[str, Any]:
    """Return a file's values on top of those of its `defaults`. Without `_self_` the file comes last."""
    document = read_document(path, str(path))
    if document.faults:
        raise ConfigError(document.faults)
    data = document.data if isinstance(document.data, dict) else {}
    own = {key: value for key, value in data.items() if key != "defaults"}
    if depth > DEEPEST:
        raise RLinfError(f"the defaults of {path} lead to more than {DEEPEST} files in a row", "remove the cycle")
    entries = data.get("defaults") or []
    entries = [*entries, "_self_"] if "_self_" not in entries else entries
    merged: dict[str, Any] = {}
    for entry in entries:
        if entry == "_self_":
            _merge(merged, own)
            continue
        chosen = _chosen(entry)
        if chosen is None:
            continue
        name, package = chosen
        file = folder / f"{name}.yaml"
        if not file.is_file():
            missing.append(f"{name}.yaml")
            continue
        part: Any = _compose(file, folder, missing, depth + 1)
        for key in reversed(package):
            part = {key: part}
        _merge(merged, part)
    return merged


def _chosen(entry: Any) -> tuple[str, list[str]] | None:
    """Return the file that an entry of `defaults` names, and the section that it fills; None if it is Hydra's own."""
    text = entry if isinstance(entry, str) else next(iter(f"{key}/{value}" for key, value in dict(entry).items()), "")
    if text.startswith(HYDRAS_OWN):
        return None
    if not isinstance(entry, str):  # group@package: name
        [(group, name)] = entry.items()
        group, _, package = str(group).partition("@")
        text = f"{group}/{name}@{package or group.replace('/', '.')}"
    name, _, package = text.partition("@")
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
    return _resolved(root, path[:-1], target, left - 1)
