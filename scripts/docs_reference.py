"""Writes the reference pages of the documentation from the code: settings from the schema and the options of registered
components, commands from the command line's own help. `scripts/docs_site.py` adds them to the site when it is built."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import typer.main
from typer.core import TyperGroup

import embodyrl
from embodyrl.config import fields
from embodyrl.config.build import inline, to_plain
from embodyrl.config.schema import Config
from embodyrl.config.values import choices_in, legal_values
from embodyrl.registry import Registry, all_registries

GENERATED = "This page is generated from the code of this version"
OF_COMPONENTS = {
    "env": "Simulators",
    "model": "Models",
    "algorithm": "Algorithms",
    "algorithm.advantage": "Advantage estimators",
    "algorithm.loss": "Policy losses",
    "algorithm.reward": "Rewards",
    "algorithm.filter": "Filters",
}
"""Sections that choose a component with options, and the heading of these."""


def settings_page() -> str:
    """Return the reference of all settings, one table for each section, as Markdown."""
    lines = [
        "# Settings",
        "",
        f"{GENERATED}: every setting with its type, limits and default. `embodyrl run --print-config` prints the same "
        "as a YAML file that runs. A default of *required* must be written, or comes from a group file. How files, "
        "groups and the command line are combined: [configuration](../configuration.md).",
        "",
    ]
    lines += _section(Config, "")
    lines += ["# Options of components", "", "A component's options stand in the section that chooses it.", ""]
    for where, title in OF_COMPONENTS.items():
        lines += _components(where, title)
    return "\n".join(lines)


def _section(section: type, where: str) -> Iterator[str]:
    """Yield a section's heading, its table, and the same for the sections in it."""
    settings, docs = fields.settings_of(section), fields.docs_of(section)
    if where:
        yield from (f"## `{where}` {{ #{where} }}", "", inspect.cleandoc(section.__doc__ or "").replace("\n", " "), "")
    values = [setting for setting in settings.values() if setting.section is None]
    if not where:
        yield from ("## The top level { #top }", "")
    yield from _table(values, docs, where)
    for setting in settings.values():
        if setting.section is not None:
            yield from _section(setting.section, f"{where}.{setting.name}".lstrip("."))


def _components(where: str, title: str) -> Iterator[str]:
    """Yield the options of every component that the section `where` can choose."""
    yield from (f"## {title} (`{where}`)", "")
    base = _class_at(where)
    common = fields.settings_of(base)
    for entry in registry_at(where).entries():
        yield from (f"### `{where}.name: {entry.name}` {{ #{where}-{entry.name} }}", "", f"{entry.summary}.", "")
        options = options_at(where, entry.name)
        own = {name: each for name, each in fields.settings_of(options).items() if _is_own(each, common.get(name))}
        yield from _options(own, fields.docs_of(options), where)
        if not own:
            yield from ("No options of its own.", "")


def _options(settings: Mapping[str, fields.Setting], docs: Mapping[str, str], where: str) -> Iterator[str]:
    """Yield the table of some options, and those of the sections among them, each with a line about it."""
    yield from _table([each for each in settings.values() if each.section is None], docs, where)
    for name, each in settings.items():
        if each.section is not None:
            yield from (f"`{where}.{name}`: {_cell(docs.get(name, ''))}", "")
            inner = fields.settings_of(each.section)
            yield from _options(inner, fields.docs_of(each.section), f"{where}.{name}")


def _is_own(setting: fields.Setting, common: fields.Setting | None) -> bool:
    """Return whether an option is new, or has a default of its own, beside the settings that all components share."""
    if common is None:
        return True
    if setting.name == "name" or setting.section is not None or setting.required:
        return False
    return common.required or bool(setting.default != common.default)


def options_at(where: str, name: str) -> type:
    """Return the section `where` with the options of the component `name`."""
    return fields.class_at(_class_at(where), {"name": name})


def registry_at(where: str) -> Registry[Any]:
    """Return the registry that the section `where` chooses from."""
    found = fields.registry_of(_class_at(where))
    assert found is not None, where
    return found


def _class_at(where: str) -> type:
    """Return the class of the section `where`, which a component may have among its options."""
    section: type = Config
    for name in where.split("."):
        registry = fields.registry_of(section)
        chosen = [fields.class_at(section, {"name": entry.name}) for entry in registry.entries()] if registry else []
        having = (fields.settings_of(each).get(name) for each in (section, *chosen))
        found = next((setting.section for setting in having if setting is not None), None)
        assert found is not None, where
        section = found
    return section


def _table(settings: list[fields.Setting], docs: Mapping[str, str], where: str) -> Iterator[str]:
    if not settings:
        return
    yield from ("| setting | type and limits | default | |", "|---|---|---|---|")
    for setting in settings:
        key = f"{where}.{setting.name}".lstrip(".")
        cells = (f"`{key}`", _type(setting), _default(setting), docs.get(setting.name, ""))
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    yield ""


def _cell(text: str) -> str:
    """Return a text that ends no cell and opens no tag: `<time>` in a docstring is meant as it stands."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _type(setting: fields.Setting) -> str:
    """Return a setting's type and limits in words."""
    if section := setting.section_of_entries:
        return f"list of sections: {', '.join(fields.settings_of(section))}"
    if setting.registry is not None:
        single, words = f"one of the registered {setting.registry.kind}s", "list of " if _is_list(setting) else ""
        return ("map to " if setting.is_free_form else words) + single
    [kind, *_] = setting.kinds
    entries = getattr(kind, "__args__", ()) if not choices_in(kind) else ()
    legal = legal_values(entries[-1:] or setting.kinds, setting.field.metadata)
    name = " or ".join(
        "" if each is str and setting.field.metadata.get("words") else _name(each) for each in setting.kinds
    )
    text = ", ".join(each for each in (name.removesuffix(" or "), legal) if each)
    return f"{text}; or null" if setting.nullable else text


def _is_list(setting: fields.Setting) -> bool:
    return getattr(setting.kinds[0], "__origin__", None) is list


def _name(kind: Any) -> str:
    """Return the name of a type as a config's author says it."""
    if choices_in(kind):
        return ""
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    if kind in names:
        return names[kind]
    arguments = getattr(kind, "__args__", ())
    inner = _name(arguments[-1]) if arguments else ""
    return (
        f"{'list' if kind.__origin__ is list else 'map'}{' of ' + inner if inner else ''}" if arguments else "anything"
    )


def _default(setting: fields.Setting) -> str:
    if setting.required:
        return "*required*"
    value = setting.default
    value = value.value if isinstance(value, Enum) else value
    value = (
        [to_plain(each) if hasattr(each, "__dataclass_fields__") else each for each in value]
        if isinstance(value, list)
        else value
    )
    return f"`{inline(value)}`"


def components_page() -> str:
    """Return the list of every registered component, as Markdown."""
    lines = [
        "# Components",
        "",
        f"{GENERATED}. `embodyrl list` prints the same, and whether each can be used on your machine.",
        "",
    ]
    for registry in all_registries():
        kind = f"{registry.kind}es" if registry.kind.endswith("s") else f"{registry.kind}s"
        lines += [f"## {kind.capitalize()}", "", "| name | what it is |", "|---|---|"]
        lines += [f"| `{entry.name}` | {_cell(entry.summary)} |" for entry in registry.entries()]
        lines += [""]
    return "\n".join(lines)


@functools.cache
def commands() -> dict[str, Any]:
    """Return the commands of `embodyrl` by name, in the order of its help."""
    from embodyrl.cli.main import app

    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return dict(group.commands)


def commands_page() -> str:
    """Return the help of every command, as Markdown."""
    lines = ["# Commands", "", f"{GENERATED}: what `embodyrl COMMAND --help` prints.", ""]
    for name, command in commands().items():
        if not command.hidden:
            context = command.context_class(command, info_name=f"embodyrl {name}", terminal_width=100)
            lines += [f"## `embodyrl {name}`", "", "```text", command.get_help(context).rstrip(), "```", ""]
    return "\n".join(lines)


TO_BUILD_WITH = {
    "Simulators": ("envs.base.Slot", "envs.base.SlotSimulator", "envs.types.Simulator", "envs.types.SimulatorSpec"),
    "Models": ("models.policy.Policy",),
    "Sinks": ("tracking.sinks.Sink",),
}
"""What components are made of, below `embodyrl.`; the reference of Python shows it after what the package offers."""


def offered() -> dict[str, list[str]]:
    """Return what `import embodyrl` offers by its kind, as the paths of its definitions below `embodyrl.`."""
    found: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    for name in embodyrl.__all__:
        value = getattr(embodyrl, name)
        if inspect.isclass(value):
            kind = "Errors" if issubclass(value, Exception) else "Classes"
        elif inspect.isfunction(value):
            kind = "Functions"
        else:  # a module, an alias of types, the version
            continue
        found[kind].append(f"{value.__module__.removeprefix('embodyrl.')}.{name}")
    return found


def api_page() -> str:
    """Return the reference of the Python API, whose docstrings mkdocstrings reads, as Markdown."""
    lines = [
        "# Python API",
        "",
        "Generated from the docstrings. `import embodyrl` offers the functions, classes and errors under their short "
        "names (`embodyrl.train`). An introduction: [from Python](../python.md).",
        "",
    ]
    for title, names in (offered() | TO_BUILD_WITH).items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [f"::: embodyrl.{name}", ""]
    return "\n".join(lines)


PAGES = {
    "reference/settings.md": settings_page,
    "reference/components.md": components_page,
    "reference/commands.md": commands_page,
    "reference/api.md": api_page,
}
"""Generated pages by their path in the site."""
