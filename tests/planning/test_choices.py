"""What a run takes for settings that are `auto`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from embodyrl.config import load_config
from embodyrl.config.build import with_values
from embodyrl.config.load import ConfigUse
from embodyrl.config.schema import Config, ParallelBackend
from embodyrl.engine.graphs import MOST
from embodyrl.models.saved import LARGE
from embodyrl.planning.choices import BACKEND, CHECKPOINTING, Fit, candidates, choose_memory, is_large
from embodyrl.planning.planner import Limits, Planner, graphs_of

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

NONE, HSDP, FSDP = ParallelBackend.none, ParallelBackend.hsdp, ParallelBackend.fsdp
GB = 1e9


def large(*overrides: str) -> Config:
    return load_config("metaworld_ppo_pi0", overrides, use=ConfigUse.elsewhere).config


def options(config: Config, ranks: int, here: int) -> list[tuple[Any, Any]]:
    return [(each[BACKEND], each[CHECKPOINTING]) for each in candidates(config, ranks, here)]


def test_candidates_come_the_fastest_first() -> None:
    assert options(large(), 1, 1) == [(NONE, False), (NONE, True)]
    assert options(large(), 8, 8) == [(NONE, False), (NONE, True), (FSDP, False), (FSDP, True)]
    assert [backend for backend, _ in options(large(), 16, 8)] == [NONE, NONE, HSDP, HSDP, FSDP, FSDP]
    assert HSDP not in dict(options(large(), 12, 8)), "machines have different numbers of ranks"
    assert HSDP not in dict(options(large(), 4, 1)), "machines have one each"


def test_what_the_config_says_is_not_chosen() -> None:
    said = large("engine.parallel.backend=fsdp", "engine.gradient_checkpointing=true")
    assert options(said, 8, 8) == [(FSDP, True)]
    eight_bits = with_values(large(), {("engine", "optimizer", "name"): "adamw_8bit"})  # its package may be missing
    assert options(eight_bits, 8, 8) == [(NONE, False), (NONE, True)]
    small = load_config("gym_pendulum").config
    assert options(small, 2, 2) == [(NONE, False), (FSDP, False)], "it has no layers"


def choose(config: Config, needs: list[float], limit: float | None = 100 * GB) -> tuple[Any, list[str]]:
    """The choice if the candidates need so much [GB], and the reasons."""
    left = iter(needs)
    values, choices = choose_memory(
        config, list(candidates(config, 8, 8)), lambda _: Fit(need=next(left) * GB, limit=limit)
    )
    return (values[BACKEND], values[CHECKPOINTING]), [str(choice) for choice in choices]


def test_the_first_that_fits_is_taken_and_the_reason_is_said() -> None:
    backend, checkpointing = "engine.parallel.backend=", "engine.gradient_checkpointing="
    assert choose(large(), [60]) == (
        (NONE, False),
        [
            f"{backend}none (each rank has room for a copy: 60 of 100 GB)",
            f"{checkpointing}false (the update fits as it is: 60 of 100 GB)",
        ],
    )
    assert choose(large(), [91, 60])[1] == [  # a tenth stays free
        f"{backend}none (each rank has room for a copy: 60 of 100 GB)",
        f"{checkpointing}true (without it the run would need 91 of 100 GB)",
    ]
    assert choose(large(), [140, 120, 70])[1] == [
        f"{backend}fsdp (a copy on each rank would need 120 of 100 GB)",
        f"{checkpointing}false (the update fits as it is: 70 of 100 GB)",
    ]
    assert choose(large(), [300, 200, 150, 120])[0] == (FSDP, True), "what needs the least is tried all the same"
    assert choose(large(), [300], limit=None) == (
        (NONE, False),
        [f"{backend}none (the memory is not known)", f"{checkpointing}false (the memory is not known)"],
    )


def test_large_models_have_large_files(tmp_path: Path) -> None:
    model = large().model
    assert is_large(model), "the published one, whose checkpoint is not here"
    assert not is_large(dataclasses.replace(model, checkpoint=None))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2 * LARGE - 1)
    here = dataclasses.replace(model, checkpoint=str(tmp_path))
    assert not is_large(here)
    with (tmp_path / "model-2.safetensors").open("wb") as file:
        file.write(b"1")
    assert is_large(here)


@pytest.mark.slow
def test_less_memory_is_shared_out_better() -> None:
    config = large("engine.parallel.world_size=8", "env.num_envs=64", "model.frozen=nothing", "model.denoising_steps=2")
    found = {}
    planned = Planner(Limits(cuda=True, gpu=None, host=None, cores=16), 1, None)
    for memory in (400, 80, 24):
        planned.limits["gpu"] = memory * GB
        chosen, choices = planned.chosen(config)
        found[memory] = chosen.engine.parallel.backend, chosen.engine.gradient_checkpointing
        assert not [place for place in planned.excesses(config) if place == "gpu"] or memory == 24
        assert {choice.setting for choice in choices} >= {"engine.parallel.backend", "engine.gradient_checkpointing"}
        values = {each["setting"]: each["value"] for each in planned.plan(config)["choices"]}
        assert values["engine.threads"] == 2 and values["engine.precision"] == "bfloat16"
        assert values["engine.cuda_graphs"] is (found[memory][0] is NONE)
    assert found == {400: (NONE, False), 80: (NONE, True), 24: (FSDP, True)}


def test_graphs_of_decisions_are_in_the_plan_if_there_is_room_for_them() -> None:
    config = load_config("gym_pendulum", ["env.num_envs=4", "engine.device=cuda"], use=ConfigUse.elsewhere).config
    assert graphs_of(config) == [4, 3, 2, 1]
    halved = [
        "rollout.schedule=pipeline",
        "rollout.blocks=2",
        "env.num_envs=12",
        "algorithm=grpo",
        "rollout.group_size=2",
    ]
    halved += ["rollout.episodes=whole", "env.max_episode_steps=100"]
    assert graphs_of(load_config("gym_pendulum", halved).config) == [3, 3, 3, 3, 2, 1], "in two blocks of two halves"
    assert len(graphs_of(load_config("gym_pendulum", ["env.num_envs=64"]).config)) == MOST

    def planned(room: float | None, *overrides: str) -> tuple[float, bool, str]:
        planner = Planner(Limits(cuda=True, gpu=room, host=None), 1, None)
        plan = planner.plan(with_values(config, {("engine", "cuda_graphs"): "off" not in overrides}))
        [choice] = [each for each in plan["choices"] if each["setting"] == "engine.cuda_graphs"] or [{"value": None}]
        return plan["needs"]["gpu"]["rollout"].get("CUDA graphs", 0.0), choice["value"], choice.get("why", "")

    held, value, why = planned(None)
    assert held > 0 and value and why == "decisions need nothing from the host"
    assert planned(1.0) == (0.0, False, "there is no room for 4 of them")
    assert planned(None, "off") == (0.0, None, "")
