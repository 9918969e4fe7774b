"""Runs that learn from a replay: killed and resumed, on one rank and two, and with offloaded simulators."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import Run, kill_after

from embodyrl.cli import train
from embodyrl.config import ConfigError, load_config
from embodyrl.runner.checkpoint import DamageError, digest, verify

SMALL = """
defaults: [env: gym/pendulum, model: mlp, algorithm: sac, _self_]
env: {num_envs: 4, workers: 2, max_episode_steps: 40}
model: {head: squashed, hidden_sizes: [16]}
rollout: {num_chunks: 12, blocks: 2}
algorithm:
  off_policy:
    replay: {capacity: 200, start_after: 90}
    updates_per_step: 0.4
    actor_every: 2
    batch_size: 32
    critics: {count: 3, hidden_sizes: [16]}
run: {name: small-sac, iterations: 8, save_every: 3, eval_every: 4}
eval: {episodes: 5}
tracking: {sinks: [jsonl], report: false}
"""
"""Episodes (40 steps) straddle rollouts (12), the replay wraps, and steps are owed in fractions."""

WEIGHTS = "checkpoints/last/policy/model.safetensors"


@pytest.fixture
def sac(tmp_path: Path) -> Callable[..., Run]:
    """Train: sac("name", "key=value", ...)."""
    (tmp_path / "my.yaml").write_text(SMALL)

    def run(name: str, *overrides: str) -> Run:
        assert train.run(load_config(str(tmp_path / "my.yaml"), [f"run.dir={tmp_path / name}", *overrides])) == 0
        return Run(tmp_path / name)

    return run


def states(run: Run, iteration: int) -> dict[str, str]:
    """Hashes of a checkpoint's weights and trainer state, without the files that hold times and links."""
    manifest = json.loads((run.path / "checkpoints" / f"{iteration:06d}" / "manifest.json").read_text())
    return {
        name: facts["sha256"]
        for name, facts in manifest["files"].items()
        if name.startswith(("policy/", "trainer/")) and name != "trainer/counters.json"
    }


@pytest.mark.faults
def test_a_run_that_is_killed_goes_on_bit_for_bit_replay_included(sac: Callable[..., Run], tmp_path: Path) -> None:
    whole = sac("whole")
    killed = tmp_path / "killed"
    words = ["-m", "embodyrl", "run", str(tmp_path / "my.yaml"), f"run.dir={killed}"]
    kill_after(killed / "checkpoints" / "000003", words)
    assert train.resume(killed, []) == 0
    again = Run(killed)
    assert again.metrics() == whole.metrics()
    # The files of the replay are cut otherwise: after a resume the first is whole.
    found, wanted = (
        {name: sha for name, sha in states(run, 8).items() if "/replay/" not in name} for run in (again, whole)
    )
    assert found == wanted and "trainer/engine.safetensors" in wanted
    rows = [row for row in whole.metrics() if "train/critic_loss" in row]
    assert rows[-1]["replay/decisions"] > 150 and rows[-1]["train/updates"] == int(0.4 * 48 * 7)


def test_nothing_is_learned_and_actions_are_random_until_there_is_enough(sac: Callable[..., Run]) -> None:
    run = sac("run", "run.iterations=3", "run.eval_every=1")
    first, second, third = run.metrics()[1:]
    assert "train/updates" not in first, "48 decisions of the 90"
    assert second["train/updates"] == int(0.4 * 48) and third["train/updates"] == int(0.4 * 96)
    assert first["eval/return"] == run.metrics()[0]["eval/return"], "the policy is as it was"
    other = sac("other", "run.iterations=1", "model.log_std_init=-4.0")
    assert other.metrics()[1]["rollout/reward_per_step"] == first["rollout/reward_per_step"]


@pytest.mark.timeout(300)
def test_one_rank_and_two_learn_the_same_weights_also_after_a_resume(sac: Callable[..., Run], tmp_path: Path) -> None:
    two = "engine.parallel.world_size=2"
    one, both, half = sac("one"), sac("two", two), sac("half", two, "run.iterations=4")
    assert train.resume(half.path, ["run.iterations=8", "engine.parallel.world_size=1"]) == 0
    wanted = load_file(one.path / WEIGHTS)
    for run in (both, Run(half.path)):
        found = load_file(run.path / WEIGHTS)
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4)
    for row, other in zip(one.metrics(), both.metrics(), strict=True):
        assert other == pytest.approx(row, rel=1e-3, abs=1e-4)


def test_simulators_may_end_while_it_learns_and_evaluation_adds_nothing(sac: Callable[..., Run]) -> None:
    plain, offloaded = sac("plain"), sac("offloaded", "env.offload=true")
    often = sac("often", "run.eval_every=1")
    weights = [load_file(run.path / WEIGHTS) for run in (plain, offloaded, often)]
    for name, tensor in weights[0].items():
        assert torch.equal(weights[1][name], tensor) and torch.equal(weights[2][name], tensor)
    assert offloaded.metrics()[-1]["memory/simulators_freed_mib"] > 0
    assert often.metrics()[-1]["replay/decisions"] == plain.metrics()[-1]["replay/decisions"]


def test_a_replay_on_the_disk_gives_the_same_numbers_and_leaves_nothing(sac: Callable[..., Run]) -> None:
    memory = sac("memory", "run.iterations=4", "algorithm.off_policy.replay.capacity=60000")
    settings = ["algorithm.off_policy.replay.capacity=60000", "algorithm.off_policy.replay.memory_mib=1"]
    disk = sac("disk", "run.iterations=4", *settings)
    assert states(memory, 4) == states(disk, 4)
    log = (disk.path / "run.log").read_text()
    assert re.search(r"replay: room for 60,000 chunks, 1\.\d MiB in the run's folder; learning begins after 90", log)
    assert sorted(path.name for path in disk.path.iterdir()) == sorted(path.name for path in memory.path.iterdir())


def test_a_saved_policy_is_evaluated_and_starts_another_run(sac: Callable[..., Run], tmp_path: Path) -> None:
    run = sac("run", "run.iterations=4")
    assert train.evaluate(str(run.path), []) == 0
    again = sac("again", "run.iterations=1", f"model.checkpoint={run.path / 'checkpoints/last/policy'}")
    assert again.metrics()[0]["eval/return"] == run.metrics()[-1]["eval/return"]


@pytest.mark.parametrize("background", ["false", "true"])
def test_checkpoints_share_what_they_have_in_common(sac: Callable[..., Run], tmp_path: Path, background: str) -> None:
    settings = ["run.save_every=2", "algorithm.off_policy.replay.capacity=2000", f"run.save_async={background}"]
    run = sac("run", *settings)
    files = sorted((run.path / "checkpoints" / "000008" / "trainer" / "replay").glob("*.safetensors"))
    assert [file.stat().st_nlink for file in files] == [4, 3, 2, 1]
    shutil.rmtree(run.path / "checkpoints" / "000002")
    shutil.copytree(run.path / "checkpoints" / "000008", tmp_path / "elsewhere")
    assert train.evaluate(str(tmp_path / "elsewhere"), []) == 0
    # One that was removed while the run went on: the next is whole.
    few = sac("few", *settings, "run.keep_last=1", "run.iterations=6")
    assert train.resume(few.path, ["run.iterations=8"]) == 0
    assert few.metrics()[-1] == run.metrics()[-1]
    [kept] = (each for each in (few.path / "checkpoints").iterdir() if not each.is_symlink())
    assert all(file.stat().st_nlink == 1 for file in kept.rglob("*.safetensors")) and verify(kept).iteration == 8


def test_a_replay_of_another_run_is_refused_with_what_to_do(sac: Callable[..., Run]) -> None:
    """The manifest was written anew as well, so that no file counts as damaged."""
    short = ["run.iterations=1", "run.eval_every=0"]
    run, other = sac("run", *short), sac("other", *short, "env.num_envs=2")
    place = (run.path / "checkpoints" / "last").resolve()
    shutil.rmtree(place / "trainer" / "replay")
    shutil.copytree(other.path / "checkpoints" / "last" / "trainer" / "replay", place / "trainer" / "replay")
    manifest = json.loads((place / "manifest.json").read_text())
    for name, facts in manifest["files"].items():
        if "/replay/" in name:
            facts |= {"size": (place / name).stat().st_size, "sha256": digest(place / name)}
    (place / "manifest.json").write_text(json.dumps(manifest))
    message = (
        "trainer/replay: the replay is that of another run: it has 2 slots, this run has 4: put back what this run"
    )
    with pytest.raises(DamageError, match=message):
        train.resume(run.path, ["run.iterations=2"])


def test_the_screen_shows_the_replay_and_what_goes_wrong(sac: Callable[..., Run], tmp_path: Path) -> None:
    hopeless = [
        *("env.success_return=1000.0", "algorithm.reward=success", "run.iterations=30", "run.eval_every=0"),
        *("algorithm.off_policy.temperature.initial=100.0", "algorithm.off_policy.temperature.lr=1e-9"),
        *("algorithm.off_policy.updates_per_step=3", "algorithm.off_policy.temperature.in_target=false"),
    ]
    log = (sac("hopeless", *hopeless).path / "run.log").read_text()
    warned = re.findall(r"warning: (.*)", log)
    assert len([line for line in warned if line.startswith("no episode of 2")]) == 1, warned
    assert len([line for line in warned if "the policy is still as good as random" in line]) == 1, warned
    steps = ["algorithm.gamma=0.1", "algorithm.off_policy.critics.layer_norm=false", "engine.optimizer.critic_lr=5.0"]
    wild = (sac("wild", *steps, "engine.optimizer.max_grad_norm=1000.0").path / "run.log").read_text()
    assert len(re.findall("warning: the critics value an action at .* for ever", wild)) == 1
    assert not [line for line in (sac("plain").path / "run.log").read_text().splitlines() if "warning" in line]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["algorithm.off_policy.replay.capacity=900000000000"],
            r"the replay takes [\d,]+ MiB on the disk of .* are free",
        ),
        (["algorithm=ppo"], r"unknown key 'algorithm.off_policy'"),
        (["data.path=nowhere"], "data.path has no use: algorithm 'sac' learns from rollouts"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("metaworld_reach_sac", [f"run.dir={tmp_path / 'run'}", *words])


def test_validate_says_how_large_the_replay_gets() -> None:
    [note] = load_config("metaworld_reach_sac", []).notes
    assert note == "the replay of 20,000 chunks takes up to 3.4 MiB in memory"
