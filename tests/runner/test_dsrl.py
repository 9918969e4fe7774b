"""Runs that steer a frozen pi0 through its noise: killed and resumed, on one rank and two, evaluated and exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import Run, kill_after

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
pytest.importorskip("pygame", reason="needs gymnasium[classic-control]")

from embodyrl.cli import train
from embodyrl.config import ConfigError, load_config
from embodyrl.models import load_policy
from embodyrl.models.flow.steering import SteeredPolicy
from embodyrl.planning.planner import Limits, Planner
from embodyrl.runner.checkpoint import verify
from embodyrl.runner.export import export

BASE = """
defaults: [env: gym/pendulum_rgb, model: pi0, algorithm: ppo, _self_]
env: {num_envs: 2, workers: 1, max_episode_steps: 8, image_size: [32, 32]}
model: {denoising_steps: 2, value_sizes: [8], scratch: {image_size: 32, layers: 1}}
rollout: {num_chunks: 2, chunk_size: 2}
algorithm: {minibatches: 1, epochs: 1}
run: {iterations: 1, eval_every: 0}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
"""
STEERED = """
defaults: [env: gym/pendulum_rgb, model: pi0, algorithm: dsrl, _self_]
env: {num_envs: 4, workers: 2, max_episode_steps: 10, image_size: [32, 32], success_return: -70.0}
model: {denoising_steps: 2, value_sizes: [8]}
rollout: {num_chunks: 6, chunk_size: 2, blocks: 2}
algorithm:
  reward: dense
  off_policy:
    replay: {capacity: 120, start_after: 40}
    updates_per_step: 0.5
    actor_every: 2
    batch_size: 32
    critics: {count: 3, subset: 2, hidden_sizes: [16]}
    steering: {rows: 1, hidden_sizes: [16]}
run: {name: steered, iterations: 6, save_every: 2, eval_every: 3}
eval: {episodes: 3}
tracking: {sinks: [jsonl], report: false}
"""
"""Episodes (5 chunks) straddle rollouts (6), and the replay wraps."""
POLICY = "checkpoints/last/policy"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a pi0 with random weights."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "base.yaml").write_text(BASE)
    assert train.run(load_config(str(folder / "base.yaml"), [f"run.dir={folder / 'run'}"])) == 0
    return folder / "run" / POLICY


@pytest.fixture
def dsrl(tmp_path: Path, base: Path) -> Callable[..., Run]:
    """Train: dsrl("name", "key=value", ...)."""
    (tmp_path / "my.yaml").write_text(STEERED)

    def run(name: str, *overrides: str) -> Run:
        words = [f"model.checkpoint={base}", f"run.dir={tmp_path / name}", *overrides]
        assert train.run(load_config(str(tmp_path / "my.yaml"), words)) == 0
        return Run(tmp_path / name)

    return run


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_run_goes_on_bit_for_bit_and_is_used_in_every_way(
    dsrl: Callable[..., Run], base: Path, tmp_path: Path
) -> None:
    whole, killed = dsrl("whole"), tmp_path / "killed"
    rows = whole.metrics()
    assert "train/updates" not in rows[1] and rows[-1]["train/updates"] == int(0.5 * 24 * 5)
    assert 60 < rows[-1]["replay/decisions"] <= 120
    words = ["-m", "embodyrl", "run", str(tmp_path / "my.yaml"), f"model.checkpoint={base}", f"run.dir={killed}"]
    kill_after(killed / "checkpoints" / "000002", words)
    assert train.resume(killed, []) == 0
    again = Run(killed)
    assert again.metrics() == rows
    # The files of the replay are cut otherwise: after a resume the first is whole.
    for name in ("policy/steering.safetensors", "trainer/engine.safetensors"):
        assert again.digest(6, name) == whole.digest(6, name)
    first, last = (
        load_file(whole.path / "checkpoints" / each / "policy" / "steering.safetensors")
        for each in ("000002", "000006")
    )
    assert not torch.equal(first["steering.actor.0.weight"], last["steering.actor.0.weight"])
    assert torch.equal(first["steering.normalizer.mean"], last["steering.normalizer.mean"])

    weights = "model.safetensors"
    assert (whole.path / POLICY / weights).read_bytes() == (base / weights).read_bytes()
    assert (killed / POLICY / weights).read_bytes() == (base / weights).read_bytes()
    [moments, *_] = (whole.path / "checkpoints/last/trainer/replay").glob("*.safetensors")
    columns = load_file(moments)
    assert columns["features"].dtype is torch.float16 and columns["noise"].shape[1:] == (1, 1)
    assert not {"images", "actions", "proprio"} & columns.keys()

    assert train.evaluate(str(whole.path), []) == 0
    checkpoint = whole.path / "checkpoints" / "000006"
    config = load_config(str(checkpoint / "config.yaml"))
    assert "loaded again as a policy" in export(checkpoint, config, tmp_path / "exported")
    assert verify(checkpoint).iteration == 6
    policy = load_policy("pi0", checkpoint=tmp_path / "exported")
    assert isinstance(policy, SteeredPolicy) and policy.has_begun
    assert torch.equal(policy.steering.actor[0].weight, last["steering.actor.0.weight"])


@pytest.mark.timeout(300)
def test_one_rank_and_two_learn_the_same(dsrl: Callable[..., Run]) -> None:
    one, two = dsrl("one", "run.iterations=4"), dsrl("two", "run.iterations=4", "engine.parallel.world_size=2")
    name = f"{POLICY}/steering.safetensors"
    wanted, found = load_file(one.path / name), load_file(two.path / name)
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, atol=1e-4, rtol=1e-4)
    for row, other in zip(one.metrics(), two.metrics(), strict=True):
        assert other == pytest.approx(row, rel=1e-3, abs=1e-4)


def test_what_does_not_fit_the_checkpoint_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(STEERED)

    def faults(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(str(tmp_path / "my.yaml"), [f"model.checkpoint={base}", *words])
        return str(caught.value)

    assert "steering.rows = 3, but the checkpoint denoises 2 actions together" in faults(
        "algorithm.off_policy.steering.rows=3"
    )
    # One number of noise: a uniform distribution of it has log 2.
    entropy = "algorithm.off_policy.temperature.target_entropy=0.7"
    assert "which no distribution of 1 number in -1 .. 1 reaches" in faults(entropy)
    load_config(
        str(tmp_path / "my.yaml"), [f"model.checkpoint={base}", entropy, "algorithm.off_policy.steering.rows=2"]
    )
    steered = tmp_path / "steered"
    steered.mkdir()
    for path in base.iterdir():
        (steered / path.name).write_bytes(path.read_bytes())
    description = json.loads((base / "policy.json").read_text())
    saved = {"limit": 1.5, "rows": 1, "hidden_sizes": [8]}
    (steered / "policy.json").write_text(json.dumps(description | {"steering": saved}))
    assert "steering.hidden_sizes = [16], but the checkpoint was saved with [8]" in faults(
        f"model.checkpoint={steered}"
    )
    (tmp_path / "base.yaml").write_text(BASE)
    with pytest.raises(
        ConfigError, match=r"holds a policy that is steered through its noise .* algorithm 'ppo' would change"
    ):
        load_config(str(tmp_path / "base.yaml"), [f"model.checkpoint={steered}"])


def test_plans_know_that_nothing_large_learns(base: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(STEERED)
    loaded = load_config(str(tmp_path / "my.yaml"), [f"model.checkpoint={base}", "model.prompt_length=20"])
    plan = Planner(Limits(cuda=True, gpu=None, host=None), 1, None).plan(loaded.config)
    policy = load_policy("pi0", checkpoint=base)
    size = 64 + 2 * 1 + 1  # expert's width, velocities, noise
    assert plan["model"]["trainable"] == (size - 1 + 1) * 16 + (16 + 1) * 2
    assert plan["model"]["parameters"] == sum(each.numel() for each in policy.parameters()) + plan["model"]["trainable"]
    gpu, host = plan["needs"]["gpu"]["train"], plan["needs"]["host"]["both"]
    assert gpu.get("optimiser", 0.0) + gpu.get("gradients", 0.0) < 0.05 < gpu["weights"]
    row = 2 * (size - 1) + 4 * 1 + 2 * 4 + 2 + 3
    assert host["replay"] == round(120 * row / 2**20, 2)
