"""Puts a config file and the group files that its defaults list names together, each value with its origin.

Hydra decides which files take part, in which order and at which place; the values are merged here, so that every one of
them keeps the line and column it came from.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from embodyrl.config.defaults import Choices, read_choices
from embodyrl.config.fields import chosen_name, component_sections
from embodyrl.config.issues import COMMAND_LINE, ConfigIssue, KeyPath, Location
from embodyrl.config.marks import Document, Origin, read_document
from embodyrl.config.schema import Config
from embodyrl.config.sources import Source, find_config, readable_path

COMPONENTS = component_sections(Config)
"""Sections that another `name` begins anew, so that no option of one component is left to another."""
_AROUND_COMPONENTS = {path[:depth] for path in COMPONENTS for depth in range(1, len(path))}


@dataclass
class Settings:
    """Composed plain data; each value knows where it was written."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    replaced: list[tuple[KeyPath, Any, Origin]] = field(default_factory=list)
    """Values that others were laid over as a whole, in that order, and where they were written."""

    def get(self, path: KeyPath) -> Any:
        """The value at `path`, or None."""
        value: Any = self.data
        for key in path:
            if isinstance(value, dict):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                return None
        return value

    def merge(self, document: Document, package: KeyPath = ()) -> None:
        """Lay a file's settings over what is there: mappings key by key, everything else as a whole.

        Args:
            document: the file.
            package: the section that its top level is.
        """
        whole = Location(document.label)
        for depth in range(1, len(package) + 1):
            self.origins.setdefault(package[:depth], Origin(whole, whole))
        values = {key: value for key, value in document.data.items() if key != "defaults"}
        if package in COMPONENTS:
            self._put(package, values, (), {**document.origins, (): Origin(whole, whole)})
            return
        for key, value in values.items():
            self._put((*package, key), value, (key,), document.origins)

    def override(self, path: KeyPath, value: Any) -> None:
        """Lay a value from the command line over what is there."""
        if path[:-1] in COMPONENTS and path[-1] == "name":
            path, value = path[:-1], {"name": value}
        place = Location(COMMAND_LINE)
        marks: dict[KeyPath, Origin] = {}
        _mark_all(value, (), Origin(place, place), marks)
        for depth in range(1, len(path)):
            self.origins.setdefault(path[:depth], Origin(place, place))
        self._put(path, value, (), marks)

    def _put(self, path: KeyPath, value: Any, source: KeyPath, origins: Mapping[KeyPath, Origin]) -> None:
        """Put `value`, which stands at `source` in the file that `origins` describes, at `path`."""
        if path in _AROUND_COMPONENTS and value and isinstance(value, dict) and not isinstance(self.get(path), dict):
            self._put(path, {}, source, {source: origins[source]})
        is_new = False
        if path in COMPONENTS and isinstance(value, str):  # `loss: gspo` is gspo with its defaults
            value, origins, is_new = {"name": value}, {**origins, (*source, "name"): origins[source]}, True
        elif path in COMPONENTS and isinstance(value, dict) and "name" in value:
            is_new = value["name"] != chosen_name(COMPONENTS[path], self.get(path))
        if isinstance(value, dict) and isinstance(self.get(path), dict) and not is_new:
            self.origins[path] = origins[source]
            for key, child in value.items():
                self._put((*path, key), child, (*source, key), origins)
            return
        if path in self.origins:
            self.replaced.append((path, self.get(path), self.origins[path]))
            for below in _paths(self.get(path)):
                self.origins.pop((*path, *below), None)
        for below in _paths(value):
            if (*source, *below) in origins:
                self.origins[(*path, *below)] = origins[(*source, *below)]
        parent = self.data
        for key in map(str, path[:-1]):
            if not isinstance(parent.get(key), dict):
                parent[key] = {}
            parent = parent[key]
        parent[str(path[-1])] = copy.deepcopy(value)

    def take(self, path: KeyPath) -> tuple[Any, Origin]:
        """Take a value out; returns it, and where it was written."""
        value = self.get(path[:-1]).pop(path[-1])
        return value, self.origins.pop(path)

    def put(self, path: KeyPath, value: Any, origin: Origin) -> None:
        """Put a single value that was written somewhere else into the sections around `path`, which are made."""
        for depth in range(1, len(path)):
            self.origins.setdefault(path[:depth], origin)
        self._put(path, value, (), {(): origin})


def _paths(value: Any) -> Iterator[KeyPath]:
    """The place of a value and of everything below it, relative to it."""
    yield ()
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        for below in _paths(child):
            yield (key, *below)


def _mark_all(value: Any, path: KeyPath, origin: Origin, origins: dict[KeyPath, Origin]) -> None:
    origins[path] = origin
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        _mark_all(child, (*path, key), origin, origins)


@dataclass
class Composed:
    """What the files say, before the command line's values and any check."""

    settings: Settings
    faults: list[ConfigIssue]
    files: list[str]
    """The files that took part, the user's first."""
    entries: dict[str, Location]
    """Where each group file was chosen."""
    whole: Location
    """Where to point for what concerns the user's file as a whole: its defaults list, else its start."""
    incomplete: set[str]
    """Top-level sections whose group file could not be used."""
    readable: bool
    """Whether the user's file could be read at all."""


def compose(source: Source, main: Document, group_overrides: Mapping[str, str]) -> Composed:
    """Compose the user's file `main` with the groups of its defaults list.

    Args:
        source: where the file is.
        main: the file.
        group_overrides: choices from the command line, which replace those of the list.
    """
    documents = {source.path: main}
    choices = read_choices(source, group_overrides, documents)
    faults = [*choices.faults, *(fault for document in documents.values() for fault in document.faults)]
    settings = Settings()
    if not faults and "defaults" in main.data:
        faults += _merge_in_hydras_order(settings, source, group_overrides, documents)
    if faults or "defaults" not in main.data:
        _merge_what_is_there(settings, source, choices, documents)
    files = [document.label for document in documents.values()]
    entries = {documents[choice.path].label: choice.location for choice in choices.entries if choice.path is not None}
    origin = main.origins.get(("defaults",))
    whole = origin.key if origin is not None else Location(main.label, 1, 1)
    return Composed(settings, faults, files, entries, whole, choices.incomplete(), main.readable)


def _merge_in_hydras_order(
    settings: Settings, source: Source, group_overrides: Mapping[str, str], documents: dict[Path, Document]
) -> list[ConfigIssue]:
    """Merge the files as the defaults lists say; returns what Hydra objects to."""
    chosen = [f"{group}={_quoted(option)}" for group, option in group_overrides.items()]
    overrides = [f"hydra.searchpath=[{_quoted(f'file://{source.folders[1]}')}]", *chosen]
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(source.path.parent), version_base="1.3"):
            warnings.simplefilter("ignore")  # no _self_ in the list: the file's own values come last, as one expects
            loader = GlobalHydra.instance().config_loader()
            order = loader.compute_defaults_list(source.path.stem, overrides, RunMode.RUN).defaults
    except Exception as error:  # Hydra raises many kinds; all of them are about the defaults list
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, RecursionError):
            why = "a file's list leads back to the file itself"
        place = documents[source.path].origins["defaults",].key
        return [ConfigIssue("defaults", f"defaults: {why}", "mend the list", place)]
    for item in order:
        package = str(item.package or "")
        if package.split(".")[0] != "hydra":
            path = source.path if item.primary else find_config(source.folders, str(item.config_path))
            assert path is not None, f"Hydra found {item.config_path}, we did not"
            if path not in documents:
                documents[path] = read_document(path, readable_path(path))
            settings.merge(documents[path], tuple(package.split(".")) if package else ())
    return []


def _quoted(text: str) -> str:
    """A text in quotes, by the grammar of Hydra's overrides."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _merge_what_is_there(
    settings: Settings, source: Source, choices: Choices, documents: Mapping[Path, Document]
) -> None:
    """Merge what can be read, to look for further faults in it."""
    for choice in choices.entries:
        if choice.path is not None:
            settings.merge(documents[choice.path], choice.package)
    settings.merge(documents[source.path])
