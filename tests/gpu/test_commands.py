"""Whole commands on a stand-in for a CUDA device (tests/gpu/standin), in processes of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import cases
import numpy as np
import programs
import pytest
from slow import rest_slow

from embodyrl.registry import SIMULATORS, SupportedModel

HERE = Path(__file__).parent
BENCHMARK = HERE.parents[1] / "benchmarks" / "gpu.py"
QUIET = ["tracking.sinks=[jsonl]", "tracking.report=false"]
SHORT = [
    *("env.num_envs=4", "env.workers=1", "env.max_episode_steps=20", "rollout.num_chunks=8", "algorithm.epochs=2"),
    *("algorithm.minibatches=2", "run.iterations=2", "run.eval_every=2", "eval.episodes=4", *QUIET),
]


def under(family: str, folder: Path, *words: str) -> str:
    """Output of a program that has the stand-in."""
    command = [HERE / "under.py", family, *words]
    done = programs.run(command, preload=cases.modules([family]), cwd=folder, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics without times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "memory/")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]


def embodyrl_on_gpu(family: str, folder: Path, *words: str) -> str:
    """Output of a command on the stand-in."""
    (folder / "command.py").write_text("from embodyrl.cli.main import main\nmain()\n")
    said = under(family, folder, "command.py", *words)
    assert not re.search("[Ww]arning", said), f"decisions are CUDA graphs: {said}"
    return said


def on_both(words: list[str], folder: Path, tolerance: float, family: str = "mlp") -> list[dict[str, Any]]:
    """Run a config on the CPU and on the stand-in; returns its metrics, which must be the same."""
    command = ["-m", "embodyrl", "run", *words, "run.dir=cpu", "engine.device=cpu"]
    here = programs.run(command, preload=cases.modules([family]), cwd=folder)
    assert here.returncode == 0, here.stderr
    said = embodyrl_on_gpu(family, folder, "run", *words, "run.dir=gpu", "engine.device=cuda")
    assert "policy on cuda" in said
    found, wanted = metrics(folder / "gpu"), metrics(folder / "cpu")
    assert [row.keys() for row in found] == [row.keys() for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        assert row == pytest.approx(other, rel=tolerance, abs=tolerance / 100)
    return wanted


@pytest.mark.skipif(bool(SIMULATORS.entry("metaworld").missing()), reason="metaworld is not installed")
def test_the_main_job_has_the_cpus_metrics_and_is_evaluated(standin: None, tmp_path: Path) -> None:
    rows = on_both(["experiment/metaworld_reach", *SHORT], tmp_path, 1e-4)
    assert len(rows) == 3
    evaluated = embodyrl_on_gpu("mlp", tmp_path, "eval", "gpu", "eval.episodes=4")
    assert f"return {rows[-1]['eval/return']:.2f}" in evaluated


SAC = [
    *("env.num_envs=4", "env.workers=1", "env.max_episode_steps=20", "rollout.num_chunks=8"),
    *("algorithm.off_policy.replay.start_after=60", "algorithm.off_policy.batch_size=32", "run.iterations=4"),
    *("algorithm.off_policy.critics.count=3", "run.eval_every=4", "eval.episodes=4", *QUIET),
]


def test_learning_from_a_replay_has_the_cpus_metrics(standin: None, tmp_path: Path) -> None:
    rows = on_both(["experiment/gym_pendulum_sac", *SAC], tmp_path, 1e-3)
    assert rows[-1]["train/updates"] == 3 * 32 and len(rows) == 5


PIXELS = [
    *("env=gym/pendulum_rgb", "env.image_size=[32,32]", "env.max_episode_steps=10", "eval.episodes=2"),
    *("model=cnn", "model.encoder=drq", "model.channels=[4,4]", "model.strides=[2,2]", "model.hidden_sizes=[16]"),
    *("model.image_features=8", "algorithm.off_policy.augment_pixels=2"),
]


@pytest.mark.slow
@pytest.mark.skipif(bool(SupportedModel.entry("cnn").missing()), reason="needs the extra vla")
def test_learning_from_a_replay_of_images_has_the_cpus_metrics(standin: None, tmp_path: Path) -> None:
    words = ["experiment/gym_pendulum_sac", *SAC, *PIXELS, "model.head=squashed"]
    rows = on_both(words, tmp_path, 1e-3, "cnn")
    assert rows[-1]["train/updates"] == 3 * 32 and len(rows) == 5


WORTH = """
defaults: [env: gym/pendulum, model: mlp, algorithm: iql, _self_]
env: {num_envs: 4, workers: 1, max_episode_steps: 10}
rollout: {num_chunks: 8}
data: {path: shown, steps: 6}
algorithm:
  reward: dense
  off_policy: {replay: {start_after: 32}, batch_size: 32, offline_iterations: 2}
run: {name: worth, iterations: 3, eval_every: 3}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
"""


@pytest.mark.parametrize("sees", rest_slow(["states", "images"]))
def test_learning_by_worth_has_the_cpus_metrics(sees: str, standin: None, tmp_path: Path) -> None:
    """The policy learns by its own loss, and critics look for themselves."""
    if sees == "images" and SupportedModel.entry("cnn").missing():
        pytest.skip("needs the extra vla")
    pytest.importorskip("pyarrow", reason="needs the extra data")
    from embodyrl.data.layout import DatasetSpec, Episode
    from embodyrl.data.writer import DatasetWriter

    draw = np.random.default_rng(0)
    spec = DatasetSpec(
        action_names=("torque",), state_dim=3, fps=20, outcome=True, cameras=("render",), image_size=(32, 32)
    )
    with DatasetWriter(tmp_path / "shown", spec) as writer:
        for _ in range(3):
            writer.add(
                Episode(
                    task="control Pendulum",
                    proprio=draw.normal(size=(20, 3)).astype(np.float32),
                    images=draw.integers(0, 256, (20, 1, 32, 32, 3), dtype=np.uint8),
                    actions=draw.uniform(-2, 2, (20, 1)).astype(np.float32),
                    rewards=draw.normal(size=20).astype(np.float32),
                    success=np.zeros(20, np.bool_),
                )
            )
    (tmp_path / "my.yaml").write_text(WORTH)
    more, family = (PIXELS, "cnn") if sees == "images" else ([], "mlp")
    # Of a loss of differences between values that are nearly the same.
    rows = on_both(["my.yaml", *more], tmp_path, 1e-2, family)
    assert rows[1]["train/weight"] > 0 and rows[-1]["train/updates"] == 2 * 6 + 32


MEASURE = f"""
import argparse, pathlib, sys
sys.path.insert(0, {str(BENCHMARK.parent)!r})
import gpu
for name in sys.argv[1:]:
    gpu.run_group(
        name,
        argparse.Namespace(
            model="openvla_oft", scale="tiny", device="cuda", work=pathlib.Path("."), rows_to=f"{{name}}.jsonl"
        ),
    )
"""


@pytest.mark.skipif(bool(SupportedModel.entry("openvla_oft").missing()), reason="needs the extra vla")
@pytest.mark.parametrize(
    "groups", [["peak", "decide", "offload", "sync"], pytest.param(["learn"], marks=pytest.mark.slow)]
)
def test_what_a_gpu_is_measured_by_runs_on_it(standin: None, tmp_path: Path, groups: list[str]) -> None:
    (tmp_path / "measure.py").write_text(MEASURE)
    under("openvla_oft", tmp_path, "measure.py", *groups)
    for group in groups:
        rows = [json.loads(line) for line in (tmp_path / f"{group}.jsonl").read_text().splitlines()]
        assert rows and not any("failed" in row or row.get("warning") for row in rows), rows


STANDIN_HERE = f"""
import sys

if not sys.argv[1].startswith(("env", "zygote")):  # simulators need no GPU
    sys.path.insert(0, {str(HERE)!r})
    import cases

    cases.load_families(["mlp"])
    from standin.device import gpu

    until_the_end = gpu()
    until_the_end.__enter__()
"""
WITH_WORKERS = """
defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]
plugins: [standin_here]
rollout: {blocks: 2, mode: sync}
engine: {device: cuda}
run: {name: gpu}
"""


@pytest.mark.slow
def test_rollout_workers_share_the_gpu_of_the_rank(standin: None, tmp_path: Path) -> None:
    """Weights go from the GPU through shared memory to the workers' GPU, and what is learned stays the same."""
    (tmp_path / "standin_here.py").write_text(STANDIN_HERE)
    (tmp_path / "my.yaml").write_text(WITH_WORKERS)
    weights = []
    for workers in ("{workers: 0}", "{workers: 2, share_gpus: true}"):
        words = [
            "run",
            "my.yaml",
            *SHORT,
            "env.workers=2",
            f"run.dir=run{len(weights)}",
            f"placement.rollout={workers}",
        ]
        done = programs.run(["-m", "embodyrl", *words], cwd=tmp_path, timeout=280)
        assert done.returncode == 0 and "policy on cuda" in done.stdout, done.stdout + done.stderr
        path = tmp_path / f"run{len(weights)}"
        weights.append((path / "checkpoints" / "last" / "policy" / "model.safetensors").read_bytes())
        assert metrics(path) == metrics(tmp_path / "run0")
    assert weights[0] == weights[1]
