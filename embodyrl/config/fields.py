"""Reads the schema's dataclasses: type, limits and default of a setting, and the options of the chosen component."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import Any

import embodyrl.registry
from embodyrl.config.issues import ConfigIssue, KeyPath
from embodyrl.config.values import check_value, choices_in
from embodyrl.errors import UserError, line_of
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
    def is_resumable(self) -> bool:
        """True if it may change when a run continues."""
        return bool(self.field.metadata.get("resumable"))

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


def _docs_in_source(section: type) -> Mapping[str, str]:
    try:
        return _docs_by_class(sys.modules[section.__module__]).get(section.__qualname__, {})
    except (OSError, TypeError, KeyError):  # a class without source, such as one typed into an interpreter
        return {}


@functools.cache
def _docs_by_class(module: types.ModuleType) -> Mapping[str, Mapping[str, str]]:
    """Return the text below each field of all classes in a module's source, by their qualified names.
    `inspect.getsource` would parse the whole module for each class."""
    found: dict[str, Mapping[str, str]] = {}

    def visit(body: Iterable[ast.AST], place: str) -> None:
        for node in body:
            match node:
                case ast.ClassDef(name=name):
                    found.setdefault(place + name, dict(_documented(node)))
                    visit(node.body, f"{place}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    visit(node.body, f"{place}{name}.<locals>.")
                case ast.If() | ast.For() | ast.With() | ast.Try() | ast.ExceptHandler():
                    visit(ast.iter_child_nodes(node), place)

    visit(ast.parse(inspect.getsource(module)).body, "")
    return found


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, below in itertools.pairwise(node.body):
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
    well, and methods share most of theirs."""
    return registry_of(section) is not None and len(settings_of(section)) == 1 and not _is_method(section)


def _is_method(section: type) -> bool:
    from embodyrl.config.schema import AlgorithmConfig  # not for lists of configs, which take no settings

    return section is AlgorithmConfig


def component_sections(root: type) -> Mapping[KeyPath, type]:
    """Return the sections below `root` for which `is_component` holds, by their paths; also those that only some
    methods of `algorithm` have."""
    return _component_sections(root, len(embodyrl.registry.ALGORITHMS.names()))


@functools.cache
def _component_sections(root: type, registered: int) -> Mapping[KeyPath, type]:
    """Do what `component_sections` does; a plug-in may have registered more."""
    found: dict[KeyPath, type] = {}
    for name, setting in settings_of(root).items():
        if setting.section is not None and is_component(setting.section):
            found[(name,)] = setting.section
        elif setting.section is not None:
            below = dict(_component_sections(setting.section, registered))
            for options in choices_of(setting.section) if _is_method(setting.section) else ():
                below |= _component_sections(options, registered)
            found |= {(name, *path): section for path, section in below.items()}
    return found


def owners_of(section: type, *option: str) -> list[str]:
    """Return the names of the components that a section can choose and that have this option, which may be in a section
    of theirs."""
    registry = registry_of(section)
    return [
        entry.name
        for entry in (registry.entries() if registry else ())
        if find_setting(section, {"name": entry.name}, option)[0] is not None
    ]


def options_class(section: type, data: Any) -> type | None:
    """Return the dataclass of a section's settings: that of the component its `name` chooses, else `section` itself.
    None if the section names no registered component.

    Raises:
        OptionsError: the component's options cannot be imported, or cannot be part of a config.
    """
    registry = registry_of(section)
    if registry is None:
        return section
    name = chosen_name(section, data)
    if name is None or name not in registry:
        return None
    what = f"the options of {registry.kind} {name!r}"
    try:
        options = registry.entry(name).load_options() or section
    except Exception as error:  # whatever a stranger's module raises
        issue = ConfigIssue((), f"{what} cannot be loaded: {error!r}", "fix the component's registration")
        raise OptionsError([issue]) from error
    if not _is_subclass(options, section):
        wanted, found = f"{section.__module__}.{section.__qualname__}", getattr(options, "__qualname__", "no class")
        raise OptionsError([ConfigIssue((), f"{what} ({found}) are no subclass of {wanted}", "derive them from it")])
    if issues := check_options(options):
        raise OptionsError(issues)
    return options


def _is_subclass(options: object, section: type) -> bool:
    return isinstance(options, type) and issubclass(options, section)


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


def is_resumable(root: type, data: Any, path: KeyPath) -> bool:
    """Return whether the setting at `path` may change when a run continues; see `schema.setting`."""
    found, _ = find_setting(root, data, path)
    return found is not None and found.is_resumable


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


# ---- dataclasses of options that others write

SINGLE = (bool, int, float, str)
TYPES = (
    'bool, int, float, str, a StrEnum, Literal["a", "b"], a frozen dataclass, or list[...] or dict[str, ...] of one of '
    "these; each also with `| None`"
)
"""Types of options, for messages."""
INSTEAD = {
    **dict.fromkeys(("dict", "mapping"), "dict[str, float]"),
    **dict.fromkeys(("list", "tuple", "set", "sequence", "ndarray", "tensor"), "list[float]"),
    **dict.fromkeys(("float16", "float32", "float64", "floating", "number"), "float"),
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "integer"), "int"),
    "path": "str",
}
"""The option types nearest to common others, by their last name in lower case."""


class OptionsError(UserError):
    """Raised for a component's options that cannot be part of a config.

    Args:
        issues: all of them; `where` is left to the caller.
    """

    def __init__(self, issues: Sequence[ConfigIssue]) -> None:
        self.issues = tuple(issues)
        super().__init__("; ".join(map(str, issues)))


@functools.cache
def check_options(options: type) -> Sequence[ConfigIssue]:
    """Return the faults of a component's options: fields with a type that no setting can have, defaults that their own
    type or limits exclude, and values that are no field. `where` is left to the caller."""
    if "__dataclass_fields__" not in vars(options) and inspect.get_annotations(options):
        message = f"{options.__qualname__} is no dataclass, so that what it declares is no option{line_of(options)}"
        return [ConfigIssue((), message, "write @dataclass(frozen=True, kw_only=True) above it")]
    try:
        settings = settings_of(options)
    except Exception as error:  # a name that is not defined, or an annotation that is no type
        message = f"the annotations of {options.__qualname__} cannot be read: {type(error).__name__}: {error}"
        message += line_of(options)
        return [ConfigIssue((), message, "import types of options where the class is, not under TYPE_CHECKING")]
    found = [issue for setting in settings.values() for issue in _check_option(setting, options)]
    for name, value in vars(options).items():
        if name not in settings and not name.startswith("_") and isinstance(value, (*SINGLE, list, dict)):
            message = f"{name!r} of {options.__qualname__} has no type, so that it is no option{line_of(options, name)}"
            found.append(ConfigIssue((), message, f"write `{name}: {type(value).__name__} = setting({value!r})`"))
    return found


def _check_option(setting: Setting, owner: type) -> Iterator[ConfigIssue]:
    """Check the type, limits and default of one option of the class `owner`."""
    faults = list(_faults_of_option(setting, f"option {setting.name!r} of {owner.__qualname__}"))
    # Python's source is read only for a fault: all options together take longer than everything else that is checked.
    place = line_of(owner, setting.name) if faults else ""
    yield from (dataclasses.replace(each, message=each.message + place) for each in faults)
    if not faults and setting.section is not None:
        yield from check_options(setting.section)


def _faults_of_option(setting: Setting, what: str) -> Iterator[ConfigIssue]:
    low, high = (setting.field.metadata.get(name) for name in ("low", "high"))
    if not _is_supported(setting):
        kind = setting.field.type
        text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
        hint = f"declare it as {TYPES}"
        if instead := INSTEAD.get(re.split(r"[\[ ]", text)[0].rpartition(".")[2].lower()):
            hint = f"write `{setting.name}: {instead}`, or {hint}"
        if set(setting.kinds) & {int, float} and str in setting.kinds:
            hint = 'name the legal texts, as in `setting(1, words=("auto",))`'
        yield ConfigIssue((), f"{what} has the type {text}, which no option can have", hint)
    elif low is not None and high is not None and low > high:
        message = f"{what} has low={low:g} above high={high:g}, so that no value is legal"
        yield ConfigIssue((), message, f"write low={high:g}, high={low:g}")
    elif setting.section is None and not setting.required:
        problem = _check_default(setting)
        if problem is not None:
            yield ConfigIssue((), f"the default of {what} {problem.message}", problem.hint)


def _is_supported(setting: Setting) -> bool:
    """Return whether a config can hold values of the setting's type."""
    if len(setting.kinds) != 1:  # only of numbers, or a number or a switch or one of some words
        texts = {str} if setting.field.metadata.get("words") else set()
        if set(setting.kinds) == {bool} | texts:
            return bool(texts)
        return bool(setting.kinds) and set(setting.kinds) <= {int, float} | texts
    [kind] = setting.kinds
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return _is_single(arguments[0]) or _is_section(arguments[0])
    if typing.get_origin(kind) is dict:
        return arguments[0] is str and (_is_single(arguments[1]) or arguments[1] is Any)
    return _is_single(kind) or _is_section(kind)


def _is_single(kind: Any) -> bool:
    return kind in SINGLE or (bool(choices_in(kind)) and all(isinstance(each, str) for each in choices_in(kind)))


def _is_section(kind: Any) -> bool:
    is_section = isinstance(kind, type) and dataclasses.is_dataclass(kind)
    return is_section and bool(kind.__dataclass_params__.frozen)


def _check_default(setting: Setting) -> ConfigIssue | None:
    """Return what is wrong with a default, or None."""
    default, [kind, *_] = setting.default, setting.kinds
    if default is None:
        name = setting.field.type if isinstance(setting.field.type, str) else inspect.formatannotation(kind)
        return None if setting.nullable else ConfigIssue((), "is None", f"write `{setting.name}: {name} | None`")
    kinds, values = setting.kinds, [default]
    if typing.get_origin(kind) in (list, dict):
        if not isinstance(default, typing.get_origin(kind)):
            hint = "write setting([...])" if typing.get_origin(kind) is list else "write setting({...})"
            return ConfigIssue((), f"= {default!r} is no {typing.get_origin(kind).__name__}", hint)
        kinds = typing.get_args(kind)[-1:]
        values = list(default.values() if isinstance(default, dict) else default)
    if kinds == (Any,) or _is_section(kinds[0]):
        return None
    for value in values:
        if isinstance(value, Enum) and isinstance(value, kinds[0]):
            continue
        if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
            members = ", ".join(f"{kinds[0].__name__}.{member.name}" for member in kinds[0])
            return ConfigIssue((), f"= {value!r} is no {kinds[0].__name__}", f"write one of {members}")
        if problem := check_value(value, kinds, setting.field.metadata, None):
            return problem
    return None
