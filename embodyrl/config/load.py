"""Loads a config file with command-line overrides as the frozen config, or reports all of its faults."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import embodyrl.config.algorithm_rules  # the module adds its rules
import embodyrl.config.perturbation_rules  # this one, too
import embodyrl.config.placement_rules  # this one, too
import embodyrl.config.plugin_rules  # noqa: F401  # this one, too
from embodyrl.config.build import build_draft, count_settings, with_values
from embodyrl.config.check import check_settings
from embodyrl.config.compose import Composed, Settings, components, compose
from embodyrl.config.fields import settings_of
from embodyrl.config.files import Source, find_source, read_document
from embodyrl.config.interpolation import resolve_interpolations
from embodyrl.config.issues import (
    COMMAND_LINE,
    ConfigError,
    ConfigIssue,
    KeyPath,
    MissingDependency,
    dotted,
    in_reading_order,
)
from embodyrl.config.mending import apply_fix, mend, paste
from embodyrl.config.mix import expand_mix
from embodyrl.config.overrides import Override, Overrides, apply_override, parse_overrides
from embodyrl.config.plugins import (
    NAME_CODE,
    Saved,
    UntrustedError,
    claims,
    ended_by_code,
    import_plugins,
    named_modules,
    read_saved,
)
from embodyrl.config.renames import convert_saved, of_other_methods
from embodyrl.config.rules import ConfigUse, Rule, check_rules, hub_names, placed, rollout_notes, simulator_runs_here
from embodyrl.config.schema import Config, OfTasks
from embodyrl.config.values import Interpolation, show
from embodyrl.hub import HubError, HubName, cached, describe, fetch


@dataclass(frozen=True)
class LoadedConfig:
    """A config without faults, and its origin."""

    config: Config
    source: str
    """Name of its source in messages: a path, or `experiment/metaworld_reach`."""
    values: int
    """Number of single settings."""
    path: Path | None
    """The file; None for a built-in experiment."""
    plugin_dir: Path
    """Folder that was searched for plug-ins, besides the installed packages."""
    notes: tuple[str, ...] = ()
    """Remarks that are no faults."""
    environment: Mapping[KeyPath, tuple[str, Any]] = field(default_factory=dict)
    """Settings read from environment variables, which may be secrets: the text in the config, and its value."""
    from_hub: Mapping[KeyPath, FromHub] = field(default_factory=dict)
    """Settings whose folders in `config` are those of the hub's cache."""
    left_open: Mapping[KeyPath, Any] = field(default_factory=dict)
    """Settings that have been chosen for this machine (`choosing`), as the config has them."""

    def choosing(self, values: Mapping[KeyPath, Any]) -> LoadedConfig:
        """Return the config with values for settings that it leaves to the program; `written` has them as before, so
        that a run that is resumed elsewhere chooses anew."""
        before = {path: operator.attrgetter(dotted(path))(self.config) for path in values}
        config = with_values(self.config, values)
        return dataclasses.replace(self, config=config, left_open={**before, **self.left_open})

    @cached_property
    def written(self) -> Config:
        """The config for files and screens: without the values of environment variables, and with the commits on the
        hub in place of folders in its cache."""
        texts: dict[KeyPath, Any] = dict(self.left_open)
        texts |= {path: Interpolation(text) for path, (text, _) in self.environment.items()}
        texts |= {path: str(each.commit) for path, each in self.from_hub.items()}
        return cast(Config, with_values(self.config, texts))

    def hide(self, text: str) -> str:
        """Return a text in which the values of environment variables are hidden, and folders of the hub's cache have
        their names on the hub."""
        for each in self.from_hub.values():
            text = text.replace(str(each.folder), str(each.commit))
        return _hide(text, self.environment)

    def hub_notes(self) -> list[str]:
        """Return for each setting with a name on the hub what is in the cache and what a run would download. Asks the
        hub.

        Raises:
            HubError: it has no such repository or revision, or gives no access to it.
        """
        names = {path: each.name for path, each in self.from_hub.items()} | hub_names(self.config)
        return [f"{dotted(path)}: {describe(name)}" for path, name in names.items()]


@dataclass(frozen=True)
class FromHub:
    """Origin of a folder in the hub's cache."""

    name: HubName
    """As the config names it."""
    folder: Path

    @property
    def commit(self) -> HubName:
        """The name with the commit in place of a branch or tag."""
        return self.name.at(self.folder)


def _hide(text: str, environment: Mapping[KeyPath, tuple[str, Any]]) -> str:
    found = sorted(((value, shown) for shown, value in environment.values() if isinstance(value, str) and value))
    for value, shown in reversed(found):
        text = text.replace(value, shown)
    return text


def load_config(
    source: str | Path | Source | None,
    overrides: Sequence[str] = (),
    *,
    plugin_dir: Path | None = None,
    use: ConfigUse = ConfigUse.check,
    not_needed: Sequence[KeyPath] = (),
    also: Sequence[Rule] = (),
    model: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> LoadedConfig:
    """Load and check a config. No code is run except the plug-ins it names.

    Args:
        source: a YAML file, the name of a built-in experiment, None for the default experiment, or a file that has been
            found.
        overrides: `key=value` from the command line.
        plugin_dir: folder of plug-ins; by default that of the file (for built-in configs the working directory, for
            a saved config the folder of the run's plug-ins).
        use: purpose of the config, which decides whether open values and missing packages are faults.
        not_needed: settings whose faults are ignored, because the command does not use them.
        also: rules besides those of `use`.
        model: options of a model that acts in place of the config's own, with its `name`.
        trust: import the plug-ins of a saved config even if another user or another machine made it.

    Raises:
        ConfigError: with every fault.
        UntrustedError: a saved config of someone else would run code, without `trust`.
    """
    found = source if isinstance(source, Source) else find_source(source, plugin_dir)
    if isinstance(found, ConfigIssue):
        raise ConfigError([found])
    saved = None if found.is_builtin else read_saved(found.path)
    if saved is not None and plugin_dir is None:
        found = dataclasses.replace(found, plugin_dir=saved.plugin_dir)
    main = read_document(found.path, found.file)
    asked = parse_overrides(overrides, found.has_group)

    def finish(fix: Mapping[KeyPath, Any]) -> tuple[Composed, _Finished]:
        composed = compose(found, main, asked.groups)
        if not composed.readable:
            raise ConfigError(in_reading_order([*asked.faults, *composed.faults], composed.files))
        try:
            return composed, _finish(composed, asked, found, use, saved, trust, fix, also, model)
        except SystemExit as error:
            raise ConfigError([ended_by_code(error, composed.settings, found.plugin_dir)]) from error

    def of_use(finished: _Finished) -> list[ConfigIssue]:
        hidden = (replace(fault, message=_hide(fault.message, finished.environment)) for fault in finished.faults)
        return [fault for fault in hidden if fault.path not in not_needed]

    composed, finished = finish({})
    faults = of_use(finished)
    config, notes, environment, from_hub = finished.config, finished.notes, finished.environment, finished.from_hub
    if any(fault.fix for fault in faults):
        mended, more = mend(faults, lambda fix: of_use(finish(fix)[1]))
        lines = paste(mended, [*faults, *more], composed)
        raise ConfigError(in_reading_order([*faults, *more], composed.files), lines)
    if not faults and use in (ConfigUse.run, ConfigUse.play):
        config, fetched, faults = _fetch(config, composed, not_needed, use)
        from_hub |= fetched
    if faults:
        raise ConfigError(in_reading_order(faults, composed.files))
    path = None if found.is_builtin else found.path
    count = count_settings(config)
    return LoadedConfig(config, found.label, count, path, found.plugin_dir, tuple(notes), environment, from_hub)


@dataclass(frozen=True)
class _Finished:
    """A config, all of its faults, notes, the settings read from the environment, and what is in the hub's cache."""

    config: Config
    faults: list[ConfigIssue]
    notes: list[str]
    environment: dict[KeyPath, tuple[str, Any]]
    from_hub: dict[KeyPath, FromHub]


def _finish(
    composed: Composed,
    asked: Overrides,
    source: Source,
    use: ConfigUse,
    saved: Saved | None,
    trust: bool,
    fix: Mapping[KeyPath, Any],
    also: Sequence[Rule],
    model: Mapping[str, Any] | None,
) -> _Finished:
    """Apply overrides, plug-ins and interpolations, and check the result.

    A saved config that names code or environment variables must be this user's own, unless `trust` is set. It may be of
    an earlier version. Last come the values of `fix`, in the places of those that they fix.
    """
    settings = composed.settings
    doubts = None if saved is None or trust else saved.doubts(claims(settings.data))
    code = [override for override in asked.values if override.path in NAME_CODE]
    others = [override for override in asked.values if override.path not in NAME_CODE]
    others.sort(key=lambda override: not _chooses(override))  # choosing a component resets its options: choose first
    faults = [*composed.faults, *asked.faults, *_apply(settings, code)]
    if doubts is not None:
        modules = ", ".join(dict.fromkeys(name for _, name in named_modules(settings)))
        where = [f"{modules} (in {str(source.plugin_dir)!r})"] if modules else []
        _refuse(source, doubts, "run the Python code of", where, "that code")
    failed = import_plugins(settings, source.plugin_dir)
    faults += failed
    if saved is not None:
        convert_saved(settings, Config)
    left_out = of_other_methods(settings, Config) if "algorithm" in asked.groups else []
    for path in left_out:
        settings.take(path)
    if model is not None:
        settings.exchange("model", model)
    faults += _apply(settings, others)
    apply_fix(settings, fix, composed.whole)
    faults += (unmixed := expand_mix(settings, source.folders))
    # What a simulator that was not found would have said is not missing besides.
    incomplete = composed.incomplete | ({"env"} if unmixed else set())
    resolved = resolve_interpolations(settings, Config, may_read=doubts is None)
    if doubts is not None:
        texts = [f"{dotted(path)} = {text}" for path, text in resolved.environment.items()]
        _refuse(source, doubts, "read environment variables for", texts, "it")
    faults += resolved.faults
    environment = {path: (text, settings.get(path)) for path, text in resolved.environment.items()}
    faults += check_settings(settings, Config, composed.whole, incomplete, all_imported=not failed)
    config, doubtful = build_draft(settings.data, {fault.path for fault in faults}, incomplete)
    from_hub = _in_cache(config, use)
    config = with_values(config, {path: str(each.folder) for path, each in from_hub.items()})
    faults += check_rules(config, composed, doubtful, use, also)
    inherited = [] if use is ConfigUse.show else list(inherited_values(config, composed))
    faults += [each.fault for each in inherited if each.what is OfTasks.fault]
    notes = [f"{each.fault.message}: {each.fault.hint}" for each in inherited if each.what is OfTasks.note]
    notes += [*rollout_notes(config), *config.algorithm.notes(config)]
    if left_out:
        names = ", ".join(map(dotted, left_out))
        notes.append(f"left out, because algorithm {config.algorithm.name!r} has no such settings: {names}")
    if use is ConfigUse.elsewhere:
        lacking = [each for each in faults if isinstance(each, MissingDependency)]
        faults = [each for each in faults if each not in lacking]
        notes += [f"unchecked until the run: {each.message}" for each in lacking]
        notes += [f"unchecked until the run: {each.message}" for each in simulator_runs_here(config)]
    return _Finished(config, faults, notes, environment, from_hub)


def _in_cache(config: Config, use: ConfigUse) -> dict[KeyPath, FromHub]:
    """Return what the config names on the hub and is in its cache, by setting. The hub is not asked, so for a run only
    commits count: a branch may have moved on."""
    if use not in (ConfigUse.run, ConfigUse.play, ConfigUse.check):
        return {}
    names = {path: name for path, name in hub_names(config).items() if use is ConfigUse.check or name.is_pinned}
    folders = {path: (name, cached(name)) for path, name in names.items()}
    return {path: FromHub(name, folder) for path, (name, folder) in folders.items() if folder is not None}


def _fetch(
    config: Config, composed: Composed, not_needed: Sequence[KeyPath], use: ConfigUse
) -> tuple[Config, dict[KeyPath, FromHub], list[ConfigIssue]]:
    """Download what the config names on the hub, and check the config against it; returns the config with folders,
    their origins, and faults."""
    from_hub = {}
    for path, name in hub_names(config).items():
        try:
            if path not in not_needed:
                from_hub[path] = FromHub(name, fetch(name))
        except HubError as error:
            issue = ConfigIssue((path,), f"{dotted(path)}: {error.message}", error.remedy)
            return config, from_hub, [placed(issue, composed)]
    config = with_values(config, {path: str(each.folder) for path, each in from_hub.items()})
    faults = check_rules(config, composed, set(), use) if from_hub else []
    return config, from_hub, [fault for fault in faults if fault.path not in not_needed]


def _refuse(source: Source, doubts: str, does: str, what: Sequence[str], which: str) -> None:
    """Raise if a config that is not trusted names any of `what`."""
    if what:
        raise UntrustedError(
            f"{source.label} {doubts}, and it would {does} {', '.join(what)}: read {which}, and if you trust it, say "
            "so with --trust (in Python trust=True)"
        )


def _chooses(override: Override) -> bool:
    """Return whether an override chooses a component, as `algorithm.loss=gspo` does."""
    path = override.path
    return path in components() or (path[-1] == "name" and path[:-1] in components())


def _apply(settings: Settings, overrides: Sequence[Override]) -> list[ConfigIssue]:
    """Apply overrides to the settings; returns the faults of those that are illegal."""
    faults = (apply_override(settings, override, Config) for override in overrides)
    return [fault for fault in faults if fault is not None]


# A group file, an experiment or a saved config names tasks together with values that hold only for these tasks, such as
# the return that counts as success. With other tasks these values must be set again.
TASKS: KeyPath = ("env", "tasks")


@dataclass(frozen=True)
class Inherited:
    """A value that was written for other tasks than those of the config."""

    what: OfTasks
    """Severity."""
    fault: ConfigIssue
    """The fault or note to report."""


def inherited_values(config: Config, composed: Composed) -> Iterator[Inherited]:
    """Find the values of `env` that were written together with other tasks than those of the config."""
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
