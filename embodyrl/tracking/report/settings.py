"""Settings of runs: differences from the defaults, and from each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodyrl.config.build import flat, inline, plain_value
from embodyrl.config.fields import class_at, settings_of
from embodyrl.config.schema import Config

NO_MATTER = ("seed", "run.", "tracking.", "plugins")
"""Settings, or sections, in which repetitions of an experiment may differ."""


@dataclass(frozen=True)
class Change:
    """A setting that is not at its default."""

    name: str
    value: str
    default: str
    """Empty for settings without one."""


def changes_from_defaults(config: Mapping[str, Any]) -> list[Change]:
    """Return the settings of a plain config that differ from the defaults of the components that it chooses. Of
    components that are not registered here, such as those of plug-ins, which are not imported, all are returned."""
    return list(_changes(Config, config, ""))


def _changes(section: type, data: Mapping[str, Any], prefix: str) -> Iterator[Change]:
    known = settings_of(class_at(section, dict(data)))
    for key, value in data.items():
        setting, name = known.get(key), f"{prefix}{key}"
        if isinstance(value, dict) and setting is not None and setting.section is not None:
            yield from _changes(setting.section, value, f"{name}.")
        elif setting is None or setting.required:
            yield Change(name, inline(value), "")
        elif value != (default := plain_value(setting.default)):
            yield Change(name, inline(value), inline(default))


def experiment_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that make an experiment, by full name: all but those in which its repetitions differ."""
    return {
        name: inline(value)
        for name, value in flat(config).items()
        if not any(name == each or (each.endswith(".") and name.startswith(each)) for each in NO_MATTER)
    }


def names_apart(experiments: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a text for each experiment with the settings in which it differs from others, for instance
    `engine.optimizer.lr=0.001`; empty for a single one."""
    names = dict.fromkeys(name for each in experiments for name in each)
    apart = [name for name in names if len({each.get(name) for each in experiments}) > 1]
    return [", ".join(f"{name}={each[name]}" for name in apart if name in each) for each in experiments]
