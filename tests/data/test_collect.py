"""`embodyrl collect`: a scripted expert or a policy plays training episodes, and what it does is recorded."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import programs
import pytest

pytest.importorskip("pyarrow", reason="demonstrations need pyarrow: pip install 'embodyrl[data]'")

from embodyrl.config import load_config
from embodyrl.data.experts import scripted_expert
from embodyrl.data.reader import Dataset
from embodyrl.data.recorder import Attempt, Recorder, demonstration_episodes
from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.manager import EnvManager
from embodyrl.envs.mujoco import rendering

OUT = ["--out", "demos"]
BOTH_WAYS = "env.tasks=[faucet-open-v3,faucet-close-v3]"


@contextmanager
def recorder(
    *overrides: str, pushes: float = 0.0, after_success: int = 0
) -> Iterator[tuple[Recorder, list[EpisodeSpec]]]:
    pytest.importorskip("metaworld", reason="MetaWorld is not installed")
    config = load_config("experiment/metaworld_reach", ["env.workers=1", *overrides]).config
    expert = scripted_expert(config.env)
    with EnvManager(expert.env, chunk_size=1) as manager:
        yield (
            Recorder(manager, expert, pushes=pushes, after_success=after_success, seed=config.seed),
            demonstration_episodes(config.env, config.seed),
        )


def record(number: int, *overrides: str, **options) -> list[Attempt]:
    with recorder(*overrides, **options) as (recording, episodes):
        return list(recording.record(episodes[:number]))


def test_the_expert_solves_its_tasks_and_every_attempt_comes_in_its_turn() -> None:
    attempts = record(8, BOTH_WAYS, "env.num_envs=3")
    assert [attempt.number for attempt in attempts] == list(range(8))
    assert all(attempt.success and attempt.episode.success.tolist().count(True) == 1 for attempt in attempts)
    assert [attempt.episode.task for attempt in attempts[:3]] == ["turn on the faucet", "turn off the faucet"] * 1 + [
        "turn on the faucet"
    ]
    assert all(np.abs(attempt.episode.actions).max() <= 1.0 for attempt in attempts)


def test_what_is_recorded_does_not_depend_on_the_number_of_slots() -> None:
    few, many = (record(6, BOTH_WAYS, f"env.num_envs={slots}", pushes=1.5) for slots in (1, 4))
    for one, other in zip(few, many, strict=True):
        for name, value in vars(one.episode).items():
            assert np.array_equal(value, getattr(other.episode, name)), (one.number, name)


def test_the_expert_sees_everything_and_what_the_config_shows_is_recorded() -> None:
    full, robot = (record(2, f"env.proprio={proprio}")[0].episode for proprio in ("full", "robot"))
    assert full.proprio.shape[1] == 39 and robot.proprio.shape[1] == 4
    assert np.array_equal(full.proprio[:, :4], robot.proprio) and np.array_equal(full.actions, robot.actions)


def test_pushes_disturb_and_the_label_is_what_the_expert_wanted() -> None:
    calm, pushed = record(6)[:6], record(6, pushes=2.0)
    marks = [attempt.episode.perturbed for attempt in pushed]
    assert all(attempt.episode.perturbed is None for attempt in calm)
    assert all(attempt.success for attempt in pushed)
    assert sum(mark[0] for mark in marks) >= 3  # a push has 0 .. 3 steps
    assert any(mark[4:].any() for mark in marks)
    for one, other, mark in zip(calm, pushed, marks, strict=True):
        first = int(mark.argmax()) if mark.any() else len(one.episode) - 1
        assert np.array_equal(one.episode.actions[: first + 1], other.episode.actions[: first + 1])
        executed = other.episode.executed
        assert np.array_equal(executed[~mark], other.episode.actions[~mark])
        if mark.any():
            assert not (executed[mark] == other.episode.actions[mark]).all(1).any()
            assert not np.array_equal(one.episode.proprio[first + 1], other.episode.proprio[first + 1])


def test_recording_goes_on_after_success_for_as_long_as_was_asked() -> None:
    short, long = record(2), record(2, after_success=4)
    for one, other in zip(short, long, strict=True):
        assert len(other.episode) == len(one.episode) + 4
        assert np.array_equal(one.episode.last_proprio, other.episode.proprio[len(one.episode)])
        assert not one.episode.terminated and not other.episode.terminated
        assert one.episode.success[-1] and other.episode.success[len(one.episode) - 1]
    ends = record(2, "env.end_at_success=true", after_success=4)
    assert [len(each.episode) for each in ends] == [len(each.episode) for each in short]
    assert all(each.episode.terminated for each in ends)
    assert all(
        np.array_equal(one.episode.last_proprio, other.episode.last_proprio)
        for one, other in zip(ends, short, strict=True)
    ), "before the reset"


def test_only_training_start_states_are_played() -> None:
    env = load_config("experiment/metaworld_reach", ["env.start_states=3", BOTH_WAYS]).config.env
    episodes = demonstration_episodes(env, 1)
    assert [(each.task, each.start_state) for each in episodes] == [
        (task, state) for state in range(3) for task in ("faucet-open-v3", "faucet-close-v3")
    ]
    assert len({each.seed for each in episodes}) == 6


def test_a_share_of_the_demonstrations_is_perturbed_and_the_others_are_as_without() -> None:
    plain = record(6)
    for slots in (1, 3):
        changed = record(6, "env.perturb={layout: [3, 5], share: 0.5}", f"env.num_envs={slots}")
        begins = [
            np.array_equal(a.episode.proprio[0], b.episode.proprio[0]) for a, b in zip(plain, changed, strict=True)
        ]
        assert 1 <= sum(begins) <= 5 and all(attempt.success for attempt in changed)
        for same, one, other in zip(begins, plain, changed, strict=True):
            assert same == np.array_equal(one.episode.actions, other.episode.actions)


def test_supervised_learning_under_perturbations_needs_demonstrations_that_were_recorded_with_them(
    tmp_path: Path,
) -> None:
    pytest.importorskip("metaworld", reason="MetaWorld is not installed")
    words = ["metaworld_reach_sft", "env.num_envs=2"]
    asked = [*words, "env.perturb={layout: 3, share: 0.5}"]
    done = embodyrl("collect", *asked, "--out", "changed", "--episodes", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "perturbed (layout 3 in a share of 0.5)" in done.stdout
    plain = embodyrl("collect", *words, "--out", "plain", "--episodes", "2", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    fine = embodyrl("validate", *asked, "data.path=changed", cwd=tmp_path)
    assert fine.returncode == 0, fine.stderr
    for folder, other, what in (
        ("plain", [], "in plain were recorded without perturbations - leave it out"),
        ("changed", ["env.perturb.share=1"], "with env.perturb={layout: [3, 3], share: 0.5} - leave it out"),
    ):
        wrong = embodyrl("validate", *asked, *other, f"data.path={folder}", cwd=tmp_path)
        assert wrong.returncode == 2 and what in wrong.stderr and "plays no training episodes" in wrong.stderr


def test_a_policy_carries_out_its_chunks_and_decides_again_only_then() -> None:
    from embodyrl.runner.build import build_engine
    from embodyrl.runner.playing import PolicyDemonstrator

    config = load_config(
        "experiment/gym_pendulum",
        ["rollout.chunk_size=3", "env.num_envs=2", "env.workers=1", "env.max_episode_steps=8", "model.log_std_init=0"],
    ).config
    with EnvManager(config.env, chunk_size=1) as manager:
        engine = build_engine(config, manager, weights=None)
        for parameter in engine.policy.actor.parameters():
            parameter.data.normal_(generator=None, std=0.5)
        policy = PolicyDemonstrator(config.env, engine, "eval")
        recording = Recorder(manager, policy, pushes=0.0, after_success=0, seed=1)
        attempts = list(recording.record(demonstration_episodes(config.env, 1)[:4]))
    assert [len(attempt.episode) for attempt in attempts] == [8] * 4
    for attempt in attempts:
        states = attempt.episode.proprio[[0, 3, 6]]
        chunks = engine.act(Observation(proprio=states, task_descriptions=[""] * 3), "eval").actions.reshape(9, 1)[:8]
        assert np.allclose(attempt.episode.actions, chunks.numpy(), atol=1e-6)


def embodyrl(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "embodyrl", *words], cwd=cwd)


def test_the_command_records_images_and_supervised_learning_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("metaworld", reason="MetaWorld is not installed")
    words = ["metaworld_reach_sft", "data.path=demos"]
    done = embodyrl("collect", *words, "--episodes", "12", "--pushes", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "12 episodes" in done.stdout and "12 of 12 attempts successful (100%)" in done.stdout
    assert done.stdout.endswith("next: embodyrl run metaworld_reach_sft data.path=demos\n")
    dataset = Dataset(tmp_path / "demos")
    assert len(dataset.episodes) == 12 and dataset.spec.action_names == ("arm_0", "arm_1", "arm_2", "gripper")
    again = embodyrl("collect", "metaworld_reach", "--out", "demos", "--episodes", "1", cwd=tmp_path)
    assert again.returncode == 2 and "exists already and is never overwritten" in again.stderr
    learned = embodyrl(
        "run",
        *words,
        "run.iterations=8",
        "eval.episodes=10",
        "run.dir=out",
        cwd=tmp_path,
    )
    assert learned.returncode == 0, learned.stderr
    last = [line for line in learned.stdout.splitlines() if line.startswith("evaluation")][-1]
    assert float(last.split("success ")[1].split()[0]) >= 0.5, learned.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["gym_pendulum", *OUT, "--episodes", "1"],
            "has no scripted expert (those that have one: libero, metaworld, robosuite)",
        ),
        (["gym_pendulum", *OUT, "--episodes", "1", "--policy", "nowhere"], "nowhere does not exist"),
        (
            ["metaworld_reach", "--episodes", "1"],
            "give --out DIR, since data.path is null in experiment/metaworld_reach",
        ),
        (["metaworld_reach", *OUT, "--episodes", "1", "--sample"], "--sample draws the actions of a policy"),
        (["metaworld_reach", *OUT, "--episodes", "9", "env.start_states=4"], "more than the 4 training episodes"),
    ],
)
def test_what_cannot_be_recorded_is_refused_at_once(words: list[str], message: str, tmp_path: Path) -> None:
    done = embodyrl("collect", *words, cwd=tmp_path)
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_success_there_is_nothing_to_keep_and_the_command_says_so(tmp_path: Path) -> None:
    pytest.importorskip("metaworld", reason="MetaWorld is not installed")
    hasty = ["env.max_episode_steps=5", "env.num_envs=2", "env.workers=1"]
    done = embodyrl("collect", "metaworld_reach", *hasty, "--out", "demos", "--episodes", "1", cwd=tmp_path)
    assert done.returncode == 1 and "only 0 of 1 episode recorded, in 20 attempts" in done.stderr
    assert list(tmp_path.iterdir()) == []
    kept = embodyrl(
        "collect", "metaworld_reach", *hasty, "--out", "demos", "--episodes", "3", "--keep", "all", cwd=tmp_path
    )
    assert kept.returncode == 0 and [each.length for each in Dataset(tmp_path / "demos").episodes] == [5, 5, 5]


def test_who_plays_needs_no_files_of_the_model_that_the_config_names(tmp_path: Path) -> None:
    gone = "model.checkpoint=gone"
    made = embodyrl(
        "run", "gym_pendulum", "run.iterations=1", "env.num_envs=2", "eval.episodes=2", "run.dir=run", cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    words = ["--out", "by_policy", "--episodes", "2", "--keep", "all", "--policy", "run"]
    done = embodyrl("collect", "gym_pendulum", gone, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(Dataset(tmp_path / "by_policy").episodes) == 2
    pytest.importorskip("metaworld", reason="MetaWorld is not installed")
    words = ["--out", "by_expert", "--episodes", "1", "env.num_envs=1"]
    done = embodyrl("collect", "metaworld_reach", gone, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("next: embodyrl run CONFIG algorithm=sft data.path=by_expert\n")
    assert len(Dataset(tmp_path / "by_expert").episodes) == 1


@pytest.mark.slow
def test_of_frames_the_newest_is_recorded_and_a_policy_that_reads_several_cannot_record(tmp_path: Path) -> None:
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    pytest.importorskip("metaworld", reason="MetaWorld is not installed")
    try:
        rendering.context(16, 16).free()
    except (rendering.NoOpenGLError, ImportError):
        pytest.skip("MuJoCo cannot render here")
    frames = ["env.frames=3", "env.num_envs=2", "env.image_size=[32,32]", "eval.episodes=2"]
    shown = embodyrl("collect", "metaworld_reach_cnn_sft", *frames, *OUT, "--episodes", "2", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    demonstrations = Dataset(tmp_path / OUT[1])
    assert demonstrations.read(0).images.shape[1:] == (2, 32, 32, 3)
    brief = ["run.iterations=1", "data.steps=2", "data.batch_size=4", f"data.path={OUT[1]}", "run.dir=run"]
    learned = embodyrl("run", "metaworld_reach_cnn_sft", *frames, *brief, cwd=tmp_path)
    assert learned.returncode == 0, learned.stderr
    asked = ["--out", "more", "--episodes", "1", "--policy", "run"]
    refused = embodyrl("collect", "metaworld_reach_cnn_sft", *frames, *asked, cwd=tmp_path)
    assert refused.returncode in (1, 2) and "reads env.frames = 3 images of its last decisions" in refused.stderr
    assert not (tmp_path / "more").exists()


def test_the_recorded_config_is_not_changed_by_the_expert() -> None:
    pytest.importorskip("metaworld", reason="MetaWorld is not installed")
    env = load_config("experiment/metaworld_reach", ["env.proprio=robot"]).config.env
    assert dataclasses.replace(scripted_expert(env).env, proprio=env.proprio) == env
