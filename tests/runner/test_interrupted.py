"""A run that is stopped by a signal, and then goes on, equals one that never was, bit for bit, on each simulator."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_runs import Run, assert_same_run, resumed

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import NoOpenGLError
from embodyrl.registry import SIMULATORS, SupportedModel
from embodyrl.rollout.collector import Collector, Rollout

STATES = [
    *(
        "env.num_envs=2",
        "env.workers=1",
        "env.max_episode_steps=20",
        "rollout.num_chunks=12",
        "algorithm.minibatches=2",
    ),
    *("algorithm.epochs=2", "model.hidden_sizes=[16]", "eval.episodes=2", "run.eval_every=2", "run.save_every=0"),
    *("run.iterations=4", "tracking.sinks=[jsonl]", "tracking.report=false", "engine.optimizer.schedule=linear"),
]
"""Episodes (20 steps) straddle rollouts (12), and the learning rate falls."""

TINY_OFT = """\
defaults: [env: metaworld/faucets, model: openvla_oft, algorithm: dapo, _self_]
run: {iterations: 4, eval_every: 2, save_every: 0}
env: {num_envs: 4, workers: 1, max_episode_steps: 8}
eval: {episodes: 2}
rollout: {num_chunks: 4, chunk_size: 2, episodes: whole, group_size: 2}
algorithm:
  reward: dense
  filter: {metric: total_reward}
  loss: decoupled_ppo
  kl_coef: 0.1
  minibatches: 2
  epochs: 1
engine: {optimizer: {schedule: linear}}
tracking: {sinks: [jsonl], report: false}
"""


def needs(registry_entry: str, name: str) -> pytest.MarkDecorator:
    entry = {"simulator": SIMULATORS, "model": SupportedModel}[registry_entry].entry(name)
    return pytest.mark.skipif(bool(entry.missing()), reason=f"{name} is not installed")


def can_draw() -> bool:
    try:
        rendering.context(16, 16).free()
    except (NoOpenGLError, ImportError):
        return False
    return True


@contextmanager
def signal_in_collection(number: signal.Signals, collection: int) -> Iterator[None]:
    """Send this process a signal when it begins to collect for the `collection`-th time, amid an iteration."""
    collect, count = Collector.collect, 0

    def counted(self: Collector, *arguments: Any) -> Rollout:
        nonlocal count
        count += 1
        if count == collection:
            os.kill(os.getpid(), number)
        return collect(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "collect", counted)
        yield


def run_twice(tmp_path: Path, source: str, overrides: list[str], collection: int) -> None:
    """Once as it is, and once with a SIGTERM in the midst of an iteration, after which it goes on."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train.run(load_config(source, [*overrides, f"run.dir={whole}"])) == 0
    with signal_in_collection(signal.SIGTERM, collection):
        assert train.run(load_config(source, [*overrides, f"run.dir={parted}"])) == 143
    stopped = Run(parted).summary["iterations"]
    assert 0 < stopped < 4, "the signal came too early or too late"
    assert (parted / "checkpoints" / "last").resolve().name == f"{stopped:06d}"
    assert_same_run(Run(whole), resumed(parted), 4)


@pytest.mark.slow
@needs("simulator", "metaworld")
def test_on_metaworld(tmp_path: Path) -> None:
    run_twice(tmp_path, "experiment/metaworld_reach", STATES, 2)


@pytest.mark.slow
@needs("simulator", "maniskill")
def test_on_maniskill(tmp_path: Path) -> None:
    run_twice(tmp_path, "experiment/maniskill_push_cube", STATES, 2)


@pytest.mark.slow
@needs("simulator", "metaworld")
@needs("model", "openvla_oft")
def test_tiny_oft_on_images_with_a_reference(tmp_path: Path) -> None:
    if not can_draw():
        pytest.skip("MuJoCo cannot render here")
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY_OFT)
    run_twice(tmp_path, str(config), [], 2)
    assert Run(tmp_path / "whole").merged()[4]["train/reference_kl"] > 0
