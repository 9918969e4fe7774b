"""Runs of two ranks play what one rank plays, and go on with more or fewer ranks; more of it: `test_learners.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from learners import TWO_RANKS, Learner
from small_runs import THREE_OF_FOUR, Runs, assert_alike, assert_same_run, copy_of, resumed

from embodyrl.registry import SupportedModel

sys.path.append(str(Path(__file__).parents[1] / "data"))  # where `demonstrations` is


def test_two_ranks_play_the_episodes_that_one_would(runs_of: Callable[[str], tuple[Learner, Runs]]) -> None:
    _, runs = runs_of("ppo")
    two, one = runs(*TWO_RANKS), runs()
    first, wanted = two.metrics()[0], one.metrics()[0]
    assert first["eval/return"] == pytest.approx(wanted["eval/return"], rel=1e-6) and first["eval/episodes"] == 5
    assert two.metrics()[1]["env/steps"] == one.metrics()[1]["env/steps"] == 4 * 24
    assert sorted(path.name for path in (two.path / "workers").glob("**/*env*.log")) == ["env-0.log", "env-0.log"]
    assert two.summary["env_steps"] == 4 * 4 * 24
    assert "2 ranks, each with 2 envs in 1 simulator process;" in two.log()


def test_imitation_goes_on_with_more_ranks_on_the_same_curve(small_runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from demonstrations import write_pendulum

    write_pendulum(tmp_path / "demos")
    settings = ["algorithm=sft", f"data.path={tmp_path / 'demos'}", "data.batch_size=31", "data.steps=5"]
    shared = [word for word in small_runs.settings if not word.startswith("algorithm.")]
    runs = Runs(tmp_path / "imitation", small_runs.config, shared)
    one = runs.fresh(tmp_path / "one", *settings, "run.iterations=4", "run.save_every=2", "env.workers=2")
    assert one.metrics()[-1]["train/loss"] < 0.9 * one.metrics()[1]["train/loss"]
    more = copy_of(one, tmp_path / "more", 2)
    assert_alike(one, resumed(more, "engine.parallel.world_size=2", "engine.parallel.backend=none"))


IMAGES = """
defaults: [env: gym/pendulum_rgb, model: cnn, algorithm: dapo, _self_]
plugins: [three_of_four]
env: {num_envs: 8, workers: 2, max_episode_steps: 6, image_size: [64, 64]}
rollout: {episodes: whole, chunk_size: 2, num_chunks: 3, group_size: 2}
algorithm: {reward: dense, filter: three_of_four, epochs: 2, minibatches: 3, kl_coef: 0.1}
engine: {micro_batch_size: 3, optimizer: {schedule: constant}}
model: {encoder: drq, channels: [4, 4], strides: [4, 4], image_features: 8, hidden_sizes: [16]}
run: {name: images, iterations: 3, save_every: 1, eval_every: 0}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(SupportedModel.entry("cnn").missing()), reason="timm is not installed")
def test_images_that_wait_with_their_group_outlast_a_checkpoint(tmp_path: Path) -> None:
    """Groups that one iteration leaves over are learned from in the next; their images lie with both ranks."""
    (tmp_path / "three_of_four.py").write_text(THREE_OF_FOUR)
    (tmp_path / "my.yaml").write_text(IMAGES)
    runs = Runs(tmp_path, tmp_path / "my.yaml")
    whole = runs(TWO_RANKS[0])
    rows = whole.metrics()[-3:]
    assert [row["filter/groups_waiting"] for row in rows] == [2, 1, 0] and all(row["train/grad_norm"] for row in rows)
    # Two epochs and the reference policy: this rank reads half of 24 chunks of 12 KiB, some of them its own.
    assert all(0 < 1024 * row["traffic/fetched_mib"] < 1.1 * 3 * 24 / 2 * 12 for row in rows)

    two = resumed(copy_of(whole, tmp_path / "two", 1))
    assert_same_run(whole, two, 3)
    one = resumed(copy_of(whole, tmp_path / "one", 1), "engine.parallel.world_size=1")
    assert [row["filter/groups_waiting"] for row in one.metrics()[-3:]] == [2, 1, 0]
