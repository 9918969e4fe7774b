"""Reads the schema's dataclasses: type, limits and default of a setting, and the options of the chosen component."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

import embodyrl.registry
from embodyrl.config.issues import KeyPath
from embodyrl.errors import UserError
from embodyrl.registry import Registry


@dataclass(frozen=True)
class Setting:
    """One field of a config dataclass."""

    name: str
    kinds: tuple[Any, ...]
    """Types that its value may have, without None."""
    nullable: bool
    """Whether null is legal."""
    field: dataclasses.Field[Any]

    @property
    def required(self) -> bool:
        """True if there is no default."""
        return self.field.default is MISSING and self.field.default_factory is MISSING

    @property
    def default(self) -> Any:
        """The default; only for settings that are not required."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()

    @property
    def section(self) -> type | None:
        """Dataclass of a nested section, or None for a value."""
        kind = self.kinds[0]
        return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None

    @property
    def section_of_entries(self) -> type | None:
        """Dataclass of a list's entries if they are sections, else None."""
        kind = next(iter(typing.get_args(self.kinds[0])), None) if typing.get_origin(self.kinds[0]) is list else None
        return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None

    @property
    def is_free_form(self) -> bool:
        """True if it is a mapping in which any key is legal."""
        return typing.get_origin(self.kinds[0]) is dict

    @property
    def registry(self) -> Registry[Any] | None:
        """Registry whose names are legal here, or None."""
        name = self.field.metadata.get("registry")
        return getattr(embodyrl.registry, name) if name else None


def split_type(annotation: Any) -> tuple[tuple[Any, ...], bool]:
    """Split a type hint into its alternatives without None, and whether None is one."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        alternatives = typing.get_args(annotation)
        return tuple(kind for kind in alternatives if kind is not types.NoneType), types.NoneType in alternatives
    return (annotation,), False


@functools.cache
def settings_of(section: type) -> Mapping[str, Setting]:
    """Return the settings of a config dataclass by name, base classes first."""
    hints = typing.get_type_hints(section)
    settings = {}
    for field in dataclasses.fields(section):
        kinds, nullable = split_type(hints[field.name])
        settings[field.name] = Setting(field.name, kinds, nullable, field)
    return settings


@functools.cache
def docs_of(section: type) -> Mapping[str, str]:
    """Return the text below each field in the class's source, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if dataclasses.is_dataclass(base):
            docs.update(_docs_in_source(base))
    return docs


def _docs_in_source(section: type) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    except (OSError, TypeError):  # a class without source, such as one typed into an interpreter
        return
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    for statement, below in itertools.pairwise(body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def registry_of(section: type) -> Registry[Any] | None:
    """Return the registry that a section's `name` chooses from, or None."""
    name = settings_of(section).get("name")
    return name.registry if name else None


def chosen_name(section: type, data: Any) -> str | None:
    """Return the component that a section names, else the section's default; None if the value is no name."""
    setting = settings_of(section)["name"]
    default = None if setting.required else setting.default
    name = data.get("name", default) if isinstance(data, dict) else default
    return name if isinstance(name, str) else None


def is_component(section: type) -> bool:
    """Return whether a section holds only a component's name and options, as `algorithm.loss` does. A config may write
    just the name in place of such a section, and another name resets it. `env` and `model` have common settings as
    well."""
    return registry_of(section) is not None and len(settings_of(section)) == 1


@functools.cache
def component_sections(root: type) -> Mapping[KeyPath, type]:
    """Return the sections below `root` for which `is_component` holds, by their paths."""
    found: dict[KeyPath, type] = {}
    for name, setting in settings_of(root).items():
        if setting.section is not None and is_component(setting.section):
            found[(name,)] = setting.section
        elif setting.section is not None:
            found |= {(name, *path): section for path, section in component_sections(setting.section).items()}
    return found


def owners_of(section: type, option: str) -> list[str]:
    """Return the names of the components that a section can choose and that have this option."""
    registry = registry_of(section)
    return [
        entry.name
        for entry in (registry.entries() if registry else ())
        if option in settings_of(class_at(section, {"name": entry.name}))
    ]


def options_class(section: type, data: Any) -> type | None:
    """Return the dataclass of a section's settings: that of the component its `name` chooses, else `section` itself.
    None if the section names no registered component.

    Raises:
        UserError: the component's options cannot be imported, or are no subclass of `section`.
    """
    registry = registry_of(section)
    if registry is None:
        return section
    name = chosen_name(section, data)
    if name is None or name not in registry:
        return None
    try:
        options = registry.entry(name).load_options() or section
        settings_of(options)
    except Exception as error:
        raise UserError(f"the options of {registry.kind} {name!r} cannot be loaded: {error!r}") from error
    if not issubclass(options, section):
        wanted = f"{section.__module__}.{section.__qualname__}"
        raise UserError(f"the options of {registry.kind} {name!r} ({options.__qualname__}) are no subclass of {wanted}")
    return options


def choices_of(section: type) -> list[type]:
    """Return every dataclass that may describe the section: `section` itself and all registered components' options."""
    registry = registry_of(section)
    found = [section]
    for entry in registry.entries() if registry else ():
        try:
            options = options_class(section, {"name": entry.name})
        except UserError:
            continue
        if options is not None and options not in found:
            found.append(options)
    return found


def class_at(section: type, data: Any) -> type:
    """Return `options_class`, or `section` where the component is unknown or its options cannot be loaded."""
    try:
        return options_class(section, data) or section
    except UserError:
        return section


def find_setting(root: type, data: Any, path: KeyPath) -> tuple[Setting | None, bool]:
    """Return the setting at `path`, or None, and whether the path leads into a free-form mapping."""
    section: type | None = root
    setting: Setting | None = None
    for index, key in enumerate(path):
        if section is None:
            return None, False
        setting = settings_of(class_at(section, data)).get(str(key))
        if setting is None:
            return None, False
        if setting.is_free_form and index + 1 < len(path):
            return setting, True
        section = setting.section
        data = data.get(key) if isinstance(data, dict) else None
    return setting, False


def all_paths(root: type, data: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every section and setting of the schema, for the components that `data` chooses."""
    for name, setting in settings_of(class_at(root, data)).items():
        here = (*path, name)
        yield here
        if setting.section is not None:
            yield from all_paths(setting.section, data.get(name) if isinstance(data, dict) else None, here)


def defaults_below(root: type, data: Any) -> dict[str, Any]:
    """Return the schema's defaults as plain data, updated by `data`. Required settings that `data` lacks are left
    out."""
    filled: dict[str, Any] = {}
    given = data if isinstance(data, dict) else {}
    for name, setting in settings_of(class_at(root, given)).items():
        value = given.get(name, None if setting.section is None or setting.nullable else {})
        if setting.section is not None and isinstance(value, dict):
            filled[name] = defaults_below(setting.section, value)
        elif name not in given and not setting.required:
            filled[name] = setting.default
    return {**given, **filled}
