"""Configs as commented YAML, as plain data, and their hash."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, make_dataclass

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from embodyrl.cli.main import app
from embodyrl.config import ConfigUse, config_hash, list_experiments, load_config, to_commented_yaml, to_plain
from embodyrl.config.build import inline
from embodyrl.config.common import common_settings
from embodyrl.config.fields import docs_of
from embodyrl.config.schema import Config
from embodyrl.errors import has_controls

PENDULUM = "defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]\n"


def test_the_document_loads_as_an_equal_config(workplace):
    """Of every shipped experiment: together they have all sections that options of components are in."""
    differ = []
    for experiment in list_experiments():
        config = load_config(experiment, use=ConfigUse.elsewhere).config  # some go on from what another run leaves
        text = to_commented_yaml(config)
        again = _load(workplace, text)
        if again != config or to_commented_yaml(again) != text or config_hash(again) != config_hash(config):
            differ.append(experiment)
    assert not differ


def _load(workplace, text: str) -> Config:
    """The config of a text, for another machine: here the environment's constructor would be asked for its
    arguments."""
    workplace.write(text)
    return load_config("my.yaml", use=ConfigUse.elsewhere).config


def test_every_value_survives(workplace):
    text = PENDULUM + (
        "seed: 9007199254740993\n"
        "run: {name: 'on', dir: 'a: b # c'}\n"
        "engine: {optimizer: {lr: 1e-5, eps: 1.0e-08, betas: [0.0, 0.999]}}\n"
        "algorithm: {bootstrap: none, gamma: 1}\n"
        "env:\n"
        "  kwargs: {texts: ['1e-5', 'null', 'yes', '', ' x', '- a', '[b', 'c,d', '2024-01-01', '1:30',"
        " 'é', \"a\\nb\\t\\u2028\"],\n"
        "    '1': .inf, on_: .nan, 'a b: c': {'?': [1, {x: null}, [true]]}, e: {}, l: [], dollar: '\\${x}'}\n"
    )
    config = _load(workplace, text)
    again = _load(workplace, to_commented_yaml(config))
    assert str(again.env.kwargs.pop("on_")) == str(config.env.kwargs.pop("on_")) == "nan"
    assert again == config
    assert (again.run.name, again.env.kwargs["texts"][-1]) == ("on", "a\nb\t\u2028")
    assert again.env.kwargs["dollar"] == "${x}"
    assert again.algorithm.bootstrap.name == "none"


letters = st.characters().filter(lambda letter: not has_controls(letter))
keys = st.text(letters, min_size=1)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(letters),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(keys, children, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(kwargs={}, text="-")
@given(kwargs=st.dictionaries(keys, plain, max_size=4), text=st.text(letters))
def test_any_free_form_map_and_any_text_survive(workplace, kwargs, text):
    config = _load(workplace, PENDULUM)
    config = dataclasses.replace(
        config, env=dataclasses.replace(config.env, kwargs=kwargs), run=dataclasses.replace(config.run, dir=text)
    )
    assert _load(workplace, to_commented_yaml(config)) == config


@pytest.mark.parametrize("value", [1e-5, 1e22, 1.0, 0.1, -3e300, 5e-324])
def test_floats_are_floats_to_any_yaml_reader(value):
    assert yaml.safe_load(inline(value)) == value


def test_one_key_per_line_each_with_its_documentation():
    lines = to_commented_yaml(load_config(None).config).splitlines()
    keys = [index for index, line in enumerate(lines) if line and not line.lstrip().startswith("#")]
    assert all(lines[index - 1].lstrip().startswith("#") for index in keys)
    assert all(len(line) <= 120 for line in lines)
    assert "  # Discount factor. [from 0 to 1]" in lines


@pytest.mark.parametrize("experiment", list_experiments())
def test_the_settings_that_are_changed_most_can_be_pasted_onto_a_command_line(experiment):
    config = load_config(experiment, use=ConfigUse.show).config
    lines = common_settings(config).splitlines()
    assert all(line.startswith("#") and len(line) <= 120 for line in lines)
    rows = [re.split(" +", line.removeprefix("#   "), maxsplit=1) for line in lines if line.startswith("#   ")]
    assert 12 <= len(rows) <= 25 and all(meaning for _, meaning in rows)
    settings = [setting for setting, _ in rows if not setting.endswith("=...")]
    assert {"run.iterations", "env.num_envs", "engine.optimizer.lr"} <= {each.partition("=")[0] for each in settings}
    assert load_config(experiment, settings, use=ConfigUse.show).config == config


def test_the_printed_config_begins_with_them_and_is_the_same_config(workplace):
    done = CliRunner().invoke(app, ["run", "gym_pendulum_sac", "--print-config"])
    assert done.output.startswith("# The settings that are changed most") and "#   algorithm.off_policy." in done.output
    assert _load(workplace, done.output) == load_config("gym_pendulum_sac").config


def test_limits_and_choices_follow_the_documentation_unless_it_explains_each_choice():
    text = " ".join(
        line.strip().removeprefix("# ") for line in to_commented_yaml(load_config(None).config).splitlines()
    )
    for shown in (
        "Nonlinearity between its layers. [one of tanh, relu, elu] activation:",
        "of usable cores. [1 or more, or auto] workers:",
        "of the value network. [each from 1 to 16384] hidden_sizes:",
        "Learning rate at the start. [above 0 and up to 10] lr:",
        "off: no binding. numa:",
    ):
        assert shown in text


def test_documentation_comes_from_base_classes_too():
    docs = docs_of(type(load_config(None).config.env))
    assert docs["num_envs"] and docs["end_at_success"]


def test_plain_data_is_json():
    config = load_config(None).config
    assert json.loads(json.dumps(to_plain(config))) == to_plain(config)
    assert to_plain(config)["algorithm"]["bootstrap"] == config.algorithm.bootstrap.name


def test_the_hash_changes_with_every_setting_but_the_run_directory():
    plain = config_hash(load_config(None).config)
    assert config_hash(load_config(None, ["run.dir=elsewhere"]).config) == plain
    assert config_hash(load_config(None, ["seed=2"]).config) != plain
    assert config_hash(load_config(None, ["algorithm.gamma=0.5"]).config) != plain
    assert len(plain) == 64


def test_configs_are_frozen():
    config = load_config(None).config
    assert isinstance(config, Config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.env.num_envs = 3


def test_documentation_of_classes_wherever_they_are_defined() -> None:
    @dataclass
    class Within:
        depth: int = 1
        """How deep
        it lies."""

        @dataclass
        class Inner:
            width: int = 2
            """How wide it is."""

    if Within:

        @dataclass
        class Sometimes(Within):
            height: int = 3
            """How high it is."""

    typed = make_dataclass("typed", [("side", int, 1)])
    assert docs_of(Within) == {"depth": "How deep it lies."}
    assert docs_of(Within.Inner) == {"width": "How wide it is."}
    assert docs_of(Sometimes) == {"depth": "How deep it lies.", "height": "How high it is."}
    assert docs_of(typed) == {}
