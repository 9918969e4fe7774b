"""Every row of the tables of names that have changed."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from embodyrl.cli.main import main
from embodyrl.config import ConfigUse, load_config, to_plain
from embodyrl.config.renames import COLUMNS, METRICS, ONCE_OF_ALL_FILTERS, OPTIONS, REGISTERED, SETTINGS, newest_name
from embodyrl.registry import all_registries
from embodyrl.tracking.sinks import read_rows

DECOUPLED, GRPO, SRPO = "algorithm.loss=decoupled_ppo", "algorithm.advantage=grpo", "algorithm.reward=srpo"
SAVED: dict[str, tuple[str, list[str], Any]] = {
    "algorithm.loss.clip_low": ("metaworld_reach", [], 0.11),
    "algorithm.loss.clip_high": ("metaworld_reach", [], 0.12),
    "algorithm.loss.dual_clip": ("metaworld_reach", [], 3.5),
    "algorithm.loss.behaviour_cap": ("metaworld_reach", [DECOUPLED], 4.5),
    "algorithm.loss.behaviour_excess": ("metaworld_reach", [DECOUPLED], "clamp"),
    "algorithm.loss.drift_coef": ("metaworld_reach", ["algorithm.loss=cpgd"], 0.5),
    "algorithm.advantage.gae_lambda": ("metaworld_reach", [], 0.9),
    "algorithm.advantage.mean_level": ("metaworld_reach_grpo", [GRPO], "batch"),
    "algorithm.advantage.std_level": ("metaworld_reach_grpo", [GRPO], "batch"),
    "algorithm.advantage.leave_one_out": ("metaworld_reach_grpo", [GRPO], True),
    "algorithm.advantage.unbiased": ("metaworld_reach_grpo", [GRPO], False),
    "algorithm.advantage.eps": ("metaworld_reach_grpo", [GRPO], 0.001),
    "algorithm.reward.encoder": ("metaworld_reach_grpo", [SRPO], "random_projection"),
    "algorithm.reward.frames": ("metaworld_reach_grpo", [SRPO], 32),
    "algorithm.reward.dim": ("metaworld_reach_grpo", [SRPO], 32),
    "algorithm.reward.compat": ("metaworld_reach_grpo", [SRPO], "siirl"),
    "algorithm.reward.scale": ("metaworld_reach_grpo", [SRPO], 0.5),
    "algorithm.reward.steepness": ("metaworld_reach_grpo", [SRPO], 9.0),
    "algorithm.max_collections": ("metaworld_reach_dapo", [], 7),
    "env.task_descriptions": ("metaworld_reach", [], {"reach-v3": "go"}),
    "eval.first_start_state": ("metaworld_reach", [], 77777),
    "rollout.num_chunks": ("metaworld_reach", [], 256),
    "engine.parallel.world_size": ("metaworld_reach", [], 1),
    "model.relative_action_dims": ("metaworld_ppo_pi0", [], 3),
}
"""By the present name: an experiment, settings with which it has this one, and a value."""


def put(data: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Put a value into nested sections, which are made."""
    *sections, last = name.split(".")
    for section in sections:
        if not isinstance(data.get(section), dict):
            data[section] = {}
        data = data[section]
    data[last] = value
    return data


def take(data: dict[str, Any], name: str) -> Any:
    """Take a value out of nested sections."""
    *sections, last = name.split(".")
    for section in sections:
        data = data[section]
    return data.pop(last)


@pytest.mark.parametrize("old", SETTINGS)
def test_a_setting_answers_with_its_new_name(workplace, old) -> None:
    data: dict[str, Any] = {"defaults": [{"env": "metaworld/reach"}, {"model": "mlp"}, {"algorithm": "ppo"}, "_self_"]}
    answer = f"unknown key {old!r} - renamed to {newest_name(old, SETTINGS)!r}"
    [fault] = workplace.faults(json.dumps(data), f"{old}=1")
    assert fault.startswith(f"command line: {answer}")
    put(data, old, 1)
    [fault] = workplace.faults(json.dumps(data))
    place, _, said = fault.partition(": ")
    assert place.startswith("my.yaml:1:") and said.startswith(answer)


@pytest.mark.parametrize("old", SETTINGS)
def test_a_saved_config_with_the_old_name_loads_to_the_same_config(workplace, old) -> None:
    new = newest_name(old, SETTINGS)
    experiment, overrides, value = SAVED[new]
    written = json.dumps(value).replace('"', "")  # command lines take no quoted keys
    chosen = [*overrides, f"{new}={written}"]
    now = load_config(experiment, chosen, use=ConfigUse.show).config
    data = to_plain(now)
    assert take(data, new) == value
    put(data, old, value)
    workplace.write('{"source": "my.yaml", "plugin_dir": "/nowhere"}', "run/origin.json")
    saved = workplace.write(json.dumps(data), "run/config.yaml")
    assert load_config(saved, use=ConfigUse.show).config == now


@pytest.mark.parametrize("name", ONCE_OF_ALL_FILTERS)
def test_a_saved_config_has_options_of_a_filter_whatever_filter_it_chose(workplace, name) -> None:
    now = load_config("metaworld_reach", use=ConfigUse.show).config
    data = to_plain(now)
    put(data, name, "success" if name.endswith("metric") else 0.5)
    workplace.write('{"source": "my.yaml", "plugin_dir": "/nowhere"}', "run/origin.json")
    saved = workplace.write(json.dumps(data), "run/config.yaml")
    assert load_config(saved, use=ConfigUse.show).config == now


@pytest.mark.parametrize("old", OPTIONS)
@pytest.mark.parametrize("form", ["{} video", "{}=video"])
def test_an_option_answers_with_its_new_name(capsys, monkeypatch, old, form) -> None:
    words = ["collect", "metaworld_reach", "--episodes", "1", *form.format(old).split()]
    monkeypatch.setattr(sys, "argv", ["embodyrl", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: unknown option {old!r} - renamed to {OPTIONS[old]!r}\n"
    monkeypatch.setattr(sys, "argv", ["embodyrl", "collect", "--help"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().out
    assert OPTIONS[old] in shown and old not in shown


@pytest.mark.parametrize(("kind", "old"), [(kind, old) for kind, rows in REGISTERED.items() for old in rows])
def test_a_registered_component_answers_with_its_new_name(workplace, kind, old) -> None:
    [registry] = [registry for registry in all_registries() if registry.kind == kind]
    new = newest_name(old, REGISTERED[kind])
    assert new in registry and old not in registry
    assert kind == "stage"  # of another kind, write below where a config names it
    text = "defaults: [env: metaworld/reach, model: mlp, algorithm: sft, _self_]\ndata: {path: demos}\n"
    text += f"pipeline: {{replace: {{update: {old}}}}}\n"
    faults = workplace.faults(text)
    [fault] = [fault for fault in faults if "is not registered" in fault]
    assert fault.startswith(f"my.yaml:3:30: stage {old!r} is not registered (registered: ")
    assert fault.endswith(f" - renamed to {new!r}")


@pytest.mark.parametrize("old", METRICS)
def test_rows_of_an_earlier_version_have_the_new_metric(tmp_path, old) -> None:
    rest = "anything" if old.endswith("/") else ""
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"iteration": 3, old + rest: 2.5, "loss": 1.0}) + "\n")
    assert read_rows(path) == ([{"iteration": 3, newest_name(old, METRICS) + rest: 2.5, "loss": 1.0}], 0)


@pytest.mark.parametrize("old", COLUMNS)
def test_a_batch_of_an_earlier_version_loads_with_the_new_column(tmp_path, old) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from tests.rollout.test_batch import batch_of

    now, path = batch_of(), tmp_path / "batch.safetensors"
    now.save(path)
    with safe_open(path, framework="pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = {newest_name(old, COLUMNS): old}
    assert names.keys() & {*header, *tensors}
    header = {names.get(name, name): value for name, value in header.items()}
    save_file({names.get(name, name): value for name, value in tensors.items()}, path, metadata=header)
    loaded = type(now).load(path)
    assert loaded.equals(now) and torch.equal(loaded["task_index"], now["task_index"])
