"""A small network starts from weights that are its own, or says before anything starts why they are not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from embodyrl.config import ConfigError, load_config
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.models.build import build_policy
from embodyrl.models.mlp.options import Distribution, MLPConfig

REACH = SimulatorSpec(
    tasks={"reach-v3": "reach"},
    actions=(ActionField(name="arm", meaning="native", unit="1", low=(-1.0,) * 4, high=(1.0,) * 4),),
    proprio_dim=39,
    max_episode_steps=100,
    control_frequency=80.0,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy with a squashed head for metaworld/reach."""
    return saved(tmp_path / "policy", Distribution.squashed)


def saved(folder: Path, head: Distribution) -> Path:
    config = MLPConfig(name="mlp", head=head, hidden_sizes=[8])
    folder.mkdir(parents=True)
    build_policy(config, REACH, chunk_size=1, seed=0).save(folder, config)
    return folder


def faults(folder: Path, *settings: str) -> str:
    """What is said about a config that learns from a replay, from this checkpoint on."""
    given = [f"model.checkpoint={folder}", "model.hidden_sizes=[8]", "model.activation=tanh"]
    try:
        load_config("metaworld_reach_sac", [*given, *settings])
    except ConfigError as error:
        return str(error)
    return ""


def test_a_checkpoint_that_fits(folder: Path) -> None:
    assert faults(folder) == faults(folder, "model.activation=relu") == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["model.hidden_sizes=[16]"],
            "model.hidden_sizes = [16], but the policy in {} was saved with [8] - set",
        ),
        (["rollout.chunk_size=2"], "rollout.chunk_size = 2, but the policy in {} was saved with 1 - set"),
        (
            ["env.proprio=robot"],
            "the policy in {} was saved for states of 39 numbers, those of the simulator have 4 - ",
        ),
        (["env=gym/pendulum"], "was saved for actions of 4 numbers, those of the simulator have 1 - "),
    ],
)
def test_other_weights_are_found_before_anything_starts(folder: Path, settings: list[str], message: str) -> None:
    assert message.format(folder) in faults(folder, *settings)


def test_another_head_is_no_choice_for_a_replay(tmp_path: Path) -> None:
    folder = saved(tmp_path / "policy", Distribution.gaussian)
    message = (
        f"model.head = 'squashed', but the policy in {folder} was saved with 'gaussian' - name a checkpoint that has "
        "model.head = 'squashed', or set model.checkpoint to null\n1 fault"
    )
    assert message in faults(folder)


@pytest.mark.parametrize(("other", "remedy"), [("pi0", ""), ("cnn", "set model to cnn, ")])
def test_another_model_is_named(folder: Path, other: str, remedy: str) -> None:
    file = folder / "policy.json"
    file.write_text(file.read_text().replace('"mlp"', f'"{other}"'))
    assert (
        f"model.checkpoint = '{folder}' holds a policy of model '{other}', and model is 'mlp' - name one of model "
        f"'mlp', {remedy}or set it to null\n1 fault"
    ) in faults(folder)


def test_a_run_is_no_checkpoint_but_holds_one(tmp_path: Path) -> None:
    policy = saved(tmp_path / "run" / "checkpoints" / "last" / "policy", Distribution.squashed)
    assert f"holds no model.safetensors - name {policy}" in faults(tmp_path / "run")
    assert "holds no model.safetensors - name the folder `policy` of a checkpoint" in faults(tmp_path)


def test_a_damaged_description_is_told(folder: Path) -> None:
    description = folder / "policy.json"
    content = json.loads(description.read_text())
    content["spec"]["proprio_dim"] = str(content["spec"]["proprio_dim"])
    description.write_text(json.dumps(content))
    assert "policy.json is damaged (spec.proprio_dim is '39', no whole number)" in faults(folder)
    description.write_text("{")
    assert "model.checkpoint: " in faults(folder) and "policy.json is damaged" in faults(folder)
    description.unlink()
    assert faults(folder) == ""
    assert "reads states of 39 numbers, those of the simulator have 3 - " in faults(folder, "env=gym/pendulum")


def test_weights_that_are_cut_short_or_of_something_else(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    assert "model.safetensors is damaged or cut short" in faults(folder)
    save_file({"lm_head.weight": np.zeros(2, np.float32)}, weights)
    assert "model.safetensors holds lm_head.weight, and no weight of model 'mlp' (actor.*)" in faults(folder)
