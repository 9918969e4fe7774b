"""Runs with an expert beside the policy: killed and resumed, on one rank and two, with offloaded simulators."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import Run, kill_after
from test_sac import WEIGHTS, states

from embodyrl.cli import collect, train
from embodyrl.cli.arguments import ImageFormat, Keep
from embodyrl.config import ConfigError, load_config
from embodyrl.registry import EXPERTS

PLUGIN = '''
import dataclasses

import numpy as np

from embodyrl.registry import EXPERTS


class Swinger:
    """Pushes with the rotation, which no policy sees, and changes its mind every third time."""

    def __init__(self, env):
        self.env, self.asked = env, {}

    def begin(self, slot, episode):
        self.asked[slot] = episode.start_state % 3

    def act(self, slots, observation):
        turns = []
        for slot, state in zip(slots.tolist(), observation.proprio, strict=True):
            self.asked[slot] += 1
            turns.append([3.0 * np.sign(state[2]) * (-1.0 if self.asked[slot] % 3 == 0 else 1.0)])
        return np.array(turns, np.float32)

    def recorded(self, observation):
        return dataclasses.replace(observation, proprio=observation.proprio[:, :2])

    def memory(self, slot):
        return str(self.asked[slot])

    def remember(self, slot, memory):
        self.asked[slot] = int(memory)


EXPERTS.register("gymnasium", target=Swinger, summary="pushes a pendulum")
'''

SMALL = """
defaults: [env: gym/pendulum, model: mlp, algorithm: dagger, _self_]
plugins: [swinger]
env: {num_envs: 4, workers: 2, max_episode_steps: 40}
model: {hidden_sizes: [16]}
rollout: {num_chunks: 12, blocks: 2}
algorithm:
  off_policy:
    replay: {capacity: 200}
    updates_per_step: 0.4
    batch_size: 32
    imitation: {first_steps: 0}
    intervene: {share: 0.2, after: 25, labels: executed}
run: {name: small-dagger, iterations: 8, save_every: 3, eval_every: 0}
eval: {episodes: 4}
tracking: {sinks: [jsonl], report: false}
"""
"""Episodes (40 steps) straddle rollouts (12), and so does what the expert takes over."""


@pytest.fixture
def dagger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Train: dagger("name", "key=value", ...)."""
    (tmp_path / "my.yaml").write_text(SMALL)
    (tmp_path / "swinger.py").write_text(PLUGIN)
    assert "metaworld" in EXPERTS
    monkeypatch.setattr(EXPERTS, "_entries", dict(EXPERTS._entries))  # what the plug-in adds is gone afterwards
    monkeypatch.setitem(sys.modules, "swinger", sys)
    del sys.modules["swinger"]

    def run(name: str, *overrides: str) -> Run:
        assert train.run(load_config(str(tmp_path / "my.yaml"), [f"run.dir={tmp_path / name}", *overrides])) == 0
        return Run(tmp_path / name)

    return run


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.path / WEIGHTS)


@pytest.mark.faults
def test_a_run_that_is_killed_goes_on_bit_for_bit_interventions_included(
    dagger: Callable[..., Run], tmp_path: Path
) -> None:
    whole = dagger("whole")
    killed = tmp_path / "killed"
    kill_after(
        killed / "checkpoints" / "000003", ["-m", "embodyrl", "run", str(tmp_path / "my.yaml"), f"run.dir={killed}"]
    )
    assert train.resume(killed, []) == 0
    again = Run(killed)
    assert again.metrics() == whole.metrics()
    found, wanted = (
        {name: sha for name, sha in states(run, 8).items() if "/replay/" not in name} for run in (again, whole)
    )
    assert found == wanted and "policy/model.safetensors" in wanted
    rows = [row for row in whole.metrics() if "env/interventions" in row]
    assert len(rows) == 8 and len({row["env/interventions"] for row in rows}) > 4
    # Labels are those of what the expert executed, and each asks for 0.4 steps.
    executed = sum(round(row["env/interventions"] * 48) for row in rows)
    assert rows[-1]["train/updates"] == int(0.4 * executed + 1e-6) and rows[0]["train/updates"] > 0


@pytest.mark.timeout(300)
def test_one_rank_and_two_learn_the_same_and_simulators_may_end_meanwhile(dagger: Callable[..., Run]) -> None:
    one = dagger("one", "run.iterations=4")
    both = dagger("both", "run.iterations=4", "engine.parallel.world_size=2")
    offloaded = dagger("offloaded", "run.iterations=4", "env.offload=true", "run.eval_every=2")
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(both)[name], tensor, atol=1e-4, rtol=1e-4)
        assert torch.equal(weights(offloaded)[name], tensor), "evaluations and offloading change nothing"
    shares = [[row.get("env/interventions") for row in run.metrics()] for run in (one, both)]
    assert shares[0] == shares[1]
    assert offloaded.metrics()[-1]["memory/simulators_freed_mib"] > 0


def test_critics_learn_from_what_the_expert_executed(dagger: Callable[..., Run], tmp_path: Path) -> None:
    text = SMALL.replace("algorithm: dagger", "algorithm: sac").replace("    imitation: {first_steps: 0}\n", "")
    text = text.replace("replay: {capacity: 200}", "replay: {capacity: 800, start_after: 90}")
    text = text.replace("hidden_sizes: [16]", "head: squashed, hidden_sizes: [16]")
    (tmp_path / "my.yaml").write_text(text)
    run = dagger("sac", "run.iterations=4", "run.save_every=4")
    [file] = (run.path / "checkpoints" / "last" / "trainer" / "replay").glob("*.safetensors")
    moments = load_file(file)
    decided = moments["decided"]
    source, labels = moments["source"][decided], moments["labels"][decided]
    assert set(source.tolist()) == {0, 1, 2}, "its own, the expert's, and random ones at first"
    expert = source == 1
    assert torch.equal(moments["labelled"][decided], expert)
    assert torch.equal(moments["actions"][decided][expert], labels[expert])
    assert (labels[expert].abs() == 2.0).all(), "cut to the simulator's range"
    assert not labels[~expert].any()
    assert run.metrics()[-1]["train/critic_loss"] > 0


def test_it_is_refused_without_an_expert(dagger: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(SMALL.replace("plugins: [swinger]\n", ""))
    with pytest.raises(ConfigError, match=r"simulator .gymnasium. has no scripted expert.*: metaworld"):
        dagger("run")


def test_push_is_learned_from_demonstrations_and_corrections(tmp_path: Path) -> None:
    """The shipped experiment, made small: its two commands, and the policy alone in evaluations."""
    data, run = tmp_path / "data", tmp_path / "run"
    settings = [
        *(f"data.path={data}", f"run.dir={run}", "env.proprio=robot", "run.iterations=1", "eval.episodes=4"),
        *("algorithm.off_policy.imitation.first_steps=30", "rollout.num_chunks=100", "env.num_envs=2"),
        *(
            "algorithm.off_policy.updates_per_step=0.1",
            "tracking.sinks=[jsonl]",
            "tracking.report=false",
            "env.max_episode_steps=30",
        ),
    ]
    options = collect.Options(
        out=data,
        episodes=2,
        keep=Keep.all,
        policy=None,
        sample=False,
        pushes=0.0,
        after_success=0,
        images=ImageFormat.image,
    )
    loaded = load_config("push_dagger", settings, not_needed=[("data", "path")])
    assert collect.collect(loaded, options) == 0
    assert train.run(load_config("push_dagger", settings)) == 0
    log = (run / "run.log").read_text()
    assert "imitation: 30 steps on " in log and "of behaviour cloning alone: success " in log
    row = Run(run).metrics()[-1]
    assert row["env/interventions"] == 0.0 and row["replay/decisions"] == row["env/steps"] == 60
    assert row["train/updates"] == 6 and row["env/episodes"] == 2
    assert train.evaluate(str(run), []) == 0, "simulators of the policy alone show what it reads"
