"""The section `pipeline` of a config, up to runs of a real simulator."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import markupsafe
import programs
import pytest

from embodyrl.config import ConfigError, load_config
from embodyrl.config.rules import replay_of
from embodyrl.config.schema import InsertedStage, PipelineConfig
from embodyrl.methods.iql.config import ImplicitConfig, IQLConfig
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.pipelines.build import build_pipeline
from embodyrl.pipelines.checks import RESOURCES, plain
from embodyrl.registry import ALGORITHMS, STAGES

SMALL = """\
defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]
run: {iterations: 2, eval_every: 0, dir: out}
env: {num_envs: 2, workers: 1, max_episode_steps: 10}
rollout: {num_chunks: 8}
algorithm: {epochs: 1, minibatches: 2}
eval: {episodes: 2}
tracking: {sinks: [jsonl]}
"""

STAGES_OF_ONES_OWN = """\
from embodyrl.registry import STAGES

def pay_nothing(iteration):
    iteration.batch["shaped_rewards"] = 0.0 * iteration.batch["rewards"]

def add_bonus(iteration):
    iteration.batch["shaped_rewards"] = iteration.batch["shaped_rewards"] + 2.5

def look(iteration):
    reward = float(iteration.batch["shaped_rewards"].mean())
    iteration.metrics["mine/reward" if reward else "mine/reward_at_first"] = reward

def no_advantages(iteration):
    iteration.batch["advantages"] = iteration.batch["returns"] = 0.0 * iteration.batch["shaped_rewards"].sum(2)

STAGES.register("pay_nothing", target=pay_nothing, reads=("rewards",), writes=("shaped_rewards",),
                summary="no reward at all")
STAGES.register("add_bonus", target=add_bonus, changes=("shaped_rewards",), summary="some reward")
STAGES.register("no_advantages", target=no_advantages, summary="nothing is better than anything else",
                reads=("shaped_rewards",), writes=("advantages", "returns"))
STAGES.register("look", target=look, reads=("shaped_rewards",), summary="reports the reward")
"""


def embodyrl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "embodyrl", *words], cwd=folder)


def names(*overrides: str) -> list[str]:
    return [stage.name for stage in build_pipeline(load_config("experiment/gym_pendulum", overrides).config).stages]


def test_every_built_in_algorithm_can_be_built_and_loads_its_stages() -> None:
    usual = load_config("experiment/gym_pendulum").config
    for entry in ALGORITHMS.entries():
        if entry.source == "built-in":
            options: Any = entry.load_options() or OnPolicyConfig
            config = dataclasses.replace(usual, algorithm=options(name=entry.name))
            stages = entry.load()(config)
            alone = dict.fromkeys(("sft", "reward_classifier", "reward_progress"), "update")
            first = {**alone, **dict.fromkeys(("iql", "qc", "qc_fql"), "offline")}.get(entry.name, "rollout")
            usually = "improve" if replay_of(config) is not None else "update"
            last = {"recap": "round"}.get(entry.name, usually)
            assert stages[0].name == first and stages[-1].name == last
            assert all(callable(stage.load()) for stage in stages)


def test_iql_collects_only_after_its_offline_iterations_if_at_all() -> None:
    config = load_config("experiment/gym_pendulum").config
    for offline, wanted in (
        (0, ["rollout", "remember", "improve"]),
        (3, ["offline", "rollout", "remember", "improve"]),
    ):
        algorithm = IQLConfig(name="iql", off_policy=ImplicitConfig(offline_iterations=offline))
        assert [
            each.name for each in ALGORITHMS.load("iql")(dataclasses.replace(config, algorithm=algorithm))
        ] == wanted
    alone = IQLConfig(name="iql", off_policy=ImplicitConfig(offline_iterations=config.run.iterations))
    assert [each.name for each in ALGORITHMS.load("iql")(dataclasses.replace(config, algorithm=alone))] == ["offline"]


def test_what_a_stage_declares_is_a_column_of_the_table_or_written_by_a_stage() -> None:
    from embodyrl.rollout.batch import COLUMNS

    known = {*COLUMNS, "trace", "shaped_rewards", "advantages", "returns", *RESOURCES}
    for entry in STAGES.entries():
        if entry.source == "built-in":
            declared = [name for key in ("reads", "writes", "changes") for name in getattr(entry, key)]
            assert set(plain(declared)) <= known
    assert set(plain(STAGES.entry("collect").writes)) == COLUMNS.keys() - {"values", "next_values"} | {"trace"}


def test_stages_are_dropped_replaced_and_inserted() -> None:
    assert names() == ["rollout", "reward", "advantage", "update"]
    changed = names(
        "pipeline.drop=[reward]",
        "pipeline.insert=[{name: pay, stage: shape_rewards, before: [advantage]}]",
        "pipeline.replace={advantage: estimate_advantages}",
    )
    assert changed == ["rollout", "pay", "advantage", "update"]


def test_changed_stages_run_on_a_real_simulator(tmp_path: Path) -> None:
    """Everything at once: a stage is dropped, one has another function, four are new."""
    (tmp_path / "my_stages.py").write_text(STAGES_OF_ONES_OWN)
    (tmp_path / "my.yaml").write_text(
        SMALL
        + "plugins: [my_stages]\npipeline:\n"
        + "  drop: [reward]\n"
        + "  replace: {advantage: no_advantages}\n"
        + "  insert:\n"
        + "    - {name: pay, stage: pay_nothing}\n"
        + "    - {name: watch, stage: look, before: [bonus]}\n"
        + "    - {name: bonus, stage: add_bonus}\n"
        + "    - {name: later, stage: look}\n"
    )
    done = embodyrl(tmp_path, "run", "my.yaml")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["iteration"] == 2 and "time/iteration" in row]
    times = {name.removeprefix("time/stage/"): value for name, value in row.items() if name.startswith("time/stage/")}
    assert list(times) == ["rollout", "pay", "watch", "bonus", "later", "advantage", "update"]
    assert sum(times.values()) < row["time/iteration"]
    assert row["mine/reward_at_first"] == 0.0 and row["mine/reward"] == 2.5
    assert row["train/policy_loss"] == 0.0, "there were no advantages"
    chart = (tmp_path / "out" / "graph.mmd").read_text()
    assert "<b>bonus</b>" in chart and str(markupsafe.escape(chart)) in (tmp_path / "out" / "report.html").read_text()


def test_every_key_of_the_section_is_tested_here() -> None:
    assert [field.name for field in dataclasses.fields(PipelineConfig)] == ["function", "drop", "replace", "insert"]
    assert [field.name for field in dataclasses.fields(InsertedStage)] == ["name", "stage", "after", "before"]


FUNCTION = """\
from embodyrl.pipelines import Stage

def look(iteration):
    iteration.metrics["mine/rows"] = float(iteration.batch["valid"].sum())

def build(config):
    return [Stage("rollout", "collect"), Stage("look", look, reads=("valid",))]
"""


def test_a_function_of_ones_own_lists_the_stages(tmp_path: Path) -> None:
    (tmp_path / "my_graph.py").write_text(FUNCTION)
    (tmp_path / "my.yaml").write_text(SMALL + "pipeline: {function: my_graph:build}\n")
    done = embodyrl(tmp_path, "validate", "my.yaml")
    assert done.returncode == 2, "collect is not told of the critic, which gae has"
    assert "my.yaml:8:22: advantage 'gae' has a critic, but stage 'rollout' does not write its columns" in done.stderr
    assert "add writes=('values', 'next_values') to the stage" in done.stderr
    (tmp_path / "my_graph.py").write_text(FUNCTION.replace('"collect"', '"collect", writes=("values", "next_values")'))
    done = embodyrl(tmp_path, "validate", "my.yaml")
    assert "note: this config runs Python code of its own: my_graph:build" in done.stdout
    done = embodyrl(tmp_path, "validate", "my.yaml", "algorithm=reinforce_pp")
    assert "stage 'rollout' writes the columns of a critic, but advantage 'reinforce_pp' has none" in done.stderr
    done = embodyrl(tmp_path, "run", "my.yaml", "run.dir=again")
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["mine/rows"] == 16.0 and "train/approx_kl" not in row


def test_a_failing_stage_is_named_on_the_screen(tmp_path: Path) -> None:
    (tmp_path / "my_stages.py").write_text(
        STAGES_OF_ONES_OWN.replace('iteration.batch["rewards"]', 'iteration.batch["reward"]')
    )
    (tmp_path / "my.yaml").write_text(SMALL + "plugins: [my_stages]\npipeline: {replace: {reward: pay_nothing}}\n")
    done = embodyrl(tmp_path, "run", "my.yaml")
    assert done.returncode == 1
    assert "has no column 'reward' (has: " in done.stderr and "(in stage 'reward'" in done.stderr
    first = next(line for line in done.stderr.splitlines() if line.startswith("  File "))
    assert str(tmp_path / "my_stages.py") in first, "frames that led to the plug-in's own are left out"


def test_a_stage_that_cannot_be_imported_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "my_stages.py").write_text(
        "from embodyrl.registry import STAGES\n"
        "STAGES.register('look', 'my_stages:loook', reads=('rewards',), summary='looks at rewards')\n"
        "def look(iteration): ...\n"
    )
    (tmp_path / "my.yaml").write_text(SMALL + "plugins: [my_stages]\npipeline: {insert: [{name: a, stage: look}]}\n")
    done = embodyrl(tmp_path, "run", "my.yaml")
    message = "error: 'my_stages:loook' cannot be imported: module 'my_stages' has no 'loook' - did you mean 'look'?"
    assert done.returncode == 1 and message in done.stderr and not (tmp_path / "out" / "checkpoints").exists()
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.function=json:nothing"], "module 'json' has no 'nothing'"),
        (["pipeline.function=json:dumps"], "json:dumps failed: TypeError"),
        (
            ["pipeline.function=builtins:repr"],
            "builtins:repr returned a str - return a list of embodyrl.pipelines.Stage",
        ),
        (["pipeline.function=json"], "'json' names no function - write module:function"),
        (["pipeline.function=my_own.graphs:build"], "plug-in 'my_own.graphs' is neither in"),
    ],
)
def test_faults_of_a_function(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("experiment/gym_pendulum", overrides)
    (fault,) = caught.value.faults
    assert message in str(fault) and str(fault).startswith("command line: ")
