"""Iterations of methods that learn from a replay, each as a list of stages. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from embodyrl.config.schema import Config
from embodyrl.methods.replay.config import ReplayAlgorithmConfig
from embodyrl.pipelines.pipeline import Iteration, Stage

COLLECT = Stage("rollout", "collect")
REMEMBER = Stage("remember", "remember")


def replayed(config: Config) -> list[Stage]:
    """Collect, remember, and learn from what is remembered (Haarnoja et al. 2018)."""
    return [COLLECT, REMEMBER, Stage("improve", "improve")]


def demonstrated(config: Config) -> list[Stage]:
    """The same, with demonstrations in every minibatch if there are any (Ball et al. 2023, Ross et al. 2011)."""
    shown = () if config.data.path is None else ("demonstrations",)
    return [COLLECT, REMEMBER, Stage("improve", "improve", reads=shown)]


def offline_first(config: Config) -> list[Stage]:
    """Learn from demonstrations alone for some iterations, then as `demonstrated`."""
    assert isinstance(config.algorithm, ReplayAlgorithmConfig), "its registration says so"
    offline = config.algorithm.iterations_offline

    def is_offline(iteration: Iteration) -> bool:
        return iteration.number <= offline

    def is_online(iteration: Iteration) -> bool:
        return not is_offline(iteration)

    alone = [Stage("offline", "improve_offline", when=is_offline)] if offline else []
    if not config.algorithm.needs(config).rollouts:
        return alone
    return [*alone, *(replace(stage, when=is_online) for stage in demonstrated(config))]
