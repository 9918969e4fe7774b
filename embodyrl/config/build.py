"""Between plain data and the frozen config objects, both ways."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from embodyrl.config.faults import KeyPath
from embodyrl.config.fields import class_at, registry_of, settings_of
from embodyrl.config.schema import Config


def build_config(data: Mapping[str, Any]) -> Config:
    """The frozen config for checked plain data; `env` and `model` get the options class of what they name."""
    base = OmegaConf.structured(Config)
    _unlock(base)
    for name, setting in settings_of(Config).items():
        if setting.section is not None and registry_of(setting.section) is not None:
            base[name] = OmegaConf.structured(class_at(setting.section, data[name]))
            _unlock(base[name])
    merged = OmegaConf.merge(base, _escape(dict(data)))
    return cast(Config, OmegaConf.to_object(merged))


def build_section(section: type, data: Mapping[str, Any]) -> Any:
    """The frozen options of one section for checked plain data."""
    base = OmegaConf.structured(class_at(section, data))
    _unlock(base)
    return OmegaConf.to_object(OmegaConf.merge(base, _escape(dict(data))))


def build_draft(data: Mapping[str, Any], doubtful: set[KeyPath]) -> tuple[Config, set[KeyPath]]:
    """A config from data with faults, for looking at the rest of it.

    Args:
        data: composed settings.
        doubtful: settings and sections that are wrong.

    Returns:
        The config, and every path in it whose value stands for one that is wrong or missing.
    """
    doubtful = set(doubtful)
    return build_config(_salvage(Config, data, (), doubtful)), doubtful


def _salvage(section: type, data: Any, path: KeyPath, doubtful: set[KeyPath]) -> dict[str, Any]:
    """The settings of a section that can be used, and stand-ins for required ones; adds the stand-ins to `doubtful`."""
    given = data if isinstance(data, dict) else {}
    usable: dict[str, Any] = {}
    for name, setting in settings_of(class_at(section, given)).items():
        here = (*path, name)
        is_sound = not any(bad[: len(here)] == here for bad in doubtful)
        if setting.section is not None and not (setting.nullable and given.get(name) is None):
            usable[name] = _salvage(setting.section, given.get(name), here, doubtful)
        elif name in given and (is_sound or (setting.kinds == (str,) and isinstance(given[name], str))):
            usable[name] = given[name]
        elif setting.required:
            usable[name] = _STAND_INS.get(setting.kinds[0], [])
            doubtful.add(here)
    return usable


_STAND_INS: dict[Any, Any] = {str: "", int: 1, float: 1.0, bool: False}


def _unlock(node: DictConfig) -> None:
    """Make a tree of frozen dataclasses writable until it becomes objects again."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            _unlock(node[key])


def _escape(value: Any) -> Any:
    """Text as it is: interpolations have been resolved, so what still looks like one is meant literally."""
    if isinstance(value, dict):
        return {key: _escape(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_escape(child) for child in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def to_plain(config: Any) -> dict[str, Any]:
    """The config as mappings, lists and single values, in the schema's order."""
    return {field.name: _to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def differences(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that differ between two configs by their full name, with both values; None where there is none."""
    old, new = _flat(to_plain(before), ""), _flat(to_plain(after), "")
    names = dict.fromkeys([*old, *new])
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def _flat(section: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {key: _to_plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(child) for child in value]
    return value


def count_settings(config: Any) -> int:
    """How many single settings the config has."""
    values = (getattr(config, field.name) for field in dataclasses.fields(config))
    return sum(count_settings(value) if dataclasses.is_dataclass(value) else 1 for value in values)


def config_hash(config: Config) -> str:
    """SHA-256 of what the run computes: every setting except where it writes (`run.dir`)."""
    plain = to_plain(config)
    del plain["run"]["dir"]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
