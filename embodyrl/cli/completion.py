"""What a shell completes: experiments, settings, options of config groups, names of components. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


def config_words(incomplete: str) -> list[str]:
    """Complete a config or KEY=VALUE."""
    return [*_starting(experiments(), incomplete), *override_words(incomplete)]


def override_words(incomplete: str) -> list[str]:
    """Complete KEY=VALUE: keys one level at a time, then values that can be listed."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={each}" for each in _starting(values_of(key), value)]
    return _starting(keys(incomplete), incomplete)


def option_of(group: str) -> Callable[[str], list[str]]:
    """Return a function that completes an option of a config group."""
    return lambda incomplete: _starting(_options(group), incomplete)


def sections(incomplete: str) -> list[str]:
    """Complete a section of `embodyrl list`."""
    from embodyrl.cli.listing import CONFIGS, PROTOCOLS, SECTIONS, TASKS

    return _starting([*SECTIONS, CONFIGS, PROTOCOLS, TASKS], incomplete)


def _starting(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def experiments() -> list[str]:
    """Return the names of the shipped experiments."""
    from embodyrl.config.files import list_experiments

    return [name.partition("/")[2] for name in list_experiments()]


def keys(incomplete: str) -> Iterator[str]:
    """Yield config groups and settings with `=`, and sections with a dot: those of the last section that is named."""
    from embodyrl.config.fields import find_setting, settings_of
    from embodyrl.config.schema import Config

    parents, _, _ = incomplete.rpartition(".")
    section: type | None = Config
    if parents:
        setting, _ = find_setting(Config, {}, tuple(parents.split(".")))
        section = None if setting is None else setting.section
    else:
        yield from (f"{group}=" for group in _groups())
    prefix = f"{parents}." if parents else ""
    for name, setting in settings_of(section).items() if section is not None else ():
        yield f"{prefix}{name}{'=' if setting.section is None else '.'}"


def values_of(key: str) -> Iterable[str]:
    """Return the values of a setting that can be listed: options of a config group, names of components, choices."""
    from embodyrl.config.fields import find_setting
    from embodyrl.config.schema import Config
    from embodyrl.config.values import choices_in

    if key in _groups():
        return _options(key)
    setting, _ = find_setting(Config, {}, tuple(key.split(".")))
    if setting is None:
        return []
    registry = setting.registry
    if registry is not None:
        return [entry.name for entry in registry.entries()]
    switch = ["true", "false"] if bool in setting.kinds else []
    words = setting.field.metadata.get("words") or ()
    return [*switch, *words, *(choice for kind in setting.kinds for choice in choices_in(kind))]


def _groups() -> list[str]:
    from embodyrl.config.files import builtin_folder, list_groups

    return list_groups((builtin_folder(),))


def _options(group: str) -> list[str]:
    from embodyrl.config.files import list_options

    return list_options(group)
