"""embodyrl: post-train vision-language-action models with reinforcement learning in robot simulators, from one YAML."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from embodyrl.version import __version__

if TYPE_CHECKING:
    from embodyrl import envs, models
    from embodyrl.api import (
        ConfigSource,
        Run,
        Sweep,
        check,
        compare,
        evaluate,
        load_config,
        load_policy,
        make_envs,
        resume,
        resume_sweep,
        robustness,
        serve,
        sweep,
        train,
        verify,
    )
    from embodyrl.config import ConfigError
    from embodyrl.envs import EpisodeSpec, Observation
    from embodyrl.envs.manager import StepResult
    from embodyrl.errors import RunError, UserError
    from embodyrl.models.remote.client import RemotePolicy
    from embodyrl.runner.callbacks import Callback
    from embodyrl.runner.evaluation import Evaluation
    from embodyrl.runner.playing import Envs, LoadedPolicy
    from embodyrl.runner.vector import GymnasiumEnvs
    from embodyrl.serving.server import PolicyServer

_HOMES = {
    **dict.fromkeys(
        (
            "ConfigSource",
            "Run",
            "Sweep",
            "check",
            "compare",
            "evaluate",
            "load_config",
            "load_policy",
            "make_envs",
            "resume",
            "resume_sweep",
            "robustness",
            "serve",
            "sweep",
            "train",
            "verify",
        ),
        "api",
    ),
    "ConfigError": "config",
    **dict.fromkeys(("EpisodeSpec", "Observation"), "envs"),
    "StepResult": "envs.manager",
    **dict.fromkeys(("RunError", "UserError"), "errors"),
    "Callback": "runner.callbacks",
    "Evaluation": "runner.evaluation",
    **dict.fromkeys(("Envs", "LoadedPolicy"), "runner.playing"),
    "GymnasiumEnvs": "runner.vector",
    "PolicyServer": "serving.server",
    "RemotePolicy": "models.remote.client",
}
"""Where each name is defined."""

__all__ = [
    "Callback",
    "ConfigError",
    "ConfigSource",
    "Envs",
    "EpisodeSpec",
    "Evaluation",
    "GymnasiumEnvs",
    "LoadedPolicy",
    "Observation",
    "PolicyServer",
    "RemotePolicy",
    "Run",
    "RunError",
    "StepResult",
    "Sweep",
    "UserError",
    "__version__",
    "check",
    "compare",
    "envs",
    "evaluate",
    "load_config",
    "load_policy",
    "make_envs",
    "models",
    "resume",
    "resume_sweep",
    "robustness",
    "serve",
    "sweep",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import embodyrl` costs nothing and commands import what they need alone."""
    if name in ("envs", "models"):
        return importlib.import_module(f"embodyrl.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"embodyrl.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """For completion in notebooks."""
    return sorted({*globals(), *__all__})
