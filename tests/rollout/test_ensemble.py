"""Temporal ensembling: means over chunks, ends of episodes, a killed program, evaluations, and who may use it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import programs
import pytest

import embodyrl
from embodyrl import ConfigError, UserError
from embodyrl.config import load_config
from embodyrl.rollout.ensemble import TemporalEnsemble

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
import embodyrl
from embodyrl.envs import EpisodeSpec
from embodyrl.rollout.ensemble import TemporalEnsemble

folder, die_at = Path(sys.argv[1]), int(sys.argv[2])
SLOTS, CHUNK, LIMIT = 3, 4, 7

def episode(slot, number):
    return EpisodeSpec(task="Pendulum-v1", start_state=10 * slot + number, seed=slot, group=slot)

if __name__ == "__main__":
    with embodyrl.make_envs("gym/pendulum", SLOTS, chunk_size=1, overrides=[f"env.max_episode_steps={LIMIT}"]) as envs:
        manager, slots = envs.manager, np.arange(SLOTS)
        ensemble = TemporalEnsemble(SLOTS, CHUNK, 1, 0.3)
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
    ensemble = TemporalEnsemble(2, 3, 1, 5.0)
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
    ensemble, slots = TemporalEnsemble(1, length, 2, coefficient), np.array([0])
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
    assert "decides before every action, but eval.actions = 2" in said(
        "rollout.chunk_size=4", "eval.ensemble=0.01", "eval.actions=2"
    )
