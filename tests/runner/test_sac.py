"""Runs that learn from a replay: on the disk, in checkpoints, and what they say."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from learners import Learner
from safetensors import safe_open
from slow import rest_slow
from small_runs import Run, Runs, assert_same_run, copy_of, resumed

import embodyrl
from embodyrl.cli import train
from embodyrl.cli.collect import checkpoint_of
from embodyrl.config import ConfigError, load_config
from embodyrl.errors import shell_command
from embodyrl.files import digest
from embodyrl.methods.replay import statistics
from embodyrl.methods.sac import learner
from embodyrl.pipelines.pipeline import Iteration, Pipeline
from embodyrl.runner.checkpoint import DamageError, verify
from embodyrl.runner.session import ChangeError

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


def test_what_scales_observations_has_seen_all_of_them(sac: Runs) -> None:
    run = sac("run.iterations=3", "run.eval_every=1")
    with safe_open(run.path / "checkpoints/last/policy/model.safetensors", framework="pt") as file:
        assert file.get_tensor("normalizer.count") == 3 * 48
    first, second, third = run.metrics()[1:]
    assert "train/clipped_features" not in first | second, "nothing was seen before"
    assert third["train/clipped_features"] < statistics.MOST_CLIPPED
    assert "replay/episodes" in third and "replay/successes" not in third, "Pendulum defines none"


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


def test_damage_to_past_decisions_costs_neither_the_policy_nor_the_run(
    sac: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of the replay are the same in all checkpoints; runs, exports and evaluations of its own."""
    run = sac.fresh(tmp_path / "run", "run.save_every=1", "run.iterations=2", "run.eval_every=0")
    newest = run.checkpoint(2)
    shared = min((newest / "trainer/replay").glob("*.safetensors"))
    assert shared.samefile(run.checkpoint(1) / "trainer/replay" / shared.name)
    shared.write_bytes(shared.read_bytes()[:-8])
    warning = f"warning: checkpoints/000002 is damaged: trainer/replay/{shared.name} has "
    capsys.readouterr()
    warnings.simplefilter("error", UserWarning)  # on the screen it has been said
    for name, use in {
        "eval": lambda: train.evaluate(run.path, []),
        "export": lambda: train.export(run.path, tmp_path / "exported"),
        "compare": lambda: train.evaluate(run.path, [], other=run.path),
        "collect": lambda: checkpoint_of(run.path) != newest,
    }.items():
        assert use() == 0, name
        assert warning in capsys.readouterr().out, name
    with pytest.warns(UserWarning, match=f"trainer/replay/{shared.name} has "):
        embodyrl.evaluate(newest, episodes=1)
    command = re.escape(shell_command("resume", run.path, "--without-replay"))
    remedy = f"continue from 000002 with an empty replay, .*: {command}"
    with pytest.raises(DamageError, match=remedy):
        train.resume(run.path, ["run.iterations=3"])
    assert train.resume(run.path, ["run.iterations=3", "run.save_every=1"], without_replay=True) == 0
    again = Run(run.path)
    assert "warning: continuing with an empty replay: the policy acts, and learns again" in again.log()
    assert again.metrics()[-1]["replay/decisions"] <= 48 and "train/updates" not in again.metrics()[-1]
    assert again.weights().keys() and verify(run.checkpoint(3)).iteration == 3
    goes_on = embodyrl.resume(run.path, ["run.iterations=4"])
    assert "train/updates" in goes_on.metrics[-1], "it learns again, from what is whole"


def test_a_run_without_a_replay_has_none_to_go_on_without(small_runs: Runs, tmp_path: Path) -> None:
    path = copy_of(small_runs("run.iterations=1"), tmp_path / "run")
    with pytest.raises(ChangeError, match="learns from no replay: leave out --without-replay"):
        train.resume(path, ["run.iterations=2"], without_replay=True)


def test_a_file_that_is_cut_short_while_the_run_goes_on_is_written_anew(
    sac: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(self: Pipeline, iteration: Iteration) -> None:
        run(self, iteration)
        if iteration.number == 3:
            for file in (tmp_path / "run/checkpoints/000002/trainer/replay").glob("*.safetensors"):
                file.write_bytes(file.read_bytes()[:-8])

    run = Pipeline.run
    monkeypatch.setattr(Pipeline, "run", cut)
    made = sac.fresh(tmp_path / "run", "run.save_every=1", "run.iterations=3", "run.eval_every=0")
    assert verify(made.checkpoint(3)).iteration == 3


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
    assert learner.RANDOM_UPDATES >= 1000, "a policy is given time to learn"
    monkeypatch.setattr(learner, "RANDOM_UPDATES", 400)
    monkeypatch.setattr(statistics, "MOST_CLIPPED", -1.0)
    monkeypatch.setattr(learner, "RANDOM_MARGIN", 0.1)
    hopeless = [
        *("env.success_return=1000.0", "algorithm.reward=success", "run.iterations=9", "run.eval_every=0"),
        *("algorithm.off_policy.temperature.initial=100.0", "algorithm.off_policy.temperature.lr=1e-9"),
        *("algorithm.off_policy.updates_per_step=1.5", "algorithm.off_policy.temperature.in_target=false"),
        "env.max_episode_steps=10",
    ]
    warned = re.findall(r"warning: (.*)", sac(*hopeless).log())
    assert len([line for line in warned if line.startswith("no episode of 2")]) == 1, warned
    assert len([line for line in warned if line.startswith("0% of the numbers that the policy sees")]) == 1, warned
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
        (["data.path=nowhere"], "data.path is set, but algorithm 'sac' learns from rollouts"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config("metaworld_reach_sac", [f"run.dir={tmp_path / 'run'}", *words])


def test_validate_says_how_large_the_replay_gets() -> None:
    [note] = load_config("metaworld_reach_sac", []).notes
    assert note == "the replay of 20,000 chunks takes up to 3.4 MiB in memory"
