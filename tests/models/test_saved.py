"""A saved policy remembers the options that it was built with."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from embodyrl.cli.main import app
from embodyrl.config import ConfigError, load_config
from embodyrl.config.schema import Precision
from embodyrl.envs import ActionField
from embodyrl.hub import HubError, push
from embodyrl.models import Policy, PolicyError, PolicyObservation, SupportedModel, build_policy, load_policy
from embodyrl.models.pi.config import Pi0Config
from embodyrl.models.saved import DESCRIPTION_FILE, from_own_folder, other_options, own_folder_settings, weight_type
from embodyrl.models.vla.config import WeightType
from embodyrl.planning.planner import Simulators
from embodyrl.runner.build import build_acting
from embodyrl.runner.session import header
from tests.parity import formula

FOUR = ActionField(name="all", meaning="native", unit="1", low=(-1.0,) * 4, high=(1.0,) * 4)
SPEC = dataclasses.replace(formula.SPEC, cameras=("corner4",), proprio_dim=4, actions=(FOUR,))  # as MetaWorld's
TINY = ["env=metaworld/faucets", "model=pi0", "algorithm=grpo", "rollout.group_size=2", "rollout.episodes=whole"]
TINY += ["model.state=none", "rollout.chunk_size=4"]
CHANGED = ["model.denoising_steps=3", "model.scratch.layers=1", "model.value_sizes=[8]"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Path]:
    config = load_config("gym_cartpole", [*TINY, *CHANGED]).config
    policy, folder = build_policy(config.model, SPEC, chunk_size=4, seed=1), tmp_path_factory.mktemp("saved")
    policy.save(folder, config.model)
    return policy, folder


def test_it_is_loaded_with_them(saved: tuple[Policy, Path]) -> None:
    policy, folder = saved
    again = load_policy("pi0", checkpoint=folder, simulator=SPEC)
    assert again.spec == policy.spec and again.spec.proprio_dim == 0
    draw = np.random.default_rng(0)
    observation = PolicyObservation(
        images=torch.from_numpy(draw.integers(0, 256, (2, len(SPEC.cameras), 40, 40, 3), dtype=np.uint8)),
        task_descriptions=list(SPEC.tasks.values())[:2],
    )
    acts = [each.act(each.preprocess(observation), "eval").actions for each in (policy, again)]
    assert torch.equal(*acts)
    other = load_policy("pi0", checkpoint=folder, simulator=SPEC, denoising_steps=2, chunk_size=2)
    assert other.act(other.preprocess(observation), "eval").actions.shape[1] == 2
    assert not torch.equal(other.act(other.preprocess(observation), "eval").actions, acts[0][:, :2])


@pytest.mark.parametrize(
    "name", ["pi0", "pi05", "pi0_fast", "gr00t", "gr00t_n16", "gr00t_n17", "openvla", "openvla_oft"]
)
def test_it_is_built_from_its_folder_and_saved_again_byte_for_byte(name: str, tmp_path: Path) -> None:
    """So a run that was stopped goes on without what it was made from, and leaves the same files."""
    options: Any = SupportedModel.entry(name).load_options()
    config = options(name=name)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    build_policy(config, SPEC, chunk_size=1, seed=1).save(first, config)
    again = build_policy(from_own_folder(config, first), SPEC, chunk_size=1, seed=2)
    again.save(second, config)
    names = [path.relative_to(first) for path in sorted(first.rglob("*")) if path.is_file()]
    assert names == [path.relative_to(second) for path in sorted(second.rglob("*")) if path.is_file()]
    for each in names:
        assert (first / each).read_bytes() == (second / each).read_bytes(), each


def test_settings_that_point_elsewhere_are_taken_back(
    saved: tuple[Policy, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an exported policy's card says on how to train it further."""
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    Path("elsewhere/tokenizer.json").touch()
    made = ["model.statistics=elsewhere/stats.json", "model.tokenizer=elsewhere/tokenizer.json"]
    config = load_config("gym_cartpole", [*TINY, "model.checkpoint=<weights>", *made]).config.model
    settings = own_folder_settings(config, str(saved[1]))
    assert settings == [f"model.checkpoint={saved[1]}", "model.statistics=null", "model.tokenizer=null"]
    again = load_config("gym_cartpole", [*TINY, *made, *settings]).config.model
    assert again == from_own_folder(config, saved[1])
    assert own_folder_settings(load_config("gym_cartpole", TINY).config.model, ".") == ["model.checkpoint=."]


def test_a_config_that_differs_is_told(saved: tuple[Policy, Path], tmp_path: Path) -> None:
    """Not of weights' type, noise level and shape, nor where the folder was saved by another model or by nobody."""
    folder = saved[1]
    same = [*TINY, *CHANGED[::2], f"model.checkpoint={folder}", "model.noise_level=0.3", "model.dtype=bfloat16"]
    assert other_options(load_config("gym_cartpole", same).config.model) == []
    different = [*same, "model.state=token", "model.denoising_steps=5"]
    printed = CliRunner().invoke(app, ["validate", "gym_cartpole", *different]).output
    assert "note: the checkpoint was saved with other options: model.denoising_steps = 5 (it was 3), " in printed
    assert "model.state = 'token' (it was 'none')" in printed
    assert "the checkpoint was saved with other options: model.den" in header(
        load_config("gym_cartpole", different), folder
    )
    assert "the checkpoint was saved" not in header(load_config("gym_cartpole", same), folder)
    public = Path(shutil.copytree(folder, tmp_path / "public"))
    description = json.loads((public / DESCRIPTION_FILE).read_text())
    description["options"]["name"] = "pi05"
    (public / DESCRIPTION_FILE).write_text(json.dumps(description))
    elsewhere = [*different, f"model.checkpoint={public}"]
    assert other_options(load_config("gym_cartpole", elsewhere).config.model) == []
    (public / DESCRIPTION_FILE).unlink()
    assert other_options(load_config("gym_cartpole", elsewhere).config.model) == []
    assert other_options(load_config("gym_cartpole", TINY).config.model) == []


def test_a_damaged_description(saved: tuple[Policy, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved[1], tmp_path / "damaged"))
    (folder / DESCRIPTION_FILE).write_text("{")
    with pytest.raises(PolicyError, match=r"policy\.json is damaged"):
        load_policy("pi0", checkpoint=folder, simulator=SPEC)


def test_a_model_that_needs_its_simulator_says_so(tmp_path: Path) -> None:
    options: Any = SupportedModel.entry("mlp").load_options()
    build_policy(options(name="mlp"), SPEC, chunk_size=1, seed=1).save(tmp_path, options(name="mlp"))
    with pytest.raises(
        PolicyError, match=r"'mlp' cannot be built without .*: pass simulator=.*embodyrl\.load_policy\(run"
    ):
        load_policy("mlp", checkpoint=tmp_path)
    assert load_policy("mlp", checkpoint=tmp_path, simulator=SPEC).spec.proprio_dim == 4


def checkpoint_of(folder: Path, **tensors: torch.Tensor) -> Pi0Config:
    save_file(tensors, folder / "model.safetensors")
    return Pi0Config(name="pi0", checkpoint=str(folder))


def test_weights_are_held_in_the_type_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = checkpoint_of(tmp_path, most=torch.zeros(20, 5, dtype=torch.bfloat16), head=torch.zeros(30))
    assert weight_type(here) is WeightType.float32, "few weights need no saving"
    monkeypatch.setattr("embodyrl.models.saved.LARGE", 100)
    assert weight_type(here) is WeightType.bfloat16
    assert weight_type(here, precision=Precision.float32) is WeightType.float32
    assert weight_type(dataclasses.replace(here, dtype=WeightType.float32), gpu=True) is WeightType.float32
    wide = checkpoint_of(tmp_path, most=torch.zeros(20, 5), head=torch.zeros(30, dtype=torch.float16))
    assert weight_type(wide) is WeightType.float32
    assert weight_type(wide, gpu=True) is WeightType.bfloat16
    assert weight_type(dataclasses.replace(here, checkpoint=None), gpu=True) is WeightType.float32
    assert weight_type(dataclasses.replace(here, checkpoint="elsewhere")) is WeightType.bfloat16


def test_a_run_goes_on_in_the_type_that_it_was_saved_in(saved: tuple[Policy, Path], tmp_path: Path) -> None:
    policy, config = saved[0], load_config("gym_cartpole", [*TINY, *CHANGED]).config
    copy.deepcopy(policy).bfloat16().save(tmp_path, config.model)
    for folder, dtype in ((saved[1], torch.float32), (tmp_path, torch.bfloat16)):
        found = build_acting(config, Simulators(spec=SPEC, bytes_per_worker=0, bytes_shared=0), folder).policy
        assert found.get_parameter(next(name for name, _ in found.named_parameters())).dtype is dtype


def test_links_out_of_a_checkpoint_are_not_followed(saved: tuple[Policy, Path], tmp_path: Path) -> None:
    """Nor pipes; what they lead to was read, saved with the policy, exported and uploaded."""
    secret = tmp_path / "secret" / "key.json"
    secret.parent.mkdir()
    secret.write_text('{"token": 1}')
    faults = []
    for name, target in (
        ("innocent.json", str(secret)),
        ("assets/robot/norm_stats.json", "../../../secret/key.json"),
        ("model.safetensors", str(secret)),
        ("assets", str(secret.parent)),
        ("chain.json", "../chain"),
        ("pipe.json", None),
    ):
        folder = tmp_path / "brought"
        shutil.copytree(saved[1], folder)
        (tmp_path / "chain").unlink(missing_ok=True)
        (tmp_path / "chain").symlink_to(secret)
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        if target is None:
            os.mkfifo(place)
        else:
            place.symlink_to(target)
        wanted = f"{place} is " + (
            "neither a file nor a folder" if target is None else f"a link to {target!r}, outside"
        )
        with pytest.raises(PolicyError) as caught:
            load_policy("pi0", checkpoint=folder, simulator=SPEC)
        with pytest.raises(ConfigError) as checked:
            load_config("gym_cartpole", [*TINY, f"model.checkpoint={folder}"])
        with pytest.raises(HubError) as refused:
            push(folder, "me/policy")
        said = (str(caught.value), str(checked.value), str(refused.value))
        faults += [(name, text) for text in said if wanted not in text]
        shutil.rmtree(folder)
    assert not faults


def test_links_within_a_checkpoint_and_to_the_blobs_of_the_cache_are_followed(
    saved: tuple[Policy, Path], tmp_path: Path
) -> None:
    snapshot, blobs = tmp_path / "snapshots" / ("a" * 40), tmp_path / "blobs"
    shutil.copytree(saved[1], blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (snapshot / "again.json").symlink_to("policy.json")
    (snapshot / "gone.json").symlink_to("nowhere.json")
    assert load_policy("pi0", checkpoint=snapshot, simulator=SPEC).spec == saved[0].spec
