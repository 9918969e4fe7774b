"""Chunks that overlap: means over chunks, late chunks, ends of episodes, a killed program, evaluations, learning."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import programs
import pytest
import torch

import embodyrl
from embodyrl import ConfigError, UserError
from embodyrl.config import load_config
from embodyrl.methods.stages import chosen_in
from embodyrl.rollout.action_queue import ActionQueue
from embodyrl.rollout.late_chunks import OWN, LateChunks
from embodyrl.runner.evaluation import held_out_episodes

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
import embodyrl
from embodyrl.envs import EpisodeSpec
from embodyrl.rollout.action_queue import ActionQueue

folder, die_at = Path(sys.argv[1]), int(sys.argv[2])
SLOTS, CHUNK, LIMIT = 3, 4, 7

def episode(slot, number):
    return EpisodeSpec(task="Pendulum-v1", start_state=10 * slot + number, seed=slot, group=slot)

if __name__ == "__main__":
    with embodyrl.make_envs("gym/pendulum", SLOTS, chunk_size=1, overrides=[f"env.max_episode_steps={LIMIT}"]) as envs:
        manager, slots = envs.manager, np.arange(SLOTS)
        ensemble = ActionQueue(SLOTS, CHUNK, 1, 0.3)
        kept = folder / "kept.npz"
        if kept.is_file():
            saved = np.load(kept)
            first, numbers, log = int(saved["step"]), saved["numbers"], json.loads(str(saved["log"]))
            manager.set_state(slots, [saved[f"slot{slot}"].tobytes() for slot in slots])
            ensemble.load_state_dict({name: saved[name] for name in ("counts", "means")})
            observation = manager.observe(slots)
        else:
            first, numbers, log = 0, np.zeros(SLOTS, np.int64), []
            observation = manager.reset(slots, [episode(slot, 0) for slot in slots])
        for step in range(first, 30):
            seen = observation.proprio.astype(np.float64)
            chunks = np.sin(3.0 * seen[:, :1] + seen[:, 1:2] + np.arange(CHUNK))[..., None].astype(np.float32)
            actions = ensemble.act(slots, chunks)
            result = manager.step(slots, actions, [episode(slot, numbers[slot] + 1) for slot in slots])
            log.append({"chunks": chunks.tolist(), "actions": actions.tolist(), "ended": result.ended.tolist()})
            numbers = numbers + result.ended
            ensemble.begin(slots[result.ended])
            observation = result.observation
            if step % 5 == 2:
                states = manager.get_state(slots)
                arrays = {f"slot{slot}": np.frombuffer(states[slot], np.uint8) for slot in slots}
                np.savez(folder / "new.npz", step=step + 1, numbers=numbers, log=json.dumps(log), **arrays,
                         **ensemble.state_dict())
                os.replace(folder / "new.npz", kept)
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        (folder / "log.json").write_text(json.dumps(log))
"""


def play(folder: Path, die_at: int) -> int:
    folder.mkdir(exist_ok=True)
    script = folder / "program.py"
    script.write_text(PROGRAM)
    done = programs.run([script, folder, str(die_at)])
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def test_across_resets_and_a_kill_it_is_the_mean_of_all_chunks(tmp_path: Path) -> None:
    assert play(tmp_path / "whole", -1) == 0
    assert play(tmp_path / "killed", 16) == -signal.SIGKILL
    assert play(tmp_path / "killed", -1) == 0
    whole, resumed = (json.loads((tmp_path / name / "log.json").read_text()) for name in ("whole", "killed"))
    assert whole == resumed
    assert sum(map(sum, (row["ended"] for row in whole))) == 3 * (30 // 7)  # several episodes, the last is not over
    weights = np.exp(-0.3 * np.arange(4))
    for slot in range(3):
        begun = 0
        for step, row in enumerate(whole):
            oldest = max(begun, step - 3)
            said = [whole[number]["chunks"][slot][step - number][0] for number in range(oldest, step + 1)]
            mean = np.average(said, weights=weights[: len(said)])
            assert row["actions"][slot][0][0] == pytest.approx(mean, abs=1e-6)
            begun = step + 1 if row["ended"][slot] else begun


def test_one_chunk_is_executed_as_it_is_and_all_agree_if_all_say_the_same() -> None:
    ensemble = ActionQueue(2, 3, 1, 5.0)
    slots = np.array([1])
    first = np.array([[[1.0], [2.0], [3.0]]], np.float32)
    assert ensemble.act(slots, first).tolist() == [[[1.0]]]
    assert ensemble.act(slots, first + 1.0)[0, 0, 0] == pytest.approx(2.0)  # both said 2
    ensemble.begin(slots)
    assert ensemble.act(slots, first - 5.0).tolist() == [[[-4.0]]]
    assert ensemble.act(np.array([0]), first).tolist() == [[[1.0]]]  # the other slot has heard nothing of this


@pytest.mark.parametrize("coefficient", [-800.0, -9.0, -0.01, 0.0, 0.01, 9.0, 800.0])
def test_weights_of_any_size_make_a_mean(coefficient: float) -> None:
    length = 120
    ensemble, slots = ActionQueue(1, length, 2, coefficient), np.array([0])
    said = np.random.default_rng(1).normal(size=(2 * length, 1, length, 2)).astype(np.float32)
    with np.errstate(all="raise", under="ignore"):
        for step, chunk in enumerate(said):
            action = ensemble.act(slots, chunk)[0, 0]
            heard = [said[step - age, 0, age] for age in range(min(step, length - 1), -1, -1)]
            # The largest weight is 1: as a formula of all chunks at once, which needs no recurrence.
            exponents = -coefficient * np.arange(len(heard))
            wanted = np.average(heard, axis=0, weights=np.exp(exponents - exponents.max()))
            np.testing.assert_allclose(action, wanted, atol=1e-6)


def test_choices_have_no_mean(tmp_path: Path) -> None:
    words = ["rollout.chunk_size=4", "run.iterations=1", "run.eval_every=0", "eval.episodes=2", "rollout.num_chunks=8"]
    embodyrl.train("gym_cartpole", [f"run.dir={tmp_path / 'run'}", *words])
    with pytest.raises(UserError, match=r"eval\.ensemble = 0\.1 averages actions, but those .* are choices"):
        embodyrl.evaluate(tmp_path / "run", ["eval.ensemble=0.1"])
    with pytest.raises(UserError, match=r"set eval\.ensemble to null"):
        embodyrl.load_policy(tmp_path / "run").ensemble(2, 0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a policy with chunks of four actions."""
    folder = tmp_path_factory.mktemp("ensemble") / "run"
    words = ["rollout.chunk_size=4", "env.max_episode_steps=24", "run.iterations=1", "run.eval_every=0"]
    embodyrl.train("gym_pendulum", [f"run.dir={folder}", *words, "rollout.num_chunks=8", "eval.episodes=2"])
    return folder


def test_an_evaluation_does_not_depend_on_who_shares_it(run: Path) -> None:
    def result(envs: int, *words: str) -> float:
        return embodyrl.evaluate(run, [f"env.num_envs={envs}", "eval.episodes=5", *words]).mean_return

    averaged = result(1, "eval.ensemble=0.1")
    assert result(3, "eval.ensemble=0.1") == pytest.approx(averaged, rel=1e-5)
    whole, each = result(3), result(3, "eval.actions=1")
    assert len({round(number, 3) for number in (averaged, whole, each)}) == 3
    assert result(3, "eval.actions=4") == whole
    # Newest chunks only: as if the policy had decided before every action.
    assert result(3, "eval.ensemble=-50.0") == pytest.approx(each, rel=1e-4)


def test_reinforcement_learning_refuses_it_and_what_makes_no_sense_is_refused() -> None:
    def said(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config("gym_pendulum", words)
        return str(caught.value)

    refused = said("rollout.chunk_size=4", "eval.ensemble=0.01")
    assert "has to execute the chunks whose probability it knows" in refused
    assert "embodyrl eval RUN eval.ensemble=0.01" in refused
    assert "eval.actions = 9 is more than rollout.chunk_size = 4" in said("rollout.chunk_size=4", "eval.actions=9")
    assert "eval.ensemble = 0.01 has nothing to average" in said("eval.ensemble=0.01")
    assert "has nothing to average: 4 of 4 actions are executed" in said(
        "rollout.chunk_size=4", "eval.ensemble=0.01", "eval.actions=4"
    )
    assert "embodyrl eval RUN eval.delay=1" in said("rollout.chunk_size=4", "eval.delay=1")
    assert "rollout.delay = 3 is too late for chunks of rollout.chunk_size = 4, 1 of which" in said(
        "rollout.chunk_size=4", "rollout.delay=3"
    )
    least = said("rollout.chunk_size=4", "rollout.delay=2", "eval.actions=3")
    assert "set eval.delay to 1 or less, eval.actions to 2, or choose a rollout.chunk_size of 4 or more" in least
    assert "'sac' learns what an observation and a chunk lead to" in said(
        "algorithm=sac", "rollout.chunk_size=4", "rollout.delay=1"
    )


# ---- late chunks


@pytest.mark.parametrize(("executed", "delay"), [(4, 0), (3, 1), (2, 2), (4, 2), (1, 1)])
def test_until_a_chunk_is_there_the_one_before_goes_on(executed: int, delay: int) -> None:
    size = 6
    queue, slots = ActionQueue(2, size, 1, executed=executed, delay=delay), np.array([1])
    said = [np.arange(size, dtype=np.float32)[None, :, None] + 100 * number for number in range(4)]
    actions = np.concatenate([queue.act(slots, chunk)[0, :, 0] for chunk in said])
    for step, action in enumerate(actions.tolist()):
        newest = max((step - delay) // executed, 0)  # the newest chunk that is there; the first is waited for
        assert action == 100 * newest + step - newest * executed, step
    queue.begin(slots)
    assert queue.act(slots, said[3])[0, 0, 0] == 300.0  # an episode begins: nothing goes on


def test_late_chunks_are_averaged_where_they_are_there() -> None:
    queue, slots = ActionQueue(1, 4, 1, 0.0, executed=1, delay=1), np.array([0])
    first, second, third = (np.full((1, 4, 1), number, np.float32) for number in (0.0, 6.0, 9.0))
    # Step 0: the first alone. Step 1: the second is not there yet. Step 2: mean of the first two. Step 3: of all three.
    assert [queue.act(slots, each)[0, 0, 0] for each in (first, second, third, third)] == [0.0, 0.0, 3.0, 5.0]


def test_an_evaluation_under_delay_is_what_a_robot_would_do(run: Path) -> None:
    words = ["eval.delay=1", "eval.actions=2", "eval.episodes=1"]
    found = embodyrl.evaluate(run, words)
    policy, total = embodyrl.load_policy(run, words), 0.0
    [episode] = held_out_episodes(policy.config)
    with embodyrl.make_envs(run / "config.yaml", 1, chunk_size=1, overrides=["env.num_envs=1"]) as envs:
        shown, plan, steps = envs.reset([episode]), np.zeros((0, 1)), 0
        while steps < found.mean_length:
            if steps % 2 == 0:  # it decides, and goes on with the last chunk for one step
                chunk = policy.act(shown)[0]
                plan = np.concatenate([plan[:1], chunk[len(plan[:1]) :]]) if steps else chunk
            result = envs.step(plan[:1][None])
            plan, shown, steps, total = plan[1:], result.observation, steps + 1, total + float(result.rewards.sum())
    assert found.mean_return == pytest.approx(total, rel=1e-5)
    plain = embodyrl.evaluate(run, ["eval.actions=2", "eval.episodes=1"])
    assert plain.mean_return != pytest.approx(total, rel=1e-5)


LATE = [
    "rollout.chunk_size=4",
    "rollout.delay=1",
    "rollout.num_chunks=8",
    "env.max_episode_steps=22",
    "eval.episodes=2",
]


def test_rollouts_under_delay_are_learned_from_and_resumed(tmp_path: Path) -> None:
    """Trains a policy twice, for a second: without an interruption, and with one in the middle of its episodes."""
    words = [
        *LATE,
        "eval.episodes=2",
        "run.eval_every=0",
        "algorithm.logprob_level=token",
        "engine.optimizer.schedule=constant",
        "algorithm.epochs=1",
        "algorithm.minibatches=1",
    ]
    embodyrl.train("gym_pendulum", [f"run.dir={tmp_path / 'whole'}", *words, "run.iterations=3"])
    embodyrl.train("gym_pendulum", [f"run.dir={tmp_path / 'parts'}", *words, "run.iterations=2"])
    embodyrl.resume(tmp_path / "parts", ["run.iterations=3"])

    def learned(name: str) -> list[dict[str, float]]:
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in row.items() if key.startswith(("train/", "env/"))} for row in rows]

    assert learned("whole")[-1] == learned("parts")[-1]
    # Eight decisions, each three steps but for the last, after which the episode is over; in eight envs.
    assert learned("whole")[0]["env/steps"] == 22 * 8
    # Scored by the weights that chose them, the actions that count are as likely as they were.
    assert learned("whole")[0]["train/ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_what_counts_of_a_late_chunk_is_what_is_executed_of_it() -> None:
    queue = ActionQueue(2, 4, 1, executed=3, delay=1)
    hook = LateChunks(queue, num_envs=2, chunk_size=4, executed=3, delay=1)

    def own(numbers: list[int]) -> list[list[bool]]:
        chosen: Any = {"slots": np.arange(2), "numbers": np.array(numbers), "actions": np.zeros((2, 4, 1), np.float32)}
        return hook.decide(SimpleNamespace(**chosen))[OWN].tolist()

    first, later = [True] * 4, [False, True, True, True]
    assert own([0, 0]) == [first, first]
    assert own([0, 1]) == [later, first]  # the second slot has begun another episode
    batch: Any = {
        OWN: torch.tensor([[later, later, first]]),
        "steps": torch.tensor([[3, 2, 3]]),
        "terminated": torch.tensor([[False, True, False]]),
        "truncated": torch.tensor([[False, False, False]]),
        "valid": torch.tensor([[True, True, False]]),
    }
    # The second episode ended after two steps, one of which was the late chunk's; the third was lost.
    assert chosen_in(batch).tolist() == [[later, [False, True, False, False], [False] * 4]]
