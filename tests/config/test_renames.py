"""Every row of the tables of names that have changed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from embodyrl.cli.main import app, main
from embodyrl.config import ConfigUse, load_config, to_plain
from embodyrl.config.fields import choices_of, settings_of
from embodyrl.config.renames import (
    COLUMNS,
    COMMANDS,
    METRICS,
    ONCE_OF_ALL_FILTERS,
    OPTIONS,
    PEERS,
    REGISTERED,
    SETTINGS,
    newest_name,
)
from embodyrl.config.schema import Config
from embodyrl.registry import all_registries
from embodyrl.runs.metrics import read_rows

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


GOOD = "defaults: [env: metaworld/reach, model: mlp, algorithm: ppo, _self_]\n"


def all_settings() -> set[str]:
    """Every setting of every component."""
    found = set()

    def walk(section: type, path: str) -> None:
        for each in choices_of(section):
            for name, setting in settings_of(each).items():
                found.add(f"{path}{name}")
                if setting.section is not None:
                    walk(setting.section, f"{path}{name}.")

    walk(Config, "")
    return found


def test_words_of_other_libraries_lead_to_settings_and_commands_that_exist() -> None:
    settings = all_settings()
    sections = {name.partition(".")[0] for name in settings}
    commands = set(typer.main.get_group(app).commands)
    for word, answer in PEERS.items():
        named = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", re.sub(r"hf://\S+", "", answer))
        assert all(name in settings for name in named), f"{word}: {answer}"
        assert named or re.search(r"`embodyrl (\w+)", answer) or re.match(r"\w+", answer)[0] in sections, answer
        assert all(name in commands for name in re.findall(r"`embodyrl (\w+)", answer)), answer
    assert set(COMMANDS.values()) <= commands and not set(COMMANDS) & commands


def test_each_word_of_another_library_is_answered(workplace) -> None:
    for word, answer in PEERS.items():
        [fault] = workplace.faults(GOOD, f"{word}=1")
        assert fault == f"command line: unknown key {word!r} - in embodyrl: {answer}"


def test_words_of_another_library_are_found_below_sections_that_nobody_knows(workplace) -> None:
    faults = workplace.faults(GOOD + "actor:\n  optim: {value_lr: 1, foo: 2}\n  global_batch_size: 8\nrunner: {x: 1}\n")
    places = [fault.split(" - ")[0] for fault in faults]
    assert places == [
        "my.yaml:3:11: unknown key 'actor.optim.value_lr'",
        "my.yaml:4:3: unknown key 'actor.global_batch_size'",
        "my.yaml:5:1: unknown key 'runner'",
    ]
    assert "embodyrl migrate" in faults[2]


@pytest.mark.parametrize(
    ("written", "meant"),
    [("data.n_steps", "data.steps"), ("env.n_envs", "env.num_envs"), ("run.Iterations", "run.iterations")],
)
def test_a_near_match_in_the_same_section_comes_first(workplace, written, meant) -> None:
    [fault] = workplace.faults(GOOD, f"{written}=1")
    assert fault.endswith(f"did you mean {meant!r}?")


def test_an_option_of_another_component_is_no_word_of_another_library(workplace) -> None:
    faults = workplace.faults(GOOD, "algorithm=grpo", "algorithm.advantage.gae_lambda=0.9")
    (fault,) = [each for each in faults if "gae_lambda" in each]
    assert fault.endswith("remove it, or choose 'gae': algorithm.advantage 'grpo' has no such option")


@pytest.mark.parametrize("written", ["algorithm=PPO", "model=MLP", "env=MetaWorld/Reach", "env=CartPole-v1"])
def test_names_are_guessed_whatever_their_case(workplace, written) -> None:
    [fault] = workplace.faults(GOOD, written)
    meant = "gym/cartpole" if "CartPole" in written else written.partition("=")[2].lower()
    assert f"did you mean {meant!r}?" in fault


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("train my.yaml", "no command 'train' - in embodyrl: `embodyrl run`"),
        ("evaluate", "no command 'evaluate' - in embodyrl: `embodyrl eval`"),
        (
            "run --n-steps 8",
            "unknown option '--n-steps' - settings are KEY=VALUE, without dashes; in embodyrl: rollout.num_",
        ),
        (
            "run --policy.type=act",
            "unknown option '--policy.type' - settings are KEY=VALUE, without dashes; in embodyrl: mo",
        ),
        ("run x --seed 3", "unknown option '--seed' - settings are KEY=VALUE, without dashes: seed=..."),
        (
            "validate --run.iterations=3",
            "unknown option '--run.iterations' - settings are KEY=VALUE, without dashes: run.it",
        ),
    ],
)
def test_commands_and_options_of_other_libraries_are_answered(capsys, monkeypatch, words, answer) -> None:
    monkeypatch.setattr(sys, "argv", ["embodyrl", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"error: {answer}")


def test_the_page_for_users_of_other_libraries_names_words_that_are_answered() -> None:
    """In its tables, the left column."""
    page = (Path(__file__).parents[2] / "docs/coming_from.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    words = {word.rpartition(".")[2] for row in rows for word in re.findall(r"`([a-z_.]+)[`:]", row.split("|")[1])}
    assert len(words) > 40
    assert words <= {*PEERS, *(name.rpartition(".")[2] for name in all_settings())}


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

    from tests.rollout.spread_program import equal
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
    assert equal(loaded, now) and torch.equal(loaded["task_index"], now["task_index"])
