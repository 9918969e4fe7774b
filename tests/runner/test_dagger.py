"""Runs with an expert beside the policy: critics that learn from it, the shipped experiment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learners import DAGGER, EXPERT
from small_runs import Run, Runs

from embodyrl.cli import collect, train
from embodyrl.cli.arguments import ImageFormat, Keep
from embodyrl.config import ConfigError, load_config
from embodyrl.registry import EXPERTS

pytestmark = pytest.mark.usefixtures("own_experts")


def test_critics_learn_from_what_the_expert_executed(tmp_path: Path) -> None:
    text = DAGGER.replace("algorithm: dagger", "algorithm: sac").replace("    imitation: {first_steps: 0}\n", "")
    text = text.replace("replay: {capacity: 200}", "replay: {capacity: 800, start_after: 90}")
    text = text.replace("hidden_sizes: [16]", "head: squashed, hidden_sizes: [16]")
    (tmp_path / "swinger.py").write_text(EXPERT)
    (tmp_path / "sac.yaml").write_text(text)
    run = Runs(tmp_path, tmp_path / "sac.yaml")("run.iterations=4", "run.save_every=4")
    moments = run.replay()
    decided = moments["decided"]
    source, labels = moments["source"][decided], moments["labels"][decided]
    assert set(source.tolist()) == {0, 1, 2}, "its own, the expert's, and random ones at first"
    expert = source == 1
    assert torch.equal(moments["labelled"][decided], expert)
    assert torch.equal(moments["actions"][decided][expert], labels[expert])
    assert (labels[expert].abs() == 2.0).all(), "cut to the simulator's range"
    assert not labels[~expert].any()
    assert run.metrics()[-1]["train/critic_loss"] > 0


def test_it_is_refused_without_an_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(EXPERTS._entries, "gymnasium", raising=False)
    (tmp_path / "my.yaml").write_text(DAGGER.replace("plugins: [swinger]\n", ""))
    with pytest.raises(ConfigError, match=r"simulator .gymnasium. has no scripted expert.*: libero, metaworld"):
        load_config(tmp_path / "my.yaml")


def test_push_is_learned_from_demonstrations_and_corrections(tmp_path: Path) -> None:
    """The shipped experiment, made small: its two commands, and the policy alone in evaluations."""
    data, run = tmp_path / "data", tmp_path / "run"
    settings = [
        *(f"data.path={data}", f"run.dir={run}", "env.proprio=robot", "run.iterations=1", "eval.episodes=2"),
        *("algorithm.off_policy.imitation.first_steps=30", "rollout.num_chunks=40", "env.num_envs=2"),
        *(
            "algorithm.off_policy.updates_per_step=0.1",
            "tracking.sinks=[jsonl]",
            "tracking.report=false",
            "env.max_episode_steps=15",
            "env.workers=1",
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
    assert row["env/interventions"] == 0.0 and row["replay/decisions"] == row["env/steps"] == 30
    assert row["train/updates"] == 3 and row["env/episodes"] == 2
    assert train.evaluate(str(run), []) == 0, "simulators of the policy alone show what it reads"
