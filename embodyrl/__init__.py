"""embodyrl: post-train vision-language-action models with reinforcement learning in robot simulators, from one YAML."""

from __future__ import annotations

import importlib
from types import ModuleType

from embodyrl.version import __version__

__all__ = ["__version__", "envs", "models"]


def __getattr__(name: str) -> ModuleType:
    """Import `embodyrl.envs` and `embodyrl.models` on first use: most commands need neither."""
    if name in ("envs", "models"):
        return importlib.import_module(f"embodyrl.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
