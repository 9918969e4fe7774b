"""A run that is stopped by a signal or killed, and then goes on, equals one that never was: bit for bit."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import programs
import pytest
from interrupted import assert_same_run, metrics_of, signal_in_collection
from slow import rest_slow
from small_runs import SMALL, Run

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import NoOpenGLError
from embodyrl.registry import SIMULATORS, SupportedModel

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


def run_twice(tmp_path: Path, source: str, overrides: list[str], collection: int) -> None:
    """Once as it is, and once with a SIGTERM in the midst of an iteration, after which it goes on."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train.run(load_config(source, [*overrides, f"run.dir={whole}"])) == 0
    with signal_in_collection(signal.SIGTERM, collection):
        assert train.run(load_config(source, [*overrides, f"run.dir={parted}"])) == 143
    stopped = Run(parted).summary["iterations"]
    assert 0 < stopped < 4, "the signal came too early or too late"
    assert (parted / "checkpoints" / "last").resolve().name == f"{stopped:06d}"
    assert train.resume(parted, []) == 0
    assert_same_run(whole, parted, 4)


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
    assert metrics_of(tmp_path / "whole")[4]["train/reference_kl"] > 0


KILLED = [
    "run.iterations=12",
    "run.save_every=2",
    "rollout.num_chunks=96",
    "eval.episodes=2",
    "algorithm.minibatches=4",
]


def killed(path: Path, *overrides: str) -> None:
    """A run in a process of its own that is killed with SIGKILL after its third iteration and first checkpoint, or a
    little later."""
    words = ["-m", "embodyrl", "run", "experiment/gym_pendulum", *SMALL, *KILLED, *overrides, f"run.dir={path}"]
    process = programs.Program(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    metrics, last = path / "metrics.jsonl", path / "checkpoints" / "last"
    while not last.exists() or not metrics.exists() or len(metrics.read_text().splitlines()) < 4:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed"


@pytest.mark.faults
@pytest.mark.parametrize("saving", rest_slow(["run.save_async=true", "run.save_async=false"]))
def test_killed_between_two_checkpoints(tmp_path: Path, small_run: Callable[..., Run], saving: str) -> None:
    path = tmp_path / "killed"
    killed(path, saving)
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"iteration": 5, "train/lo')  # as if the kill had come amid a line
    assert train.resume(path, []) == 0
    assert_same_run(small_run("whole", *KILLED).path, path, 12)
