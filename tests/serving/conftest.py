"""A small policy that is served, and clients that know nothing but the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import embodyrl

TINY = [
    *("env.num_envs=2", "env.workers=1", "rollout.num_chunks=4", "rollout.chunk_size=3", "algorithm.minibatches=1"),
    *("run.iterations=1", "run.eval_every=0", "tracking.sinks=[jsonl]", "tracking.report=false"),
]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a policy of three numbers, which decides three actions at once."""
    path = tmp_path_factory.mktemp("served") / "run"
    embodyrl.train("gym_pendulum", [*TINY, f"run.dir={path}"])
    return path


@pytest.fixture(scope="session")
def policy(run: Path) -> embodyrl.LoadedPolicy:
    """The same policy, loaded."""
    return embodyrl.load_policy(run)


@pytest.fixture
def server(policy: embodyrl.LoadedPolicy) -> Iterator[Callable[..., embodyrl.PolicyServer]]:
    """Starts servers of it, and ends them."""
    begun: list[embodyrl.PolicyServer] = []

    def start(**options: Any) -> embodyrl.PolicyServer:
        begun.append(embodyrl.serve(policy, **{"port": 0, **options}).__enter__())
        return begun[-1]

    yield start
    for each in begun:
        each.close()
