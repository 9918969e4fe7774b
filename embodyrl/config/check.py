"""Checks composed settings one by one against the schema and collects all faults."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection
from typing import Any

from embodyrl.config.compose import Settings, components
from embodyrl.config.fields import (
    OptionsError,
    Setting,
    all_paths,
    choices_of,
    chosen_name,
    docs_of,
    is_component,
    options_class,
    owners_of,
    registry_of,
    settings_of,
)
from embodyrl.config.files import UNREADABLE, list_options, usual_option
from embodyrl.config.issues import ConfigIssue, KeyPath, Location, MissingDependency, dotted
from embodyrl.config.renames import PEERS, new_name_of, peers_words, renamed_below, renamed_component
from embodyrl.config.values import MISSING, WITHOUT_CONTROLS, check_value, is_missing, keys, nested, show
from embodyrl.errors import has_controls, near_match, without_controls
from embodyrl.registry import Registry

MOST_OPTIONS = 12
"""Options of a group that a fault still lists."""


def check_settings(
    settings: Settings, schema: type, whole: Location, incomplete: Collection[str], *, all_imported: bool = True
) -> list[ConfigIssue]:
    """Check each setting: known key, type, limits, registered name. Rules between settings are in `rules`.

    Args:
        settings: the composed settings.
        schema: the dataclass of the whole config.
        whole: location for settings that are missing from the config.
        incomplete: top-level sections in which missing settings are not reported.
        all_imported: every plug-in could be imported; else an unknown component may be one of theirs, and is not
            reported.
    """
    checker = _Checker(settings, schema, whole, incomplete, all_imported)
    checker.section(schema, settings.data, ())
    return checker.faults


MOST_GUESSES = 100
"""Number of faults after which near matches are no longer searched, since each search is slow."""


class _Checker:
    """One walk over the settings."""

    def __init__(
        self, settings: Settings, schema: type, whole: Location, incomplete: Collection[str], all_imported: bool
    ) -> None:
        self.settings = settings
        self.schema = schema
        self.whole = whole
        self.incomplete = incomplete
        self.all_imported = all_imported
        self.faults: list[ConfigIssue] = []
        self.known = list(all_paths(schema, settings.data))

    def fault(
        self,
        path: KeyPath,
        message: str,
        remedy: str,
        *,
        at_key: bool = False,
        kind: type[ConfigIssue] = ConfigIssue,
    ) -> None:
        """Record a fault at the location of the setting, or of the nearest section around it."""
        location, depth = self.whole, self.settings.depth_of(path)
        if depth:
            origin = self.settings.origins[path[:depth]]
            location = origin.key if at_key or depth < len(path) else origin.value
        self.faults.append(kind((path,), message, remedy, location))

    def section(self, section: type, data: dict[str, Any], path: KeyPath) -> None:
        """Check a section: its keys, then each of its settings."""
        try:
            chosen = options_class(section, data)
        except OptionsError as error:
            for issue in error.issues:
                self.fault((*path, "name"), issue.message, issue.hint)
            return  # which keys are legal is not known
        settings = dict(settings_of(chosen or section))
        candidates = [chosen] if chosen else choices_of(section)
        # Of a component that is not registered, names that it would choose can be looked at.
        own = (each for candidate in candidates for each in settings_of(candidate).values())
        settings |= {each.name: each for each in own if each.section is not None and is_component(each.section)}
        legal = {name for candidate in candidates for name in settings_of(candidate)}
        any_key = chosen is None and is_component(section)  # options of a component that is not registered
        for key in data:
            if key not in legal and not any_key:
                self.unknown_key(sorted(legal), (*path, key))
        for name, setting in settings.items():
            if name in data:
                self.setting(setting, data[name], (*path, name))
            elif setting.required:
                self.missing(chosen or section, setting, (*path, name))
            elif setting.section is not None and not setting.nullable:
                self.section(setting.section, {}, (*path, name))

    def missing(self, section: type, setting: Setting, path: KeyPath) -> None:
        """Report a setting that has no default and no value."""
        if path[0] in self.incomplete:
            return
        if setting.section is not None:
            options = list_options(setting.name)
            remedy = f"add `{setting.name}:` and its settings"
            if options:
                usual = usual_option(setting.name) or options[0]
                # A list of dozens hides the line to add, and the command shows it with a sentence for each.
                all_of_them = ", ".join(options) if len(options) <= MOST_OPTIONS else "`embodyrl list configs`"
                remedy = f"add `- {setting.name}: {usual}` to the defaults list (options: {all_of_them})"
            self.fault(path, f"the section {dotted(path)!r} is missing", remedy)
            return
        words = docs_of(section).get(setting.name, "")
        remedy = f"add `{setting.name}: ...` to the section {dotted(path[:-1])!r}"
        self.fault(path, f"{dotted(path)} is missing", f"{remedy} ({words.rstrip('.')})" if words else remedy)

    def unknown_key(self, legal: list[str], path: KeyPath) -> None:
        """Report a key that the schema does not have. For a section with renamed settings, or with words of other
        libraries, report each of these."""
        data = self.settings.data
        remedies = {old: new_name_of(self.schema, data, new) for old, new in renamed_below(data, path)}
        key, here = str(path[-1]), path[:-1]
        # Two letters that have changed places make a short word less similar than they should.
        is_near = near_match(key, legal, cutoff=0.8) is not None or sorted(key) in map(sorted, legal)
        is_ours = (bool(here) or key not in PEERS) and is_near
        is_ours |= here in components() and bool(owners_of(components()[here], key))
        if not remedies and not is_ours:
            remedies = {word: f"in embodyrl: {PEERS[str(word[-1])]}" for word in peers_words(data, path)}
        for where, remedy in (remedies or {path: self.where_it_belongs(legal, path)}).items():
            self.fault(where, f"unknown key {dotted(where)!r}", remedy, at_key=True)

    def where_it_belongs(self, legal: list[str], path: KeyPath) -> str:
        """Return the remedy for an unknown key: a near match here, the same key elsewhere, or the list of keys."""
        key, here = str(path[-1]), path[:-1]
        elsewhere = [known for known in self.known if known[-1] == key]
        if len(self.faults) > MOST_GUESSES:
            return "remove it"
        near, is_close = near_match(key, legal), near_match(key, legal, cutoff=0.8) is not None
        if here in components() and not is_close and (owners := owners_of(components()[here], key)):
            chosen = chosen_name(components()[here], self.settings.get(here))
            return (
                f"remove it, or choose {' or '.join(map(repr, owners))}: {dotted(here)} {chosen!r} has no such option"
            )
        section = self.chooses(here[:1])
        if section is not None and not is_close and (owners := owners_of(section, *map(str, here[1:]), key)):
            chosen = chosen_name(section, self.settings.get(here[:1]))
            return f"remove it: {here[0]} {chosen!r} has no such setting (it is one of {', '.join(owners)})"
        if elsewhere and not is_close:
            return f"did you mean {' or '.join(repr(dotted(known)) for known in elsewhere[:3])}?"
        if near:
            return f"did you mean {dotted((*here, near))!r}?"
        leaves = {str(known[-1]): known for known in self.known}
        if far := near_match(key, leaves, cutoff=0.8):
            return f"did you mean {dotted(leaves[far])!r}?"
        return f"remove it (keys {'of ' + dotted(here) if here else 'here'}: {', '.join(legal)})"

    def chooses(self, path: KeyPath) -> type | None:
        """Return the section at a path if its `name` chooses a component."""
        section = (
            settings_of(self.schema)[str(path[0])].section
            if len(path) == 1 and path[0] in settings_of(self.schema)
            else None
        )
        return section if section is not None and registry_of(section) is not None else None

    def setting(self, setting: Setting, value: Any, path: KeyPath) -> None:
        """Check one setting of any type."""
        kind = setting.kinds[0]
        if value is UNREADABLE:
            return
        if setting.section is None and any(map(is_missing, nested(value))):
            self.fault(path, f'{dotted(path)} = "{MISSING}" stands for a value that is missing', "write the value")
        elif value is None:
            if not setting.nullable:
                what = "must not be null" if setting.section is None else "has no settings"
                self.fault(path, f"{dotted(path)} {what}", _remedy_for_null(setting))
        elif setting.section is not None:
            self.subsection(setting, setting.section, value, path)
        elif setting.is_free_form:
            self.free_form(setting, typing.get_args(kind)[1], value, path)
        elif typing.get_origin(kind) is list:
            self.entries(setting, typing.get_args(kind)[0], value, path)
        else:
            example = None if setting.required else setting.default
            self.single(setting, setting.kinds, value, path, example)

    def free_form(self, setting: Setting, kind: Any, value: Any, path: KeyPath) -> None:
        """Check a mapping with free keys, whose values are of this kind or `Any`."""
        if not isinstance(value, dict):
            remedy = f"write `{setting.name}: {{key: value}}`"
            self.fault(path, f"{dotted(path)} must be a mapping, got {show(value)}", remedy)
        elif odd := [key for key in keys(value) if not isinstance(key, str)]:
            self.fault(path, f"{dotted(path)} has the key {show(odd[0])}, which is no text", "write it in quotes")
        elif hidden := [each for each in (*keys(value), *nested(value)) if has_controls(each)]:
            message = f"{dotted(path)} holds control characters in {without_controls(show(hidden[0]))}"
            self.fault(path, message, WITHOUT_CONTROLS)
        elif kind is not Any:
            for key, entry in value.items():
                self.single(setting, (kind,), entry, (*path, key), None)

    def entries(self, setting: Setting, kind: Any, value: Any, path: KeyPath) -> None:
        """Check a list, entry by entry."""
        if setting.field.metadata.get("alone") and not isinstance(value, list | dict):
            self.single(setting, (kind,), value, path, None)
            return
        if not isinstance(value, list):
            entries = [_bare(value)] * (len(setting.default or ()) or 1 if not setting.required else 1)
            self.fault(path, f"{dotted(path)} must be a list, got {show(value)}", f"write [{', '.join(entries)}]")
            return
        limits = setting.field.metadata
        if limits.get("length", None) not in (None, len(value)):
            message = f"{dotted(path)} must have {limits['length']} entries, got {len(value)}"
            self.fault(path, message, f"write {limits['length']}, as in {show(setting.default)}")
        for index, entry in enumerate(value):
            if limits.get("once") and entry in value[:index]:
                self.fault((*path, index), f"{dotted(path)} names {entry!r} twice", "remove one of them")
            if setting.section_of_entries is not None:
                self.subsection(setting, setting.section_of_entries, entry, (*path, index))
            else:
                self.single(setting, (kind,), entry, (*path, index), None)

    def subsection(self, setting: Setting, section: type, value: Any, path: KeyPath) -> None:
        """Check the value of a setting that must be a section."""
        if isinstance(value, dict):
            self.section(section, value, path)
        elif value is not UNREADABLE:
            message = f"{dotted(path)} must be a section with settings of its own, got {show(value)}"
            self.fault(path, message, _remedy_for_section(setting, path))

    def single(self, setting: Setting, kinds: tuple[Any, ...], value: Any, path: KeyPath, example: Any) -> None:
        """Check a single value: its type and limits, then its name in a registry."""
        if value is UNREADABLE:
            return
        problem = check_value(value, kinds, setting.field.metadata, example)
        if problem is not None:
            self.fault(path, f"{dotted(path)} {problem.message}", problem.hint)
        elif setting.registry is not None:
            self.component(setting.registry, setting.field.metadata["registry"], value, path)

    def component(self, registry: Registry[Any], variable: str, name: str, path: KeyPath) -> None:
        """Check that a component is registered, in the registry that `variable` names, and the packages it needs are
        installed."""
        if name not in registry:
            remedy = renamed_component(registry.kind, name)
            if not remedy and near_match(name, registry.names()) is None:
                if not self.all_imported:
                    return
                whose = "one of the plug-ins" if self.settings.get(("plugins",)) else "a module listed under `plugins:`"
                remedy = f"if it is yours, {whose} must call {variable}.register({name!r}, ...)"
            self.fault(path, registry.unknown(name), remedy)
            return
        missing = registry.entry(name).missing()
        for install in dict.fromkeys(requirement.install for requirement in missing):
            modules = [repr(requirement.module) for requirement in missing if requirement.install == install]
            needed = f"the package{'s' if len(modules) > 1 else ''} {', '.join(modules)}"
            message = f"{registry.kind} {name!r} is not installed (it needs {needed})"
            self.fault(path, message, install, kind=MissingDependency)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else show(value)


def _remedy_for_null(setting: Setting) -> str:
    if setting.required or setting.section is not None or dataclasses.is_dataclass(setting.default):
        return "give it a value" if setting.section is None else "give it some, or remove the line"
    return f"give it a value, or remove the line for the default {show(setting.default)}"


def _remedy_for_section(setting: Setting, path: KeyPath) -> str:
    """Return the remedy for a plain value in place of a section."""
    if setting.section is not None and is_component(setting.section):
        return (
            f"write a name, as in `{setting.name}: {chosen_name(setting.section, {})}`, or `{setting.name}:` with "
            "`name` and its options indented below"
        )
    options = list_options(setting.name) if len(path) == 1 else []
    if options and setting.section is not None and registry_of(setting.section) is not None:
        return f"choose a group in the defaults list, as in `- {setting.name}: {options[0]}`"
    if isinstance(path[-1], int):
        return "write `- key: value` and its other settings indented below"
    return f"write `{setting.name}:` and its settings indented below"
