"""The iteration of RECAP, a round, as a list of stages. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from embodyrl.config.schema import Config
from embodyrl.methods.replay.iteration import COLLECT, REMEMBER
from embodyrl.pipelines.pipeline import Iteration, Stage


def recap(config: Config) -> list[Stage]:
    """Collect, judge all that is known, and learn it, told what was better; the first round learns from demonstrations
    alone, if there are any (Physical Intelligence 2025)."""
    recorded = config.data.path is not None

    def collects(iteration: Iteration) -> bool:
        return iteration.number > recorded

    learn = Stage("round", "judge_and_learn", reads=("demonstrations",) if recorded else ())
    if not config.algorithm.needs(config).rollouts:
        return [learn]
    return [*(replace(stage, when=collects) for stage in (COLLECT, REMEMBER)), learn]
