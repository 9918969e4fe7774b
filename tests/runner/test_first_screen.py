"""What the first lines of a run say about its processes and its algorithm."""

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


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        (
            "gym_pendulum",
            [
                "run.iterations=1",
                "algorithm.epochs=1",
                "env.num_envs=1",
                "rollout.num_chunks=1",
                "algorithm.minibatches=1",
            ],
            "1 iteration of 1 chunk x 1 env, chunks of 1 action, 1 epoch in minibatches of 1",
        ),
        ("gym_pendulum", ["rollout.chunk_size=2"], "chunks of 2 actions, "),
        ("gym_pendulum_sac", ["algorithm.off_policy.updates_per_step=0.5"], " action, 0.5 updates per chunk"),
        ("gym_pendulum_sac", ["algorithm.off_policy.updates_per_step=1.0"], " action, 1 update per chunk"),
    ],
)
def test_it_counts_in_the_singular_and_in_the_plural(name: str, words: list[str], said: str) -> None:
    config = load_config(f"experiment/{name}", words).config
    assert said in config.algorithm.describe(config)
