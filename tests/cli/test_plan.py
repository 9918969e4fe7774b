"""`embodyrl plan`: where processes would go, on this machine and on copies of others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "placement"))  # where `fake_machine` is

from fake_machine import make_machine

from embodyrl.cli.main import app
from embodyrl.errors import UserError
from embodyrl.placement.topology import parse_ids

SMALL = ["experiment/gym_pendulum", "env.num_envs=4", "env.workers=2"]


def plan(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def plan_json(*words: str) -> dict[str, Any]:
    return dict(json.loads(plan("--json", *words)))


def test_this_machine() -> None:
    planned = plan_json(*SMALL)
    assert [worker["slots"] for worker in planned["workers"]] == ["0-1", "2-3"]
    allowed = set(parse_ids(planned["machine"]["cpus"]))
    assert all(set(parse_ids(worker["cpus"])) <= allowed for worker in planned["workers"])
    assert planned["env_vars"]["OMP_NUM_THREADS"] == "1"


@pytest.fixture
def two_nodes(tmp_path: Path) -> str:
    gpus = {"0000:3b:00.0": 1, "0000:af:00.0": 0}
    return str(make_machine(tmp_path, {0: "0-1", 1: "2-3"}, online_cpus="0-3", gpus=gpus))


def test_another_machine(two_nodes: str) -> None:
    planned = plan_json(*SMALL, "env.num_envs=8", "env.workers=4", "engine.device=cpu", "--machine", two_nodes)
    assert [worker["numa_node"] for worker in planned["workers"]] == [0, 0, 1, 1]
    assert [worker["memory_node"] for worker in planned["workers"]] == [0, 0, 1, 1]
    assert [worker["cpus"] for worker in planned["workers"]] == ["0-1", "0-1", "2-3", "2-3"]
    assert [gpu["node"] for gpu in planned["machine"]["gpus"]] == [1, 0]


def test_env_numa_and_the_policys_device_decide(two_nodes: str) -> None:
    off = plan_json(*SMALL, "env.numa=off", "--machine", two_nodes)
    assert {worker["numa_node"] for worker in off["workers"]} == {None} and "is off" in off["numa"]
    beside_gpu = plan_json(*SMALL, "--machine", two_nodes)
    assert [worker["numa_node"] for worker in beside_gpu["workers"]] == [1, 1]


def test_only_some_cpus(two_nodes: str) -> None:
    planned = plan_json(*SMALL, "--machine", two_nodes, "--cpus", "1,3", "engine.device=cpu")
    assert [worker["cpus"] for worker in planned["workers"]] == ["1", "3"]


def test_the_table_says_the_same(two_nodes: str) -> None:
    text = plan(*SMALL, "--machine", two_nodes)
    for words in ("env worker 0  0-1    1     2-3   node 1", "NUMA node 1, the GPU's", "OMP_NUM_THREADS=1"):
        assert words in text, text


def test_pictures_make_the_shared_segment() -> None:
    without = plan_json("experiment/metaworld_reach")["memory"]["shared_segment_mib"]
    pictures = ["env.cameras=[corner2]", "env.image_size=[100,200]", "env.num_envs=8"]
    with_them = plan_json("experiment/metaworld_reach", *pictures)["memory"]["shared_segment_mib"]
    assert with_them - without >= 8 * 100 * 200 * 3 / 2**20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cpus", "0-x"], "is not a list"),
        (["--machine", "."], "holds no folder sys"),
        (["--machine", "{}"], "--cpus"),
    ],
)
def test_what_cannot_be_read_is_said(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    with pytest.raises(UserError, match=said):
        plan(*SMALL, *(word.format(tmp_path) for word in words))
