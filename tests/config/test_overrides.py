"""`key=value` on the command line."""

from __future__ import annotations

import pytest

from embodyrl.config import ConfigError, ConfigUse, load_config

PENDULUM = "defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]\n"


def test_values_are_read_by_their_type(workplace):
    config = workplace.load(
        PENDULUM,
        "run.iterations=3",
        "algorithm.gamma=1e-1",
        "env.tasks=[CartPole-v1,CartPole-v0]",
        "env.success_return=null",
        "algorithm.normalize_advantages=false",
        "algorithm.bootstrap=none",
        "algorithm.target_kl=null",
        "engine.optimizer={lr: 0.5}",
    )
    assert (config.run.iterations, config.algorithm.gamma, config.env.tasks) == (3, 0.1, ["CartPole-v1", "CartPole-v0"])
    assert config.algorithm.normalize_advantages is False
    assert config.algorithm.bootstrap.value == "none"
    assert config.algorithm.target_kl is None
    assert (config.engine.optimizer.lr, config.engine.optimizer.eps) == (0.5, 1e-5)


@pytest.mark.parametrize("text", ["123", "1e-5", "true", "/tmp/a[b]=c,d", "a b", "nan", "x{y}", "'quoted'"])
def test_text_settings_take_what_was_typed(workplace, text):
    assert workplace.load(PENDULUM, f"run.dir={text}").run.dir == text.strip("'")


def test_null_is_null_where_it_may_be_and_else_the_word(workplace):
    config = workplace.load(PENDULUM + "run: {dir: somewhere}\n", "run.dir=null", "run.name=null")
    assert config.run.dir is None
    assert config.run.name == "null"


def test_the_command_line_beats_the_file_and_the_last_one_wins(workplace):
    assert workplace.load(PENDULUM + "seed: 2\n", "seed=3", "seed=4").seed == 4


def test_a_group_choice_replaces_that_of_the_file(workplace):
    config = workplace.load(PENDULUM, "env=metaworld/reach")
    assert config.env.name == "metaworld"
    assert not hasattr(config.env, "kwargs")


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_free_form_maps_take_new_keys_with_or_without_plus(workplace, sign):
    workplace.write(PENDULUM + "env: {kwargs: {a: 1}}\n")
    added = [f"{sign}env.kwargs.g=9.8", f"{sign}env.kwargs.b.c=[1]"]
    config = load_config("my.yaml", added, use=ConfigUse.elsewhere).config  # where nobody asks the constructor
    assert config.env.kwargs == {"a": 1, "g": 9.8, "b": {"c": [1]}}


FAULTS = {
    "run.iteration=3": "unknown key 'run.iteration' - did you mean 'run.iterations'?",
    "rnu.iterations=3": "unknown key 'rnu' - did you mean 'run'?",
    "gamma=0.9": "unknown key 'gamma' - did you mean 'algorithm.gamma'?",
    "hydra.run.dir=x": "unknown key 'hydra' - remove it (keys here: ",
    "seed=x": 'seed must be a whole number, got the text "x" - write a whole number, as in 1',
    "seed='3'": 'seed must be a whole number, got the text "3" - remove the quotes',
    "seed=-1": "seed = -1 is too small - use a value of 0 or more",
    "algorithm.gamma=nan": "algorithm.gamma must be a finite number, got .nan - write a number, as in 0.99",
    "engine.device=cudda": "engine.device must be one of auto, cpu, cuda; got \"cudda\" - did you mean 'cuda'?",
    "env.name=gymansium": "simulator 'gymansium' is not registered - did you mean 'gymnasium'? (registered: ",
    "env=gym/pendulmu": "config group 'env' has no option 'gym/pendulmu' - did you mean 'gym/pendulum'? (",
    "env/gym=pendulum": "env/gym=pendulum chooses from a group that the file's defaults list does not have - add ",
    "a/b=c": "no config group 'a/b' - `embodyrl list configs` shows them",
    "env=null": "env has no settings - give it some, or remove the line",
    "+env.num_envs=3": "'+env.num_envs' would add a setting that exists - write env.num_envs=...",
    "++env.num_envs=3": "'+env.num_envs' would add a setting that exists - write env.num_envs=...",
    "+env.new=3": "'+env.new' would add a setting that nothing reads - only free-form maps take new keys",
    "+new.key=3": "'+new.key' would add a setting that nothing reads - only free-form maps take new keys",
    "+model=mlp": "'+model=mlp' would add to the defaults list - write model=mlp to choose another model",
    "~seed": "'~seed': settings cannot be deleted - set it to a value, or leave it out of the file",
    "~env.kwargs=3": "'~env.kwargs=3': settings cannot be deleted - set it to a value, or leave it out of the file",
    "env.num_envs.x=3": "env.num_envs is a single setting and has no 'x' below it - write env.num_envs=3",
    "env.tasks[0]=x": "'env.tasks[0]=x' is not an override - set the whole list, as in 'env.tasks=[a,b]'",
    "env@other=x": "'env@other=x' is not an override - write env=x",
    "seed": "'seed' is not an override - write key=value, as in run.iterations=50",
    "=3": "'=3' is not an override - write key=value, as in run.iterations=50",
    "seed=1,2": "the value of seed=1,2 cannot be read (several values; a list needs brackets",
    "env.tasks=[a": "the value of env.tasks=[a cannot be read (",
    "seed='${run.iteration}'": 'seed = "${run.iteration}" cannot be resolved (',
    "seed='${'": 'seed = "${" is no complete interpolation - write ${section.setting}, ',
    "env.workers=3": "env.num_envs = 8 cannot be spread over env.workers = 3 - set env.workers to 2 or 4, ",
    "plugins=[no_such_plugin]": "plug-in 'no_such_plugin' is neither in ",
}


@pytest.mark.parametrize("override", FAULTS)
def test_fault(workplace, override):
    [fault] = workplace.faults(PENDULUM + "env: {num_envs: 8}\n", override)
    assert fault.startswith("command line: " + FAULTS[override])


def test_faults_of_file_and_command_line_come_together(workplace):
    faults = workplace.faults(PENDULUM + "sed: 1\n", "rum.name=x", "foo", "env.num_envs=0")
    assert [fault.split(": ")[0] for fault in faults] == ["my.yaml:2:1", "command line", "command line", "command line"]


def test_an_override_mends_a_fault_of_the_file(workplace):
    assert workplace.load(PENDULUM + "seed: -1\n", "seed=1").seed == 1


def test_a_file_without_defaults_list_offers_no_groups(workplace):
    [fault] = [fault for fault in workplace.faults("seed: 1\n", "env=gym/pendulum") if "chooses from" in fault]
    assert "add `- env: gym/pendulum` to that list, or set single values, as in env.name=..." in fault


def test_many_overrides_on_the_built_in_default():
    loaded = load_config(None, ["env=gym/pendulum", "env.kwargs.g=1", "rollout.num_chunks=${env.max_episode_steps}"])
    assert (loaded.config.env.name, loaded.config.env.kwargs, loaded.config.rollout.num_chunks) == (
        "gymnasium",
        {"g": 1},
        200,
    )
    with pytest.raises(ConfigError, match="command line: unknown key 'sede'"):
        load_config(None, ["sede=1"])
