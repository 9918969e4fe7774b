"""What the first lines of a run say about its processes."""

from __future__ import annotations

import pytest

from embodyrl.config import load_config
from embodyrl.runner.session import placement

ON_CPU = ["engine.device=cpu", "env.num_envs=32", "env.workers=8"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "8 simulator processes; "),
        (["engine.parallel.world_size=8"], "8 ranks, each with 4 envs in 1 simulator process; "),
        (
            ["placement.rollout.workers=1"],
            "1 rollout worker with 32 envs in 8 simulator processes; learning in 1 rank",
        ),
        (
            ["placement.rollout.workers=2", "engine.parallel.world_size=3"],
            "2 rollout workers, each with 16 envs in 4 simulator processes; learning in 3 ranks; ",
        ),
    ],
)
def test_it_names_ranks_rollout_workers_and_simulators(words: list[str], said: str) -> None:
    assert placement(load_config("experiment/gym_pendulum", [*ON_CPU, *words]).config).startswith(said)
