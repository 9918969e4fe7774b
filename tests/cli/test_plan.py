"""`embodyrl plan`: where processes would go, on this machine and on copies of others."""

from __future__ import annotations

import functools
import json
import re
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
from embodyrl.planning.text import verdict

SMALL = ["experiment/gym_pendulum", "env.num_envs=4", "env.workers=2"]


def plan(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@functools.cache
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
    for words in ("env worker 0  0-1   1     2-3   node 1", "NUMA node 1, the GPU's", "OMP_NUM_THREADS=1"):
        assert words in text, text


def test_images_make_the_shared_segment() -> None:
    without = plan_json("experiment/metaworld_reach")["memory"]["shared_segment_mib"]
    images = ["env.cameras=[corner2]", "env.image_size=[100,200]", "env.num_envs=8"]
    with_them = plan_json("experiment/metaworld_reach", *images)["memory"]["shared_segment_mib"]
    assert with_them - without >= 8 * 100 * 200 * 3 / 2**20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cpus", "0-x"], "is not a list"),
        (["--cpus", ""], "names none"),
        (["--machine", "."], "holds no folder sys"),
        (["--machine", "{}"], "--cpus"),
    ],
)
def test_what_cannot_be_read_is_said(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    with pytest.raises(UserError, match=said):
        plan(*SMALL, *(word.format(tmp_path) for word in words))


IMAGES = ["experiment/gym_pendulum", "env=gym/pendulum_rgb", "model=openvla_oft", "engine.device=cuda"]


def test_what_the_policy_needs() -> None:
    planned = plan_json("experiment/metaworld_reach_grpo", "algorithm.kl_coef=0.1", "engine.device=cpu")
    assert planned["model"]["parameters"] == planned["model"]["trainable"] > 1000
    assert planned["model"]["tokens_per_observation"] == 0
    # What states, actions and task descriptions are is known, as Gymnasium's environments say it of themselves.
    assert planned["model"]["assumed"] == plan_json("experiment/gym_cartpole")["model"]["assumed"] == ""
    guessed = plan_json("experiment/gym_cartpole", "env=maniskill/push_cube")["model"]["assumed"]
    assert guessed == "states of 32 numbers, actions of 7 numbers, task descriptions of 16 words"
    learning = planned["learning"]
    assert learning["decisions_per_iteration"] == 64 * 100 and learning["optimizer_steps_per_iteration"] == 4 * 4
    assert learning["minibatch"] == learning["micro_batch"] == 1600 and learning["slots_decided_at_once"] == 64
    rollout, train = planned["needs"]["host"]["rollout"], planned["needs"]["host"]["train"]
    weights = planned["model"]["parameters"] * 4 / 2**20
    for phase in (rollout, train):
        assert phase["weights"] == pytest.approx(weights, abs=0.02) == phase["reference policy"]
        assert phase["optimiser"] == pytest.approx(2 * weights, abs=0.02)
        assert phase["total"] == pytest.approx(sum(phase.values()) - phase["total"], abs=0.1)
    assert "gradients" in train and "gradients" not in rollout
    assert planned["fits"] and planned["advice"] == []


def test_of_several_ranks_one_is_planned_and_the_main_memory_of_all() -> None:
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    two = "engine.parallel.world_size=2"
    alone, shared = plan_json(*IMAGES), plan_json(*IMAGES, two, "engine.parallel.backend=fsdp")
    copies = plan_json(*IMAGES, two)
    for key in ("micro_batch", "slots_decided_at_once"):
        assert alone["learning"][key] == 2 * shared["learning"][key] == 2 * copies["learning"][key]
    parts = {name: planned["needs"]["gpu"]["train"] for name, planned in (("alone", alone), ("shared", shared))}
    for part in ("weights", "optimiser", "gradients"):
        assert parts["shared"][part] == pytest.approx(parts["alone"][part] / 2, abs=0.02)
    assert parts["shared"]["weights of other ranks"] > 0 and "weights of other ranks" not in parts["alone"]
    assert copies["needs"]["gpu"]["train"]["weights"] == parts["alone"]["weights"]
    host = [planned["needs"]["host"]["both"]["rollout buffer"] for planned in (alone, shared)]
    part = shared["learning"]["minibatch"] / shared["learning"]["decisions_per_iteration"]
    assert host[1] == pytest.approx((1 + part) * host[0], rel=0.03), "images lie with one rank, but for a minibatch"
    assert part / 2 * parts["alone"]["batch"] < parts["shared"]["batch"] < 0.1 * parts["alone"]["batch"]
    said = list(verdict(shared))
    assert said[0].startswith("each GPU: ") and next(iter(verdict(alone))).startswith("GPU: ")


def test_what_stays_in_main_memory_is_not_counted_on_the_gpu_and_a_copy_to_be_saved_is() -> None:
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    steps = plan_json(*IMAGES, "rollout.observe=every_step", "run.save_async=true")
    once = plan_json(*IMAGES)
    assert steps["needs"]["gpu"]["train"]["batch"] == once["needs"]["gpu"]["train"]["batch"]
    assert steps["needs"]["host"]["both"]["rollout buffer"] > 1.9 * once["needs"]["host"]["both"]["rollout buffer"]
    learned = once["needs"]["gpu"]["train"]["weights"] + once["needs"]["gpu"]["train"]["optimiser"]
    assert steps["needs"]["host"]["both"]["copy to be saved"] == pytest.approx(learned, rel=0.1)
    assert "copy to be saved" not in once["needs"]["host"]["both"]


def test_the_rollout_buffer_is_mostly_images() -> None:
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    planned = plan_json(*IMAGES, "env.image_size=[64,128]", "rollout.num_chunks=100")
    images = 100 * 8 * 64 * 128 * 3 / 2**20
    assert images < planned["needs"]["host"]["both"]["rollout buffer"] < 1.02 * images
    assert planned["needs"]["gpu"]["train"]["batch"] == planned["needs"]["host"]["both"]["rollout buffer"]


def test_rollout_workers_and_what_travels_between_them_and_ranks(two_nodes: str) -> None:
    here = [*SMALL, "--machine", two_nodes, "--gpu-memory", "1"]
    apart = plan_json(*here, "placement.rollout.workers=1")
    (row,) = apart["layout"]
    assert row == {
        **{"machine": "local", "roles": "rank 0; rollout 0 (block 0)", "gpus": "0-1", "envs": "0-3"},
        "processes": 4,
    }
    assert apart["too_few_gpus"] is apart["idle_gpus"] is None and apart["traffic"] == {}
    assert apart["rollout_traffic"]["batch"] == apart["needs"]["host"]["both"]["batch in shared memory"] > 0
    assert apart["needs"]["host"]["both"]["rollout workers' processes"] > 500
    assert "rollout buffer" not in apart["needs"]["host"]["both"], "the rank learns from the worker's"
    shared = plan_json(*here, "placement.rollout={workers: 2, share_gpus: true}")
    assert shared["layout"][0]["roles"] == "rank 0; rollouts 0-1 (blocks 0-1)"
    assert shared["layout"][0]["gpus"] == "0" and shared["learning"]["slots_decided_at_once"] == 2
    gpu, alone = shared["needs"]["gpu"], plan_json(*here)["needs"]["gpu"]
    assert gpu["train"]["rollout workers' weights"] == pytest.approx(2 * gpu["train"]["weights"], abs=0.02)
    assert gpu["train"]["total"] > alone["train"]["total"] == pytest.approx(apart["needs"]["gpu"]["train"]["total"])
    assert shared["rollout_traffic"]["weights"] == pytest.approx(2 * apart["rollout_traffic"]["weights"], abs=0.02)
    assert "rollout buffer" not in shared["needs"]["host"]["both"], "nor are two parts copied"


@pytest.mark.slow
def test_rollout_workers_get_adapters_alone() -> None:
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    workers = ["placement.rollout.workers=2", "engine.device=cpu"]
    whole, adapters = plan_json(*IMAGES, *workers), plan_json(*IMAGES, *workers, "engine.lora.rank=2")
    assert adapters["rollout_traffic"]["weights"] < 0.7 * whole["rollout_traffic"]["weights"]
    assert adapters["rollout_traffic"]["weights"] == pytest.approx(2 * 4 * adapters["model"]["trainable"] / 2**20, 0.01)


def test_too_few_gpus_here_do_not_stop_the_plan(two_nodes: str) -> None:
    words = [*SMALL, "--machine", two_nodes, "placement.rollout.workers=2"]
    assert plan_json(*words)["too_few_gpus"].startswith("1 rank and 2 rollout workers need 3 GPUs, but there are 2: ")
    done = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "80"}, catch_exceptions=False)
    assert "too few: 1 rank and 2 rollout workers" in done.stdout
    table = done.stdout.partition("machine  roles")[2].partition("variables")[0]
    assert "rank 0; rollouts 0-1 (blocks 0-1)" in table
    assert all(len(line.rstrip()) <= 80 for line in table.splitlines())


@pytest.mark.slow
def test_what_does_not_fit_comes_with_settings_that_do() -> None:
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

    def needs(*settings: str) -> dict[str, int]:
        """Bytes of the learning and of the deciding policy, without a search for other settings."""
        return {part: need["total"] * 2**20 for part, need in plan_json(*IMAGES, *settings)["needs"]["gpu"].items()}

    text = plan(*IMAGES, "--gpu-memory", "0.8")
    found = re.search(r"try engine\.micro_batch_size=(\d+)\n", text)
    assert "does not fit: needs" in text and found is not None
    assert needs()["train"] > 0.8e9 > needs()["rollout"]
    micro = int(found.group(1))
    assert plan_json(*IMAGES, "--gpu-memory", "0.8", f"engine.micro_batch_size={micro}")["fits"]
    milder = needs(f"engine.micro_batch_size={2 * micro}")
    assert milder["train"] > 0.8e9, "a milder setting would have been enough"


def test_nothing_helps_against_far_too_little() -> None:
    text = plan(*SMALL, "engine.device=cuda", "--gpu-memory", "0.1")
    assert "no setting that was tried" in text and "simulators not counted (--start)" in text


def test_a_started_simulator_says_what_it_needs() -> None:
    planned = plan_json(*SMALL, "engine.device=cpu", "--start")
    assert planned["model"]["assumed"] is None and planned["model"]["parameters"] < 40_000  # 3 numbers in, 1 out
    assert 1 < planned["simulators_per_worker"] < 500
    assert 1 < planned["simulators_shared"] < 500, "the process that they are forked from"
    simulators = planned["needs"]["host"]["rollout"]["simulators"]
    own = 2 * planned["simulators_per_worker"]
    assert simulators == pytest.approx(own + planned["simulators_shared"], abs=0.03)


def test_a_model_that_cannot_be_looked_at_does_not_stop_the_plan(two_nodes: str) -> None:
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    words = ["experiment/gym_cartpole", "model=openvla", "env.cameras=[render]", "--start"]
    planned = plan_json(*words)
    assert planned["model"] is None and "one choice among n" in planned["why_not"] and planned["workers"]
    assert "cannot be planned: this simulator takes one choice" in plan(*words)


def test_a_machine_whose_memory_nobody_told(two_nodes: str) -> None:
    text = plan(*SMALL, "engine.device=cpu", "--machine", two_nodes)
    assert "main memory: needs" in text and "give the available memory with --memory" in text


@pytest.mark.slow
def test_the_published_size_is_planned_without_its_weights() -> None:
    """Figures by hand: 7.541e9 weights in bfloat16, their float32 copies and two moments of each."""
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    weights = ["model.checkpoint=<weights>", "model.dtype=bfloat16", "engine.micro_batch_size=1"]
    weights += ["engine.gradient_checkpointing=false"]
    planned = plan_json(*IMAGES, *weights, "rollout.chunk_size=8", "--gpu-memory", "160")
    assert planned["model"]["origin"].startswith("the published OpenVLA-OFT 7B")
    assert 7.541e9 < planned["model"]["parameters"] < 7.55e9 and 320 < planned["model"]["tokens_per_observation"] < 360
    train = planned["needs"]["gpu"]["train"]
    assert train["weights"] * 2**20 == pytest.approx(15.08e9, rel=0.01)
    assert train["optimiser"] * 2**20 == pytest.approx(12 * 7.5e9, rel=0.01)
    assert 15.08e9 + 12 * 7.5e9 < train["total"] * 2**20 < 160e9 and planned["fits"], "far from what an 80 GB GPU has"


def test_where_the_gpus_memory_is_not_known_main_memory_says_nothing_of_it() -> None:
    pytest.importorskip("tokenizers", reason="needs the extra vla")
    words = ["experiment/libero_spatial_grpo_smolvla", "engine.device=cuda", "--elsewhere", "--memory", "100"]
    (why,) = [
        choice["why"] for choice in plan_json(*words)["choices"] if choice["setting"] == "engine.gradient_checkpointing"
    ]
    assert why == "the memory is not known"
