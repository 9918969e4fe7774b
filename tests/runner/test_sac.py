"""Runs that learn from a replay: on the disk, in checkpoints, and what they say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from learners import Learner
from slow import rest_slow
from small_runs import Runs, assert_same_run, copy_of, resumed

from embodyrl.cli import train
from embodyrl.config import ConfigError, load_config
from embodyrl.pipelines import stages
from embodyrl.runner.checkpoint import DamageError, digest, verify

SHORT = ["run.iterations=1", "run.eval_every=0"]


@pytest.fixture
def sac(runs_of: Callable[[str], tuple[Learner, Runs]]) -> Runs:
    """Runs that tests share, and only read."""
    return runs_of("sac")[1]


def test_nothing_is_learned_and_actions_are_random_until_there_is_enough(sac: Runs) -> None:
    run = sac("run.iterations=3", "run.eval_every=1")
    first, second, third = run.metrics()[1:]
    assert "train/updates" not in first, "48 decisions of the 90"
    assert second["train/updates"] == int(0.4 * 48) and third["train/updates"] == int(0.4 * 96)
    assert first["eval/return"] == run.metrics()[0]["eval/return"], "the policy is as it was"
    other = sac(*SHORT, "model.log_std_init=-4.0")
    assert other.metrics()[0]["rollout/reward_per_step"] == first["rollout/reward_per_step"]


def test_a_replay_on_the_disk_gives_the_same_numbers_and_leaves_nothing(sac: Runs) -> None:
    memory = sac("run.iterations=4", "algorithm.off_policy.replay.capacity=60000")
    disk = sac(
        "run.iterations=4", "algorithm.off_policy.replay.capacity=60000", "algorithm.off_policy.replay.memory_mib=1"
    )
    assert_same_run(memory, disk, 4)
    found = r"replay: room for 60,000 chunks, 1\.\d MiB in the run's folder; learning begins after 90"
    assert re.search(found, disk.log())
    assert sorted(path.name for path in disk.path.iterdir()) == sorted(path.name for path in memory.path.iterdir())


def test_a_saved_policy_is_evaluated_and_starts_another_run(sac: Runs) -> None:
    run = sac()
    assert train.evaluate(str(run.path), []) == 0
    again = sac("run.iterations=1", f"model.checkpoint={run.path / 'checkpoints/last/policy'}")
    assert again.metrics()[0]["eval/return"] == run.metrics()[-1]["eval/return"]


@pytest.mark.parametrize("background", rest_slow(["true", "false"]))
def test_checkpoints_share_what_they_have_in_common(sac: Runs, tmp_path: Path, background: str) -> None:
    settings = ["run.save_every=2", "algorithm.off_policy.replay.capacity=2000", f"run.save_async={background}"]
    run = sac.fresh(tmp_path / "run", *settings)
    files = sorted((run.checkpoint(6) / "trainer" / "replay").glob("*.safetensors"))
    assert [file.stat().st_nlink for file in files] == [3, 2, 1]
    shutil.rmtree(run.checkpoint(2))
    shutil.copytree(run.checkpoint(6), tmp_path / "elsewhere")
    assert verify(tmp_path / "elsewhere").iteration == 6, "it has all that it needs"
    # One that was removed while the run went on: the next is whole.
    few = sac.fresh(tmp_path / "few", *settings, "run.keep_last=1", "run.iterations=4")
    again = resumed(few.path, "run.iterations=6")
    assert again.metrics()[-1] == run.metrics()[-1]
    [kept] = (each for each in (few.path / "checkpoints").iterdir() if not each.is_symlink())
    assert all(file.stat().st_nlink == 1 for file in kept.rglob("*.safetensors")) and verify(kept).iteration == 6


def test_a_replay_of_another_run_is_refused_with_what_to_do(sac: Runs, tmp_path: Path) -> None:
    """The manifest was written anew as well, so that no file counts as damaged."""
    path, other = copy_of(sac(*SHORT), tmp_path / "run"), sac(*SHORT, "env.num_envs=2")
    place = (path / "checkpoints" / "last").resolve()
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
        train.resume(path, ["run.iterations=2"])


def test_the_screen_shows_the_replay_and_what_goes_wrong(sac: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "warning" not in sac().log()
    assert stages.RANDOM_UPDATES >= 1000, "a policy is given time to learn"
    monkeypatch.setattr(stages, "RANDOM_UPDATES", 400)
    hopeless = [
        *("env.success_return=1000.0", "algorithm.reward=success", "run.iterations=9", "run.eval_every=0"),
        *("algorithm.off_policy.temperature.initial=100.0", "algorithm.off_policy.temperature.lr=1e-9"),
        *("algorithm.off_policy.updates_per_step=1.5", "algorithm.off_policy.temperature.in_target=false"),
        "env.max_episode_steps=10",
    ]
    warned = re.findall(r"warning: (.*)", sac(*hopeless).log())
    assert len([line for line in warned if line.startswith("no episode of 2")]) == 1, warned
    assert len([line for line in warned if "the policy is still as good as random" in line]) == 1, warned
    steps = ["algorithm.gamma=0.1", "algorithm.off_policy.critics.layer_norm=false", "engine.optimizer.critic_lr=5.0"]
    wild = sac(*steps, "engine.optimizer.max_grad_norm=1000.0", "run.eval_every=0").log()
    assert len(re.findall("warning: the critics value an action at .* for ever", wild)) == 1


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for words, said in (
        (
            ["algorithm.off_policy.replay.capacity=900000000000"],
            r"the replay takes [\d,]+ MiB on the disk of .* are free",
        ),
        (["algorithm=ppo"], r"unknown key 'algorithm.off_policy'"),
        (["data.path=nowhere"], "data.path has no use: algorithm 'sac' learns from rollouts"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config("metaworld_reach_sac", [f"run.dir={tmp_path / 'run'}", *words])


def test_validate_says_how_large_the_replay_gets() -> None:
    [note] = load_config("metaworld_reach_sac", []).notes
    assert note == "the replay of 20,000 chunks takes up to 3.4 MiB in memory"
