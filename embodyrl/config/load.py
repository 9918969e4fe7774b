"""From a config file and command-line overrides to the frozen config, or to all of its faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import embodyrl.config.algorithm_rules  # noqa: F401 - adds its rules
from embodyrl.config.build import build_draft, count_settings, with_values
from embodyrl.config.check import check_settings
from embodyrl.config.compose import COMPONENTS, Composed, Settings, compose
from embodyrl.config.fields import settings_of
from embodyrl.config.files import Source, find_source, read_document
from embodyrl.config.interpolation import resolve_interpolations
from embodyrl.config.issues import COMMAND_LINE, ConfigError, ConfigIssue, KeyPath, dotted, in_reading_order
from embodyrl.config.overrides import Override, Overrides, apply_override, parse_overrides
from embodyrl.config.plugins import NAME_CODE, Saved, UntrustedError, claims, import_plugins, named_modules, read_saved
from embodyrl.config.renames import convert_saved
from embodyrl.config.rules import ConfigUse, check_rules, simulator_runs_here
from embodyrl.config.schema import Config, OfTasks
from embodyrl.config.values import Interpolation, show


@dataclass(frozen=True)
class LoadedConfig:
    """A config without faults."""

    config: Config
    source: str
    """What it was loaded from, for people: a path, or `experiment/metaworld_reach`."""
    values: int
    """Number of single settings."""
    path: Path | None
    """The file; None for a built-in experiment."""
    plugin_dir: Path
    """Folder in which plug-ins were looked up besides the installed packages."""
    notes: tuple[str, ...] = ()
    """What people should know about it, although it is no fault."""
    environment: Mapping[KeyPath, tuple[str, Any]] = field(default_factory=dict)
    """Settings that were taken from environment variables, which may be secrets: their text, and what it stands for."""

    @cached_property
    def written(self) -> Config:
        """The config as files and screens show it: with the texts in place of what environment variables hold."""
        texts = {path: Interpolation(text) for path, (text, _) in self.environment.items()}
        return cast(Config, with_values(self.config, texts))

    def hide(self, text: str) -> str:
        """A text without what environment variables hold."""
        return _hide(text, self.environment)


def _hide(text: str, environment: Mapping[KeyPath, tuple[str, Any]]) -> str:
    found = sorted(((value, shown) for shown, value in environment.values() if isinstance(value, str) and value))
    for value, shown in reversed(found):
        text = text.replace(value, shown)
    return text


def load_config(
    source: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    plugin_dir: Path | None = None,
    use: ConfigUse = ConfigUse.check,
    not_needed: Sequence[KeyPath] = (),
    trust: bool = False,
) -> LoadedConfig:
    """Load and check a config; nothing but the plug-ins it names is run.

    Args:
        source: a YAML file, the name of a built-in experiment, or None for the default experiment.
        overrides: `key=value` from the command line.
        plugin_dir: where to look for plug-ins; by default the file's folder (the working directory for built-in ones),
            for a saved config where they were.
        use: what for; decides about what is missing.
        not_needed: settings that name what the command has no use for, so that it need not be there.
        trust: import the plug-ins of a saved config also where another user, or another machine, made it.

    Raises:
        ConfigError: with every fault.
        UntrustedError: it would run code, and nobody says that it is to be trusted.
    """
    found = find_source(source, plugin_dir)
    if isinstance(found, ConfigIssue):
        raise ConfigError([found])
    saved = None if found.is_builtin else read_saved(found.path)
    if saved is not None and plugin_dir is None:
        found = dataclasses.replace(found, plugin_dir=saved.plugin_dir)
    main = read_document(found.path, found.file)
    asked = parse_overrides(overrides, found.has_group)
    composed = compose(found, main, asked.groups)
    if not composed.readable:
        raise ConfigError(in_reading_order([*asked.faults, *composed.faults], composed.files))
    config, faults, notes, environment = _finish(composed, asked, found, use, saved, trust)
    faults = [
        dataclasses.replace(fault, message=_hide(fault.message, environment))
        for fault in faults
        if fault.path not in not_needed
    ]
    if faults:
        raise ConfigError(in_reading_order(faults, composed.files))
    path = None if found.is_builtin else found.path
    return LoadedConfig(config, found.label, count_settings(config), path, found.plugin_dir, tuple(notes), environment)


def _finish(
    composed: Composed, asked: Overrides, source: Source, use: ConfigUse, saved: Saved | None, trust: bool
) -> tuple[Config, list[ConfigIssue], list[str], dict[KeyPath, tuple[str, Any]]]:
    """Bring the settings into their final form and check them; returns the config, all faults, what is worth a note,
    and what came from the environment. What is `saved` has to be this user's own if it names code or environment
    variables, unless he says `trust`, and may be of an earlier version."""
    settings = composed.settings
    doubts = None if saved is None or trust else saved.doubts(claims(settings.data))
    code = [override for override in asked.values if override.path in NAME_CODE]
    others = [override for override in asked.values if override.path not in NAME_CODE]
    others.sort(key=lambda override: not _chooses(override))  # which begins a section anew, so options come after it
    faults = [*composed.faults, *asked.faults, *_apply(settings, code)]
    if doubts is not None:
        modules = dict.fromkeys(name for _, name in named_modules(settings))
        _refuse(source, doubts, "run the Python code of", list(modules), "that code")
    faults += import_plugins(settings, source.plugin_dir)
    if saved is not None:
        convert_saved(settings, Config)
    faults += _apply(settings, others)
    resolved = resolve_interpolations(settings, Config, may_read=doubts is None)
    if doubts is not None:
        texts = [f"{dotted(path)} = {text}" for path, text in resolved.environment.items()]
        _refuse(source, doubts, "read environment variables for", texts, "it")
    faults += resolved.faults
    environment = {path: (text, settings.get(path)) for path, text in resolved.environment.items()}
    faults += check_settings(settings, Config, composed.whole, composed.incomplete)
    config, doubtful = build_draft(settings.data, {fault.path for fault in faults}, composed.incomplete)
    faults += check_rules(config, composed, doubtful, use)
    inherited = [] if use is ConfigUse.show else list(inherited_values(config, composed))
    faults += [each.fault for each in inherited if each.what is OfTasks.fault]
    notes = [f"{each.fault.message}: {each.fault.hint}" for each in inherited if each.what is OfTasks.note]
    if use is ConfigUse.elsewhere:
        notes += [f"unchecked until the run: {each.message}" for each in simulator_runs_here(config)]
    return config, faults, notes, environment


def _refuse(source: Source, doubts: str, does: str, what: Sequence[str], which: str) -> None:
    """End here if a config that is not to be believed would do something, with any of `what`."""
    if what:
        raise UntrustedError(
            f"{source.label} {doubts}, and it would {does} {', '.join(what)}: read {which}, and if you trust it, say "
            "so with --trust"
        )


def _chooses(override: Override) -> bool:
    """Return whether a value from the command line chooses a component, as `algorithm.loss=gspo` does."""
    path = override.path
    return path in COMPONENTS or (path[-1] == "name" and path[:-1] in COMPONENTS)


def _apply(settings: Settings, overrides: Sequence[Override]) -> list[ConfigIssue]:
    """Lay command-line values over the settings; returns those that cannot be."""
    faults = (apply_override(settings, override, Config) for override in overrides)
    return [fault for fault in faults if fault is not None]


# A group file, an experiment or a saved config names tasks and beside them what holds for these tasks alone, as the
# return that counts as success. Whoever lays other tasks over it has to say what holds for them.
TASKS: KeyPath = ("env", "tasks")


@dataclass(frozen=True)
class Inherited:
    """One such value."""

    what: OfTasks
    """Whether it is a fault."""
    fault: ConfigIssue
    """What to say about it."""


def inherited_values(config: Config, composed: Composed) -> Iterator[Inherited]:
    """The values of `env` that stand where tasks are named which are not played."""
    settings = composed.settings
    tasks, origin = settings.get(TASKS), settings.origins.get(TASKS)
    others = {place.value.file: value for path, value, place in settings.replaced if path == TASKS and value != tasks}
    if origin is None:
        return
    options: Any = type(config.env)
    for name, setting in settings_of(options).items():
        what, written = setting.field.metadata.get("of_tasks"), settings.origins.get(("env", name))
        if what is None or written is None or written.value.file not in others:
            continue
        value = settings.get(("env", name))
        if value in (None, {}):
            continue
        place = written.value.file
        key = f"env.{name}"
        beside = "on the command line" if origin.value.file == COMMAND_LINE else "beside them"
        where = f"env: {place.rpartition('env/')[2].removesuffix('.yaml')}" if place in composed.entries else place
        message = f"{key} = {show(value)} was written for {_names(others[place])} ({where}), not for {_names(tasks)}"
        remedy = f"write {key}=... {beside}, with what holds for these tasks (if the same holds, that)"
        yield Inherited(OfTasks(what), ConfigIssue((TASKS,), message, remedy, origin.value))


def _names(tasks: Any) -> str:
    return f"[{', '.join(map(str, tasks))}]" if isinstance(tasks, list) else show(tasks)
