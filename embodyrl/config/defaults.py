"""Looks over `defaults:` lists before Hydra does, so that every wrong entry is reported at its own line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodyrl.config.issues import COMMAND_LINE, ConfigIssue, KeyPath, Location
from embodyrl.config.marks import UNREADABLE, Document, read_document
from embodyrl.config.sources import (
    Source,
    builtin_folder,
    find_config,
    list_groups,
    list_options,
    near_option,
    readable_path,
)
from embodyrl.errors import did_you_mean, near_match

_KEYWORDS = re.compile(r"^(?:(?:override|optional)\s+)*")


@dataclass(frozen=True)
class Choice:
    """One entry of a defaults list: `env: metaworld/reach`, or a plain `name` (then `group` is empty)."""

    group: str
    option: str
    package: KeyPath
    """Where its settings go."""
    path: Path | None
    """Its file, or None if there is none."""
    location: Location
    """Where the choice was made."""


@dataclass
class Choices:
    """What the defaults list of the user's file chooses."""

    entries: list[Choice] = field(default_factory=list)
    faults: list[ConfigIssue] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)
    """Group files that cannot be used, for what is in them or below them."""

    def incomplete(self) -> set[str]:
        """Top-level sections that lack what an entry should have brought, misspelt ones included."""
        missing = [entry for entry in self.entries if entry.path is None or entry.path in self.broken]
        sections = {str(entry.package[0]) for entry in missing if entry.package}
        return sections | {match for name in sections if (match := near_match(name, list_groups((builtin_folder(),))))}


def read_choices(source: Source, group_overrides: Mapping[str, str], documents: dict[Path, Document]) -> Choices:
    """Check the defaults lists of the user's file and of every group file below it, reading those into `documents`."""
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

    def entries(self, document: Document, folder: str) -> list[Choice]:
        """The entries of one file's defaults list, following each of them."""
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
        """One entry, its file looked up and its own defaults list followed; None for what names no file."""
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
        if file is None and "optional" not in written.split():
            self.choices.faults.append(ConfigIssue((path,), *self.why_missing(group, option, target), location))
        elif file is not None and not self.follow(file):
            self.choices.broken.add(file)
        place = package or (group if written else target.rpartition("/")[0]).replace("/", ".")
        return Choice(
            group, option, () if place.startswith("_") or not place else tuple(place.split(".")), file, location
        )

    def follow(self, file: Path) -> bool:
        """Read a group file and what its defaults list names; whether all of it is sound."""
        if file in self.documents:
            return file not in self.choices.broken
        document = self.documents[file] = read_document(file, readable_path(file))
        before = len(self.choices.faults)
        root = next(folder for folder in self.source.folders if folder in file.parents)
        self.entries(document, file.parent.relative_to(root).as_posix().removeprefix("."))
        return not document.faults and len(self.choices.faults) == before

    def why_missing(self, group: str, option: str, target: str) -> tuple[str, str]:
        """What is wrong with an entry that leads to no file, and what to do."""
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
        """Record a fault at the place of `path`."""
        self.choices.faults.append(ConfigIssue((path,), message, remedy, document.origins[path].value))


def nearest_option(option: str, options: list[str]) -> str:
    """The remedy for an option that does not exist."""
    return _suggest(near_option(option, options), "options", options)


def _suggest(near: str | None, what: str, names: list[str]) -> str:
    listed = ", ".join(names)
    return f"did you mean {near!r}? ({what}: {listed})" if near else f"choose one of: {listed}"


def _split(item: Any) -> Iterator[tuple[str, str]]:
    """An entry as (group, option) pairs; a plain name has no group; nothing for what is no entry."""
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
