"""Defaults lists, groups and interpolations."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from slow import rest_slow

from embodyrl.config import ConfigError, ConfigUse, list_experiments, list_groups, list_options, load_config
from embodyrl.config.compose import components
from embodyrl.config.compose import compose as compose_source
from embodyrl.config.files import Source, builtin_folder, find_source, read_document

REST = "model: mlp, algorithm: ppo, _self_]\n"


def composed_here(source: Source, **groups: str):
    """The plain data as this package composes it."""
    return compose_source(source, read_document(source.path, source.file), groups).settings.data


def without_components(data):
    """Without the sections that another component begins anew, which Hydra would merge."""
    algorithm = {
        key: value for key, value in data.get("algorithm", {}).items() if ("algorithm", key) not in components()
    }
    return {**data, "algorithm": algorithm}


def composed_by_hydra(source: Source, *overrides: str):
    """The plain data as Hydra composes it."""
    search = f"hydra.searchpath=['file://{builtin_folder()}']"
    with initialize_config_dir(str(source.path.parent), version_base="1.3"):
        return OmegaConf.to_container(compose(source.path.stem, [search, *overrides]))


def test_shipped_experiments_are_without_fault():
    faults = {}
    for experiment in list_experiments():
        try:
            loaded = load_config(experiment, use=ConfigUse.elsewhere)  # some go on from what another run leaves
        except ConfigError as error:
            faults[experiment] = str(error)
        else:
            assert (loaded.source, loaded.path) == (experiment, None) and loaded.values > 40, experiment
    assert not faults


def test_every_simulator_group_fits_the_default_experiment():
    faults = {}
    for option in list_options("env"):
        try:
            assert load_config(None, [f"env={option}"]).config.env.tasks, option
        except ConfigError as error:
            faults[option] = str(error)
    assert not faults


def test_the_groups_are_listed():
    assert {"env", "model", "algorithm"} <= set(list_groups((builtin_folder(),)))
    assert "metaworld/reach" in list_options("env")
    assert "experiment/metaworld_reach" in list_experiments()


def first_of_each_algorithm() -> list[str]:
    """Experiments: others choose other simulators and models in the same kind of list."""
    first: dict[str, str] = {}
    for experiment in list_experiments():
        first.setdefault(re.search(r"algorithm: (\S+)", find_source(experiment).path.read_text())[1], experiment)
    return list(first.values())


@pytest.mark.parametrize("experiments", rest_slow([first_of_each_algorithm, list_experiments]))
def test_composition_is_that_of_hydra(experiments):
    differ = []
    for source in map(find_source, experiments()):
        # Only a choice of the defaults list can be another one: a mix of simulators is none, for both.
        chosen = re.search(r"^  - env: ", source.path.read_text(), re.MULTILINE) is not None
        for groups in ({}, {"env": "gym/pendulum"}) if chosen else ({},):
            hydras = composed_by_hydra(source, *(f"{group}={option}" for group, option in groups.items()))
            if without_components(composed_here(source, **groups)) != without_components(hydras):
                differ.append((source.path.stem, groups))
    assert not differ


def test_composition_is_that_of_hydra_also_for_intricate_lists(workplace):
    workplace.write(
        "defaults: [base, /env@extra: metaworld/reach, _self_]\nname: gymnasium\nkwargs: {a: {b: 1}}\n", "env/my.yaml"
    )
    workplace.write("tasks: [Base-v0]\nnum_envs: 3\nkwargs: {a: {c: 2}}\n", "env/base.yaml")
    workplace.write("# @package _global_\nrun: {iterations: 7}\nseed: 5\n", "length/short.yaml")
    workplace.write("# @package _global_\nrun: {iterations: 8}\n", "length/long.yaml")
    text = (
        "defaults: [_self_, {env: my}, {length: [short, long]}, {model@policy: mlp}, "
        "{optional env@other: not_there}, {algorithm: null}, {override env: my}]\n"
        "seed: 3\nenv: {num_envs: 4}\n"
    )
    source = find_source(workplace.write(text))
    assert composed_here(source) == composed_by_hydra(source)
    assert composed_here(source)["run"] == {"iterations": 8}


def test_programs_that_use_hydra_and_threads_are_not_disturbed(workplace):
    for number in range(6):
        workplace.write(f"num_envs: {number + 1}\n", f"env/of_{number}.yaml")
        workplace.write(f"defaults: [env: of_{number}]\n", f"config_{number}.yaml")
    sources = [find_source(workplace.folder / f"config_{number % 6}.yaml") for number in range(24)]
    own = workplace.write("mine: 1\n", "own/own.yaml")
    with initialize_config_dir(str(own.parent), version_base="1.3"), ThreadPoolExecutor(6) as pool:
        composed = list(pool.map(composed_here, sources))
        assert compose("own") == {"mine": 1}
    assert [each["env"]["num_envs"] for each in composed] == [number % 6 + 1 for number in range(24)]


def test_a_group_file_beside_the_config_is_found(workplace):
    workplace.write("name: metaworld\ntasks: [push-v3]\nnum_envs: 2\n", "env/my.yaml")
    config = workplace.load("defaults: [env: my, " + REST)
    assert (config.env.tasks, config.env.num_envs) == (["push-v3"], 2)


def test_it_hides_the_built_in_one_of_the_same_name(workplace):
    workplace.write("name: metaworld\ntasks: [push-v3]\n", "env/metaworld/reach.yaml")
    assert workplace.load("defaults: [env: metaworld/reach, " + REST).env.tasks == ["push-v3"]


def test_it_can_build_on_a_built_in_one(workplace):
    workplace.write("defaults: [metaworld/reach@_here_, _self_]\nnum_envs: 3\n", "env/my.yaml")
    config = workplace.load("defaults: [env: my, " + REST + "algorithm: {minibatches: 1}\n")
    assert (config.env.tasks, config.env.num_envs) == (["reach-v3"], 3)


def test_without_self_the_file_has_the_last_word(workplace):
    config = workplace.load("defaults: [env: metaworld/reach, model: mlp, algorithm: ppo]\nenv: {num_envs: 2}\n")
    assert config.env.num_envs == 2


def test_the_place_is_that_of_the_file_that_won(workplace):
    workplace.write("name: metaworld\ntasks: [push-v3]\nnum_envs: 0\nstep_timeout_s: 0\n", "env/my.yaml")
    faults = workplace.faults("defaults: [env: my, " + REST + "env:\n  num_envs: -1\n")
    assert faults[0].startswith("my.yaml:3:13: env.num_envs = -1 ")
    assert faults[1].startswith("env/my.yaml:4:17: env.step_timeout_s = 0 ")
    assert len(faults) == 2


def test_a_file_with_a_defaults_list_is_called_yaml(workplace):
    path = workplace.write("defaults: [env: metaworld/reach, " + REST, "my.yml")
    with pytest.raises(ValueError, match=r"my.yml:1:11: a file with a defaults list must end in .yaml - rename it"):
        load_config(path.name)


@pytest.mark.parametrize("name", ["a b.yaml", "it's.yaml", "x=1.yaml", "v1.2.yaml", "ü.yaml"])
def test_odd_file_names_work(workplace, name):
    workplace.write("defaults: [env: metaworld/reach, " + REST, f"odd, 'folder'/{name}")
    assert load_config(f"odd, 'folder'/{name}").config.env.name == "metaworld"


def test_interpolations_reach_every_setting_and_keep_its_type(workplace):
    text = "defaults: [env: gym/pendulum, " + REST
    text += "rollout: {num_chunks: '${env.max_episode_steps}'}\n"  # from a group file
    text += "eval: {first_start_state: '${env.start_states}'}\n"  # the schema's default
    text += "run: {name: 'Pendulum-v${seed}', dir: '\\${not_resolved}'}\n"
    text += "env: {tasks: ['${.other}'], num_envs: 4}\n".replace("${.other}", "${run.name}")
    config = workplace.load(text)
    assert config.rollout.num_chunks == config.env.max_episode_steps
    assert config.eval.first_start_state == config.env.start_states
    assert config.run.name == "Pendulum-v1"
    assert config.run.dir == "${not_resolved}"
    assert config.env.tasks == ["Pendulum-v1"]


def test_interpolated_values_are_checked_where_they_stand(workplace):
    [fault] = workplace.faults("defaults: [env: metaworld/reach, " + REST + "run:\n  iterations: ${env.name}\n")
    assert fault.startswith('my.yaml:3:15: run.iterations must be a whole number, got the text "metaworld"')


def test_an_interpolation_of_itself_is_a_fault(workplace):
    [fault] = workplace.faults("defaults: [env: metaworld/reach, " + REST + "seed: ${seed}\n")
    assert fault.startswith('my.yaml:2:7: seed = "${seed}" cannot be resolved')


def test_the_environment_can_be_read(workplace, monkeypatch):
    monkeypatch.setenv("MY_SEED_NAME", "seven")
    assert (
        workplace.load("defaults: [env: metaworld/reach, " + REST + "run: {name: '${oc.env:MY_SEED_NAME}'}\n").run.name
        == "seven"
    )


def test_anchors_and_merge_keys_work(workplace):
    start = "defaults: [env: gym/pendulum, " + REST
    config = workplace.load(start + "engine: {optimizer: {lr: &rate 0.5, eps: *rate}}\n")
    assert (config.engine.optimizer.lr, config.engine.optimizer.eps) == (0.5, 0.5)
    merged = workplace.load(start + "env: {kwargs: {<<: {g: 1.0}}}\n")
    assert merged.env.kwargs == {"g": 1.0}
    merged = workplace.load(start + "env: {kwargs: {<<: {g: 1.0}, g: 2.0}}\n")
    assert merged.env.kwargs == {"g": 2.0}


def test_a_bomb_of_aliases_is_refused(workplace):
    lines = [
        "defaults: [env: gym/pendulum, " + REST + "env:",
        "  kwargs:",
        "    a0: &a0 [x, x, x, x, x, x, x, x, x, x]",
    ]
    lines += [f"    a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert any("holds more than 20000 values" in fault for fault in workplace.faults("\n".join(lines) + "\n"))


def test_a_defaults_list_that_leads_back_to_itself_is_refused(workplace):
    faults = workplace.faults("defaults: [my, _self_]\n")
    assert faults[0] == "my.yaml:1:1: defaults: a file's list leads back to the file itself - fix the list"


def test_what_only_hydra_knows_to_be_wrong_is_a_fault_of_the_list(workplace):
    faults = workplace.faults("defaults: [env: metaworld/reach, env: gym/pendulum, model: mlp, algorithm: ppo]\n")
    assert faults[0].startswith("my.yaml:1:1: defaults: ")


def test_the_example_in_the_manual_is_without_fault(workplace):
    manual = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    example = re.search(r"```yaml\n(.*?)```", manual, re.DOTALL)
    config = workplace.load(example[1])
    assert (config.env.name, config.run.iterations) == ("maniskill", 200)
