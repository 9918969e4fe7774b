"""Rollout workers play what the ranks themselves would play, bit for bit, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from slow import rest_slow
from small_runs import Run, kill_after

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.registry import SIMULATORS, SupportedModel

PENDULUM = """
defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]
env: {num_envs: 8, workers: auto, max_episode_steps: 12}
rollout: {chunk_size: 2, num_chunks: 5, blocks: 4}
algorithm: {epochs: 2, minibatches: 2}
engine: {threads: 1}
run: {name: apart, iterations: 3, save_every: 1, eval_every: 1}
eval: {episodes: 5}
tracking: {sinks: [jsonl], report: false}
"""
SIZES = [f"model.scratch.{size}" for size in ("image_size=32", "hidden_size=32", "layers=1", "mlp_size=48")]
WHOLE = ["rollout.episodes=whole", "rollout.num_chunks=6", "rollout.episodes_per_slot=2", "rollout.schedule=pipeline"]
CASES = {
    "continuous": [],
    "metaworld": ["env=metaworld/reach", "env.max_episode_steps=12", *WHOLE, "eval.sample=true"],
    "images": ["env=gym/pendulum_rgb", "env.max_episode_steps=12", "model=openvla_oft", *SIZES, "engine.lora.rank=4"],
}
NEEDS = {"metaworld": (SIMULATORS, "metaworld"), "images": (SupportedModel, "openvla_oft")}


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Run]:
    """Train in this process: begin("name", "key=value", ...)."""
    (tmp_path / "my.yaml").write_text(PENDULUM)

    def run(name: str, *overrides: str) -> Run:
        path = tmp_path / name
        assert train.run(load_config(str(tmp_path / "my.yaml"), [f"run.dir={path}", *overrides])) == 0
        return Run(path)

    return run


def workers(count: int) -> str:
    return f"placement.rollout.workers={count}"


def outcome(run: Run) -> tuple[object, ...]:
    """Metrics and final weights."""
    weights = sorted((run.path / "checkpoints" / "last" / "policy").glob("*.safetensors"))
    rows = [{key: row[key] for key in row if not key.startswith("traffic/")} for row in run.metrics()]
    return rows, [path.read_bytes() for path in weights]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", rest_slow(["continuous", "images", "metaworld"], 2))
def test_workers_give_the_metrics_and_weights_of_the_ranks_themselves(case: str, begin: Callable[..., Run]) -> None:
    registry, name = NEEDS.get(case, (SupportedModel, "mlp"))
    if registry.entry(name).missing():  # type: ignore[attr-defined]
        pytest.skip(f"{name} is not installed")
    together = outcome(begin("together", *CASES[case]))
    for count in (1, 2) if case == "continuous" else (2,):
        assert outcome(begin(f"apart_{count}", *CASES[case], workers(count))) == together


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_with_shards_learn_from_workers_what_they_learn_from_themselves(begin: Callable[..., Run]) -> None:
    if SupportedModel.entry("openvla_oft").missing():
        pytest.skip("openvla_oft is not installed")
    ranks = ["engine.parallel.world_size=2", "engine.parallel.backend=fsdp", *CASES["images"]]
    together = outcome(begin("together", *ranks))
    assert outcome(begin("apart", *ranks, workers(1))) == together


@pytest.mark.timeout(300)
def test_a_run_that_was_killed_goes_on_with_fewer_workers_to_the_same_weights(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    settings = ["run.iterations=6", "run.eval_every=2"]
    whole = outcome(begin("whole", *settings))
    path = tmp_path / "killed"
    words = ["-m", "embodyrl", "run", str(tmp_path / "my.yaml"), *settings, workers(2), f"run.dir={path}"]
    kill_after(path / "checkpoints" / "000003", words)
    assert train.resume(path, [workers(1)]) == 0
    assert outcome(Run(path))[1] == whole[1]
