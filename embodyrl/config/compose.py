"""Composes a config file with the group files of its defaults list; each value keeps its origin.

Defaults lists are checked before Hydra reads them, so that every wrong entry is reported at its own line. Hydra decides
which files take part, in which order and in which section. The values are merged here, so that each keeps the line and
column it came from.
"""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra

from embodyrl.config.fields import chosen_name, component_sections
from embodyrl.config.files import (
    EXPERIMENTS,
    UNREADABLE,
    Document,
    Origin,
    Source,
    builtin_folder,
    find_config,
    list_groups,
    list_options,
    near_option,
    read_document,
    readable_path,
)
from embodyrl.config.issues import COMMAND_LINE, ConfigIssue, KeyPath, Location
from embodyrl.config.schema import Config
from embodyrl.errors import did_you_mean, near_match


def components() -> Mapping[KeyPath, type]:
    """Return the sections that hold only a component's name and options, by their paths."""
    return component_sections(Config)


def _is_around(path: KeyPath) -> bool:
    """Return whether such sections lie below a path."""
    return any(len(path) < len(each) and each[: len(path)] == path for each in components())


@dataclass
class Settings:
    """Composed plain data with the origin of each value."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    replaced: list[tuple[KeyPath, Any, Origin]] = field(default_factory=list)
    """Values that were replaced as a whole, in that order, with their origins."""

    def get(self, path: KeyPath) -> Any:
        """Return the value at `path`, or None."""
        value: Any = self.data
        for key in path:
            if isinstance(value, dict):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                return None
        return value

    def depth_of(self, path: KeyPath) -> int:
        """Return how many keys of a path lead to the innermost part of it that is in a file; 0: none is."""
        return next((depth for depth in range(len(path), 0, -1) if path[:depth] in self.origins), 0)

    def merge(self, document: Document, package: KeyPath = ()) -> None:
        """Merge a file's settings over the present ones: mappings key by key, everything else as a whole.

        Args:
            document: the file.
            package: path of the section that its top level stands for.
        """
        whole = Location(document.label)
        for depth in range(1, len(package) + 1):
            self.origins.setdefault(package[:depth], Origin(whole, whole))
        values = {key: value for key, value in document.data.items() if key != "defaults"}
        if package in components():
            self._put(package, values, (), {**document.origins, (): Origin(whole, whole)})
            return
        for key, value in values.items():
            self._put((*package, key), value, (key,), document.origins)

    def override(self, path: KeyPath, value: Any) -> None:
        """Set a value from the command line."""
        if path[:-1] in components() and path[-1] == "name":
            path, value = path[:-1], {"name": value}
        place = Location(COMMAND_LINE)
        marks: dict[KeyPath, Origin] = {}
        _mark_all(value, (), Origin(place, place), marks)
        for depth in range(1, len(path)):
            self.origins.setdefault(path[:depth], Origin(place, place))
        self._put(path, value, (), marks)

    def merge_value(self, path: KeyPath, other: Settings, source: KeyPath) -> None:
        """Merge the value that is at `source` in other settings over the present one at `path`."""
        self._put(path, other.get(source), source, other.origins)

    def exchange(self, section: str, options: Mapping[str, Any]) -> None:
        """Put a component with these options, `name` among them, in the place of that of a section; further options
        stay if it is the same one."""
        given = self.get((section,))
        if not isinstance(given, dict) or given.get("name") != options["name"]:
            self.data.pop(section, None)
            for path in [each for each in self.origins if each[:1] == (section,)]:
                del self.origins[path]
        self.override((section,), dict(options))

    def _put(self, path: KeyPath, value: Any, source: KeyPath, origins: Mapping[KeyPath, Origin]) -> None:
        """Put `value` at `path`; it is at `source` in the file that `origins` describes."""
        if _is_around(path) and value and isinstance(value, dict) and not isinstance(self.get(path), dict):
            self._put(path, {}, source, {source: origins[source]})
        is_new = False
        if path in components() and isinstance(value, str):  # `loss: gspo` is gspo with its defaults
            value, origins, is_new = {"name": value}, {**origins, (*source, "name"): origins[source]}, True
        elif path in components() and isinstance(value, dict) and "name" in value:
            is_new = value["name"] != chosen_name(components()[path], self.get(path))
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
        """Remove a value; returns it with its origin."""
        value = self.get(path[:-1]).pop(path[-1])
        return value, self.origins.pop(path)

    def put(self, path: KeyPath, value: Any, origin: Origin) -> None:
        """Put a single value of another origin at `path`. Missing sections around it are created."""
        for depth in range(1, len(path)):
            self.origins.setdefault(path[:depth], origin)
        self._put(path, value, (), {(): origin})


def _paths(value: Any) -> Iterator[KeyPath]:
    """Yield the path of a value and of everything nested in it, relative to the value."""
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
    """Settings of the files, before the values of the command line and any check."""

    settings: Settings
    faults: list[ConfigIssue]
    files: list[str]
    """Files that took part, the user's first."""
    entries: dict[str, Location]
    """Location of the choice of each group file."""
    chosen: dict[Location, str]
    """Choices of the user's defaults list, as `env=metaworld/reach`, by location."""
    whole: Location
    """Location for issues of the user's file as a whole: its defaults list, else its start."""
    incomplete: set[str]
    """Top-level sections whose group file could not be used."""
    readable: bool
    """Whether the user's file could be read at all."""


def compose(source: Source, main: Document, group_overrides: Mapping[str, str]) -> Composed:
    """Compose the user's file `main` with the groups of its defaults list.

    Args:
        source: where the file is.
        main: the file.
        group_overrides: choices of the command line; they replace those of the list.
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
    own = [each for each in choices.entries if each.group and not each.is_guess and each.location.file == main.label]
    chosen = {choice.location: f"{choice.group}={choice.option}" for choice in own}
    origin = main.origins.get(("defaults",))
    whole = origin.key if origin is not None else Location(main.label, 1, 1)
    return Composed(settings, faults, files, entries, chosen, whole, choices.incomplete(), main.readable)


def _merge_in_hydras_order(
    settings: Settings, source: Source, group_overrides: Mapping[str, str], documents: dict[Path, Document]
) -> list[ConfigIssue]:
    """Merge the files in the order of the defaults lists; returns what Hydra rejects."""
    try:
        order = _hydras_order(source, group_overrides)
    except Exception as error:  # Hydra raises many kinds; all of them are about the defaults list
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, RecursionError):
            why = "a file's list leads back to the file itself"
        place = documents[source.path].origins["defaults",].key
        return [ConfigIssue("defaults", f"defaults: {why}", "fix the list", place)]
    for path, package in order:
        if path not in documents:
            documents[path] = read_document(path, readable_path(path))
        settings.merge(documents[path], tuple(package.split(".")) if package else ())
    return []


def _hydras_order(source: Source, group_overrides: Mapping[str, str]) -> list[tuple[Path, str]]:
    """Return the files of the defaults lists, each with its package, in the order in which Hydra merges them.

    `hydra.compose` would merge the values without their places, and says which option each group has, but not in which
    order; the list that `--info defaults` prints is that order. It is computed without Hydra's settings of its launcher
    and its logging, whose twelve files take two thirds of the time; no public function leaves them out.
    """
    main, *others = source.folders
    search = ",".join(_quoted(f"file://{folder}") for folder in others)
    overrides = [f"{group}={_quoted(option)}" for group, option in group_overrides.items()]
    with _HYDRA, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no _self_ in the list: the file's own values come last, as one expects
        with initialize_config_dir(str(main), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            assert isinstance(loader, ConfigLoaderImpl)
            parsed, files = loader._parse_overrides_and_create_caching_repo(
                source.path.stem, [f"hydra.searchpath=[{search}]", *overrides]
            )
            listed = create_defaults_list(files, source.path.stem, parsed, prepend_hydra=False, skip_missing=False)
    order = []
    for item in listed.defaults:
        path = source.path if item.primary else find_config(source.folders, str(item.config_path))
        assert path is not None, f"Hydra found {item.config_path}, we did not"
        order.append((path, str(item.package or "")))
    return order


_HYDRA = threading.Lock()
"""Held while Hydra reads: it has one state for the whole process, which is put back afterwards."""


def _quoted(text: str) -> str:
    """Quote a text by the grammar of Hydra's overrides."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _merge_what_is_there(
    settings: Settings, source: Source, choices: Choices, documents: Mapping[Path, Document]
) -> None:
    """Merge the files that can be read, to find further faults in them."""
    for choice in choices.entries:
        if choice.path is not None:
            settings.merge(documents[choice.path], choice.package)
    settings.merge(documents[source.path])


_KEYWORDS = re.compile(r"^(?:(?:override|optional)\s+)*")


@dataclass(frozen=True)
class Choice:
    """One entry of a defaults list: `env: metaworld/reach`, or a plain `name` (then `group` is empty)."""

    group: str
    option: str
    package: KeyPath
    """Section for its settings."""
    path: Path | None
    """Its file, or None if there is none."""
    location: Location
    """Location of the choice."""
    is_guess: bool = False
    """Whether there is no such option, and `path` is that of the near match: what follows from it is reported too."""


@dataclass
class Choices:
    """Choices of the defaults list of the user's file."""

    entries: list[Choice] = field(default_factory=list)
    faults: list[ConfigIssue] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)
    """Group files that cannot be used because of faults in them or in files that they choose."""

    def incomplete(self) -> set[str]:
        """Return the top-level sections that lack the settings of an unusable entry, misspelt sections included."""
        missing = [entry for entry in self.entries if entry.path is None or entry.path in self.broken]
        if any(entry.group == EXPERIMENTS for entry in missing):
            return set(list_groups((builtin_folder(),)))
        sections = {str(entry.package[0]) for entry in missing if entry.package}
        return sections | {match for name in sections if (match := near_match(name, list_groups((builtin_folder(),))))}


def read_choices(source: Source, group_overrides: Mapping[str, str], documents: dict[Path, Document]) -> Choices:
    """Check the defaults lists of the user's file and of every group file it leads to; reads these into `documents`."""
    choices = Choices()
    main = documents[source.path]
    choices.entries = _Reader(source, group_overrides, documents, choices).entries(main, "")
    listed = {choice.group for choice in choices.entries}
    for group, option in group_overrides.items():
        if group not in listed:
            message = f"{group}={option} chooses from a group that the file's defaults list does not have"
            remedy = f"add `- {group}: {option}` to that list, or set single values, as in {group}.name=..."
            choices.faults.append(ConfigIssue(((group,),), message, remedy, Location(COMMAND_LINE)))
    return choices


@dataclass
class _Reader:
    source: Source
    group_overrides: Mapping[str, str]
    documents: dict[Path, Document]
    choices: Choices
    open: list[Path] = field(default_factory=list)
    """Group files whose lists are being followed."""

    def entries(self, document: Document, folder: str) -> list[Choice]:
        """Return the entries of one file's defaults list, and follow each of them."""
        listed = document.data.get("defaults", [])
        if listed is UNREADABLE:
            return []
        if not isinstance(listed, list):
            message = "defaults must be a list"
            self.fault(document, ("defaults",), message, "write `defaults: [env: metaworld/reach, model: mlp, _self_]`")
            return []
        if document.data.get("defaults") and not folder and self.source.path.suffix != ".yaml":
            self.fault(document, ("defaults",), "a file with a defaults list must end in .yaml", "rename it")
        entries: list[Choice] = []
        for index, item in enumerate(listed):
            path: KeyPath = ("defaults", index)
            pairs = list(_split(item))
            if not pairs:
                remedy = "write `group: option`, as in `- env: metaworld/reach`, or _self_"
                self.fault(document, path, "this entry of the defaults list is neither a choice nor a name", remedy)
            for group, option in pairs:
                choice = self.choice(document, path, folder, group, option)
                if choice is not None:
                    entries.append(choice)
        return entries

    def choice(self, document: Document, path: KeyPath, folder: str, written: str, option: str) -> Choice | None:
        """Return one entry after following its file's own defaults list; None for an entry that names no file."""
        bare, _, package = _KEYWORDS.sub("", written).partition("@")
        if not written:
            option, _, package = option.partition("@")
        is_override = "override" in written.split()
        group = bare.lstrip("/") if bare.startswith("/") or is_override else "/".join(filter(None, (folder, bare)))
        location = document.origins[(*path, written) if written else path].value
        if document.label == self.source.file and group in self.group_overrides:
            option, location = self.group_overrides[group], Location(COMMAND_LINE)
        if option in ("_self_", "") or "${" in option:
            return None
        target = option.lstrip("/") if option.startswith("/") else f"{group or folder}/{option}".lstrip("/")
        file = find_config(self.source.folders, target)
        if file is not None and target.startswith(f"{EXPERIMENTS}/"):
            message = f"{target} is a whole job, which is no part of another one"
            remedy = f"begin with its settings in a file of your own: embodyrl run {target} --print-config > my.yaml"
            self.choices.faults.append(ConfigIssue((path,), message, remedy, location))
            return Choice(EXPERIMENTS, option, (), None, location)
        is_guess = file is None and "optional" not in written.split()
        if is_guess:
            self.choices.faults.append(ConfigIssue((path,), *self.why_missing(group, option, target), location))
            near = near_option(option, list_options(group, self.source.folders)) if group else None
            file = find_config(self.source.folders, f"{group}/{near}") if near else None
            if file is not None and not self.follow(file, location):
                file = None
        elif file is not None and not self.follow(file, location):
            self.choices.broken.add(file)
        place = package or (group if written else target.rpartition("/")[0]).replace("/", ".")
        section = () if place.startswith("_") or not place else tuple(place.split("."))
        return Choice(group, option, section, file, location, is_guess)

    def follow(self, file: Path, location: Location) -> bool:
        """Read a group file and the files of its defaults list; returns whether all are free of faults."""
        if file in self.open:
            loop = [readable_path(each) for each in (*self.open[self.open.index(file) :], file)]
            message = f"the defaults lists lead in a circle: {' -> '.join(loop)}"
            self.choices.faults.append(ConfigIssue(("defaults",), message, "take one of them out", location))
            return False
        if file in self.documents:
            return file not in self.choices.broken
        document = self.documents[file] = read_document(file, readable_path(file))
        before = len(self.choices.faults)
        root = next(folder for folder in self.source.folders if folder in file.parents)
        self.open.append(file)
        self.entries(document, file.parent.relative_to(root).as_posix().removeprefix("."))
        self.open.pop()
        return not document.faults and len(self.choices.faults) == before

    def why_missing(self, group: str, option: str, target: str) -> tuple[str, str]:
        """Return the message and remedy for an entry that leads to no file."""
        if not group:
            options = sorted(path.stem for path in self.source.path.parent.glob("*.yaml"))
            hint = did_you_mean(target, options, otherwise="choose from a group, as in `- env: metaworld/reach`")
            return f"no config file {target + '.yaml'!r}", hint
        options = list_options(group, self.source.folders)
        if not options:
            groups = list_groups(self.source.folders)
            near = near_match(group, groups)
            return f"no config group {group!r}", _suggest(near, "groups", groups)
        return f"config group {group!r} has no option {option!r}", nearest_option(option, options)

    def fault(self, document: Document, path: KeyPath, message: str, remedy: str) -> None:
        """Record a fault at the location of `path`."""
        self.choices.faults.append(ConfigIssue((path,), message, remedy, document.origins[path].value))


def nearest_option(option: str, options: list[str]) -> str:
    """Return the remedy for an option that does not exist."""
    return _suggest(near_option(option, options), "options", options)


MOST_LISTED = 20
"""Longest list of names in a remedy."""


def _suggest(near: str | None, what: str, names: list[str]) -> str:
    if len(names) > MOST_LISTED:
        all_of_them = f"`embodyrl list configs` shows all {what}"
        return f"did you mean {near!r}? ({all_of_them})" if near else all_of_them
    listed = ", ".join(names)
    return f"did you mean {near!r}? ({what}: {listed})" if near else f"choose one of: {listed}"


def _split(item: Any) -> Iterator[tuple[str, str]]:
    """Split an entry into (group, option) pairs. A plain name has an empty group; an illegal entry has no pairs."""
    if isinstance(item, str):
        yield "", item
    elif isinstance(item, dict) and len(item) == 1:
        [(group, option)] = item.items()
        if option is None:
            yield group, ""
        elif isinstance(option, str):
            yield group, option
        elif isinstance(option, list) and all(isinstance(name, str) for name in option):
            for name in option:
                yield group, name
