"""Iterations of methods that learn from a replay, each as a list of stages. Imports no torch."""

from __future__ import annotations

from embodyrl.config.schema import Config
from embodyrl.pipelines.pipeline import Stage

COLLECT = Stage("rollout", "collect")
REMEMBER = Stage("remember", "remember")


def replayed(config: Config) -> list[Stage]:
    """Collect, remember, and learn from what is remembered (Haarnoja et al. 2018)."""
    return [COLLECT, REMEMBER, Stage("improve", "improve")]


def demonstrated(config: Config) -> list[Stage]:
    """The same, with demonstrations in every minibatch if there are any (Ball et al. 2023, Ross et al. 2011)."""
    shown = () if config.data.path is None else ("demonstrations",)
    return [COLLECT, REMEMBER, Stage("improve", "improve", reads=shown)]
