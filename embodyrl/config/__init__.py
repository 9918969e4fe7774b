"""The config: schema of every setting, and reading, checking and writing of configs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodyrl.config.build import config_hash, to_commented_yaml, to_plain
    from embodyrl.config.files import list_experiments, list_groups, list_options
    from embodyrl.config.issues import ConfigError, ConfigIssue
    from embodyrl.config.load import LoadedConfig, load_config
    from embodyrl.config.rules import ConfigUse

_HOMES = {
    "ConfigUse": "rules",
    "config_hash": "build",
    "to_plain": "build",
    "to_commented_yaml": "build",
    "ConfigError": "issues",
    "ConfigIssue": "issues",
    "LoadedConfig": "load",
    "load_config": "load",
    "list_experiments": "files",
    "list_groups": "files",
    "list_options": "files",
}

__all__ = [
    "ConfigError",
    "ConfigIssue",
    "ConfigUse",
    "LoadedConfig",
    "config_hash",
    "list_experiments",
    "list_groups",
    "list_options",
    "load_config",
    "to_commented_yaml",
    "to_plain",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a simulator process needs only the schema, not Hydra."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
