"""From a config file and command-line overrides to the frozen config, or to all of its faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import embodyrl.config.algorithm_rules
import embodyrl.config.engine_rules  # noqa: F401 - both add their rules
from embodyrl.config.build import build_draft, count_settings
from embodyrl.config.check import check_settings
from embodyrl.config.compose import Composed, Settings, compose
from embodyrl.config.faults import ConfigError, Fault, KeyPath, in_reading_order
from embodyrl.config.interpolation import resolve_interpolations
from embodyrl.config.marks import read_document
from embodyrl.config.overrides import Override, Overrides, apply_override, parse_overrides
from embodyrl.config.plugins import NAME_CODE, import_plugins
from embodyrl.config.rules import Use, check_rules
from embodyrl.config.schema import Config
from embodyrl.config.sources import Source, find_source


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


def load_config(
    source: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    plugin_dir: Path | None = None,
    use: Use = Use.check,
    not_needed: Sequence[KeyPath] = (),
) -> LoadedConfig:
    """Load and check a config; nothing but the plug-ins it names is run.

    Args:
        source: a YAML file, the name of a built-in experiment, or None for the default experiment.
        overrides: `key=value` from the command line.
        plugin_dir: where to look for plug-ins; by default the file's folder (the working directory for built-in ones).
        use: what for; decides about what is missing.
        not_needed: settings that name what the command has no use for, so that it need not be there.

    Raises:
        ConfigError: with every fault.
    """
    found = find_source(source, plugin_dir)
    if isinstance(found, Fault):
        raise ConfigError([found])
    main = read_document(found.path, found.file)
    asked = parse_overrides(overrides, found.has_group)
    composed = compose(found, main, asked.groups)
    if not composed.readable:
        raise ConfigError(in_reading_order([*asked.faults, *composed.faults], composed.files))
    config, faults = _finish(composed, asked, found, use)
    faults = [fault for fault in faults if fault.path not in not_needed]
    if faults:
        raise ConfigError(in_reading_order(faults, composed.files))
    path = None if found.is_builtin else found.path
    return LoadedConfig(config, found.label, count_settings(config), path, found.plugin_dir)


def _finish(composed: Composed, asked: Overrides, source: Source, use: Use) -> tuple[Config, list[Fault]]:
    """Bring the settings into their final form and check them; returns the config and all faults."""
    settings = composed.settings
    code = [override for override in asked.values if override.path in NAME_CODE]
    others = [override for override in asked.values if override.path not in NAME_CODE]
    faults = [*composed.faults, *asked.faults, *_apply(settings, code)]
    faults += import_plugins(settings, source.plugin_dir)
    faults += _apply(settings, others)
    faults += resolve_interpolations(settings, Config)
    faults += check_settings(settings, Config, composed.whole, composed.incomplete)
    doubtful = {fault.path for fault in faults} | {(name,) for name in composed.incomplete}
    config, doubtful = build_draft(settings.data, doubtful)
    return config, faults + check_rules(config, composed, doubtful, use)


def _apply(settings: Settings, overrides: Sequence[Override]) -> list[Fault]:
    """Lay command-line values over the settings; returns those that cannot be."""
    faults = (apply_override(settings, override, Config) for override in overrides)
    return [fault for fault in faults if fault is not None]
