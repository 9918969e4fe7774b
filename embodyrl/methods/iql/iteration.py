"""The iteration of implicit Q-learning as a list of stages. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from embodyrl.config.schema import Config
from embodyrl.methods.iql.config import IQLConfig
from embodyrl.methods.replay.iteration import COLLECT, REMEMBER
from embodyrl.pipelines.pipeline import Iteration, Stage


def iql(config: Config) -> list[Stage]:
    """Implicit Q-learning: offline, then with rollouts (Kostrikov et al. 2021)."""
    assert isinstance(config.algorithm, IQLConfig), "its registration says so"
    offline = config.algorithm.off_policy.offline_iterations

    def is_offline(iteration: Iteration) -> bool:
        return iteration.number <= offline

    def is_online(iteration: Iteration) -> bool:
        return not is_offline(iteration)

    alone = Stage("offline", "improve_offline", when=is_offline)
    if not config.algorithm.needs(config).rollouts:
        return [alone]
    return [
        *([alone] if offline else []),
        replace(COLLECT, when=is_online),
        replace(REMEMBER, when=is_online),
        Stage("improve", "improve", reads=("demonstrations",), when=is_online),
    ]
