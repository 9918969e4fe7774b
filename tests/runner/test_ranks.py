"""Runs of two ranks: they go on where they were, also with more or fewer ranks, and learn what one rank learns."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, THREE_OF_FOUR, Run

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.registry import SupportedModel

sys.path.append(str(Path(__file__).parents[1] / "data"))  # where `demonstrations` is

TWO = "engine.parallel.world_size=2"
TOLERANCE = {"rel": 1e-4, "abs": 1e-5}
"""Sums are in another order, and rounding grows over some hundred optimiser steps."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Train: small("name", "key=value", ...), saving at iteration 2 of 4."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, *overrides: str) -> Run:
        settings = [*SMALL, "run.iterations=4", "run.save_every=2", f"run.dir={folder / name}", *overrides]
        assert train.run(load_config("experiment/gym_pendulum", settings)) == 0
        return Run(folder / name)

    return run


def cut(run: Run, name: str) -> Path:
    """A copy of a run as it was when it had saved at iteration 2."""
    path = run.path.with_name(name)
    shutil.copytree(run.path, path, symlinks=True)
    checkpoints = path / "checkpoints"
    shutil.rmtree(checkpoints / "000004")
    (checkpoints / "last").unlink()
    (checkpoints / "last").symlink_to("000002")
    return path


@pytest.fixture(scope="module")
def two(small: Callable[..., Run]) -> Run:
    """Reinforcement learning on two ranks, without interruption."""
    return small("two", TWO)


def test_two_ranks_go_on_bit_for_bit(two: Run) -> None:
    path = cut(two, "again")
    assert train.resume(path, []) == 0
    again = Run(path)
    assert again.metrics() == two.metrics() and len(two.metrics()) == 5
    manifest = json.loads((two.path / "checkpoints" / "000004" / "manifest.json").read_text())
    states = [name for name in manifest["files"] if name.startswith(("policy/", "trainer/"))]
    assert "trainer/simulators/slot_0003.bin" in states
    for name in set(states) - {"trainer/counters.json"}:  # which hold times
        assert two.digest(4, name) == again.digest(4, name), name


def test_two_ranks_play_the_episodes_that_one_would(two: Run, small: Callable[..., Run]) -> None:
    one = small("one", "run.iterations=1")
    first, wanted = two.metrics()[0], one.metrics()[0]
    assert first["eval/return"] == pytest.approx(wanted["eval/return"], rel=1e-6) and first["eval/episodes"] == 5
    assert two.metrics()[1]["env/steps"] == one.metrics()[1]["env/steps"] == 4 * 24
    assert sorted(path.name for path in (two.path / "workers").glob("**/*env*.log")) == ["env-0.log", "env-0.log"]
    assert two.summary["env_steps"] == 4 * 4 * 24
    assert "2 ranks, each with 2 envs in 1 simulator process;" in (two.path / "run.log").read_text()


def test_imitation_has_the_same_curve_on_one_rank_and_two_and_when_their_number_changes(
    small: Callable[..., Run], tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    from demonstrations import write_pendulum

    write_pendulum(tmp_path / "demos")
    settings = ["algorithm=sft", f"data.path={tmp_path / 'demos'}", "data.batch_size=31", "data.steps=5"]
    one, both = small("sft_one", *settings), small("sft_two", *settings, TWO)
    assert one.metrics()[-1]["train/loss"] < 0.9 * one.metrics()[1]["train/loss"]
    alike(one, both)
    fewer, more = cut(both, "sft_fewer"), cut(one, "sft_more")
    assert train.resume(fewer, ["engine.parallel.world_size=1"]) == 0
    assert train.resume(more, [TWO, "engine.parallel.backend=none"]) == 0
    alike(one, Run(fewer))
    alike(one, Run(more))


def alike(one: Run, other: Run) -> None:
    for row, wanted in zip(other.metrics(), one.metrics(), strict=True):
        assert row == pytest.approx(wanted, **TOLERANCE)
    found, wanted = (load_file(run.path / "checkpoints/000004/policy/model.safetensors") for run in (other, one))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-4, rtol=1e-4)


PIXELS = """
defaults: [env: gym/pendulum_rgb, model: cnn, algorithm: ppo, _self_]
env: {num_envs: 4, workers: auto, max_episode_steps: 6, image_size: [32, 32], frames: 2}
model: {encoder: test_resnet, image_features: 16, hidden_sizes: [16]}
rollout: {chunk_size: 2, num_chunks: 6, blocks: 2}
algorithm: {epochs: 2, minibatches: 2}
engine: {threads: 1}
run: {name: pixels, iterations: 2, save_every: 0, eval_every: 0}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(SupportedModel.entry("cnn").missing()), reason="timm is not installed")
def test_a_cnn_learns_from_frames_the_same_weights_on_one_rank_and_two(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(PIXELS)
    weights = []
    for name, words in {"one": [], "two": [TWO]}.items():
        assert train.run(load_config(str(tmp_path / "my.yaml"), [f"run.dir={tmp_path / name}", *words])) == 0
        weights.append(load_file(tmp_path / name / "checkpoints/last/policy/model.safetensors"))
    one, two = weights
    assert one["features.encoders.0.backbone.conv1.0.weight"].shape[1] == 6
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, atol=2e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


IMAGES = """
defaults: [env: gym/pendulum_rgb, model: openvla_oft, algorithm: dapo, _self_]
plugins: [three_of_four]
env: {num_envs: 8, workers: 2, max_episode_steps: 6}
rollout: {episodes: whole, chunk_size: 2, num_chunks: 3, group_size: 2}
algorithm: {reward: dense, filter: three_of_four, epochs: 2, minibatches: 3, kl_coef: 0.1}
engine: {micro_batch_size: 3, optimizer: {schedule: constant}}
model: {scratch: {image_size: 32, hidden_size: 32, layers: 1, mlp_size: 48}}
run: {name: images, iterations: 3, save_every: 1, eval_every: 0}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
"""


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.skipif(bool(SupportedModel.entry("openvla_oft").missing()), reason="openvla_oft is not installed")
def test_images_that_wait_with_their_group_outlast_a_checkpoint(tmp_path: Path) -> None:
    """Groups that one iteration leaves over are learned from in the next; their images lie with both ranks."""
    (tmp_path / "three_of_four.py").write_text(THREE_OF_FOUR)
    (tmp_path / "my.yaml").write_text(IMAGES)
    assert train.run(load_config(str(tmp_path / "my.yaml"), [TWO, f"run.dir={tmp_path / 'whole'}"], trust=True)) == 0
    whole = Run(tmp_path / "whole")
    rows = whole.metrics()[-3:]
    assert [row["filter/groups_waiting"] for row in rows] == [2, 1, 0] and all(row["train/grad_norm"] for row in rows)
    # Two epochs and the reference policy: this rank reads half of 24 chunks of 12 KiB, some of them its own.
    assert all(0 < 1024 * row["traffic/fetched_mib"] < 1.1 * 3 * 24 / 2 * 12 for row in rows)

    for name, ranks in (("two", TWO), ("one", "engine.parallel.world_size=1")):
        path = tmp_path / name
        shutil.copytree(whole.path, path, symlinks=True)
        for number in ("000002", "000003"):
            shutil.rmtree(path / "checkpoints" / number)
        (path / "checkpoints" / "last").unlink()
        (path / "checkpoints" / "last").symlink_to("000001")
        assert train.resume(path, [ranks]) == 0
        again = Run(path)
        assert [row["filter/groups_waiting"] for row in again.metrics()[-3:]] == [2, 1, 0]
        names = json.loads((path / "checkpoints" / "000003" / "manifest.json").read_text())["files"]
        weights = [each for each in names if each.startswith("policy/") and each.endswith(".safetensors")]
        assert weights
        if name == "two":
            assert all(again.digest(3, each) == whole.digest(3, each) for each in weights)
