"""Modules that a config lists under `plugins:`."""

from __future__ import annotations

import sys

import pytest

from embodyrl.config import ConfigError, load_config, to_commented_yaml

PLUGIN = '''
from dataclasses import dataclass

from embodyrl.config.schema import EnvConfig, setting
from embodyrl.registry import SIMULATORS


@dataclass(frozen=True, kw_only=True)
class MyOptions(EnvConfig):
    """Options."""

    friction: float = setting(1.0, above=0.0)
    """Friction [1]."""
    mode: str = setting("slow")
    """Speed."""


SIMULATORS.register("{name}", target="{name}:Simulator", options={options}, summary="a simulator")
'''


def config_for(name: str, more: str = "") -> str:
    return (
        f"defaults: [model: mlp, algorithm: ppo, _self_]\nplugins: [{name}]\n"
        f"env:\n  name: {name}\n  tasks: [there]\n  friction: 0.5\n{more}"
    )


def test_a_plugin_beside_the_file_brings_its_options(workplace):
    workplace.write(PLUGIN.format(name="sim_beside", options="MyOptions"), "sim_beside.py")
    config = workplace.load(config_for("sim_beside"))
    assert (type(config.env).__name__, config.env.friction, config.env.mode) == ("MyOptions", 0.5, "slow")
    assert "# Friction [1]." in to_commented_yaml(config)


def test_its_options_are_checked_like_any_other(workplace):
    workplace.write(PLUGIN.format(name="sim_checked", options="MyOptions"), "sim_checked.py")
    faults = workplace.faults(config_for("sim_checked", "  mood: fast\n"), "env.friction=-1")
    assert faults == [
        "my.yaml:7:3: unknown key 'env.mood' - did you mean 'env.mode'?",
        "command line: env.friction = -1 is too small - use a value above 0",
    ]


def test_the_command_line_can_name_plugins(workplace):
    workplace.write(PLUGIN.format(name="sim_by_override", options="MyOptions"), "sim_by_override.py")
    text = config_for("sim_by_override").replace("plugins: [sim_by_override]\n", "")
    assert workplace.load(text, "env.mode=3", "plugins=[sim_by_override]").env.mode == "3"


def test_another_folder_can_be_given(workplace):
    workplace.write(PLUGIN.format(name="sim_elsewhere", options="MyOptions"), "elsewhere/sim_elsewhere.py")
    path = workplace.write(config_for("sim_elsewhere"))
    loaded = load_config(path, plugin_dir=workplace.folder / "elsewhere")
    assert loaded.config.env.name == "sim_elsewhere"
    assert loaded.plugin_dir == workplace.folder / "elsewhere"


def test_a_plugin_that_lacks_a_package_says_which(workplace):
    workplace.write("import no_such_package_abc\n", "lacks_package.py")
    [fault] = workplace.faults(f"{GOOD}plugins:\n  - lacks_package\n")
    assert fault.startswith(
        "my.yaml:3:5: plug-in 'lacks_package' needs 'no_such_package_abc', which is not installed - "
    )


def test_paths_are_printed_without_detours(workplace, capsys):
    """As of a config that is named `../x/my.yaml`."""
    workplace.write("1 / 0\n", "divides.py")
    workplace.write(f"{GOOD}plugins: [divides, missing]\n")
    detour = workplace.folder / "other" / ".." / "my.yaml"
    (workplace.folder / "other").mkdir()
    with pytest.raises(ConfigError) as caught:
        load_config(detour)
    assert f"({workplace.folder / 'divides.py'}:1)" in str(caught.value)
    assert f"neither in {workplace.folder} nor installed" in str(caught.value)
    assert f"plug-in divides: {workplace.folder / 'divides.py'}\n" in capsys.readouterr().err


def test_a_plugin_with_a_syntax_error_says_where(workplace):
    workplace.write("x = 1\ndef f(:\n", "bad_syntax.py")
    [fault] = workplace.faults(f"{GOOD}plugins: [bad_syntax]\n")
    assert "my.yaml:2:11: plug-in 'bad_syntax' failed while it was imported: SyntaxError: " in fault
    assert "bad_syntax.py:2" in fault


def test_a_plugin_that_takes_a_name_twice_says_so(workplace):
    workplace.write(PLUGIN.format(name="metaworld", options="MyOptions"), "takes_name.py")
    [fault] = workplace.faults(f"{GOOD}plugins: [takes_name]\n")
    assert "simulator 'metaworld' is already registered (built-in): choose another name" in fault


def test_options_that_are_no_config_are_a_fault_of_the_name(workplace):
    workplace.write(PLUGIN.format(name="sim_wrong_options", options="int"), "sim_wrong_options.py")
    faults = workplace.faults(config_for("sim_wrong_options"))
    assert faults[0].startswith("my.yaml:4:9: the options of simulator 'sim_wrong_options' ")


def test_the_files_folder_does_not_shadow_installed_packages(workplace):
    workplace.write("raise RuntimeError\n", "typer.py")
    workplace.write("import typer\n", "imports_typer.py")
    workplace.load(f"{GOOD}plugins: [imports_typer]\n")
    assert "site-packages" in str(sys.modules["typer"].__file__)


GOOD = "defaults: [env: metaworld/reach, model: mlp, algorithm: ppo, _self_]\n"


INFO = '''
from embodyrl.config.infos import SimulatorInfo
from embodyrl.registry import SIMULATORS


class Mine(SimulatorInfo):
    """What is known."""
{body}

SIMULATORS.register("{name}", target="{name}:Simulator", info={info}, summary="a simulator")
'''


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def time_limit(self, env):\n        return 0", "Mine.time_limit returned 0, expected a number of control"),
        ("def time_limit(self, env):\n        return '40'", "Mine.time_limit returned '40', expected a number"),
        ("time_limit = 40", "Mine.time_limit is a int, which cannot be called"),
        ("def time_limit(self, env):\n        return nothing", "Mine.time_limit failed: NameError: name 'nothing'"),
        ("def tasks(self):\n        return 5", "Mine.tasks returned 5, expected a list of names, or None"),
        ("def tasks(self):\n        return 'there'", "Mine.tasks returned 'there', expected a list of names"),
        ("def check(self, config):\n        pass", "Mine.check returned None, expected an iterator of ConfigIssue"),
        ("def check(self, config):\n        return ['x']", "Mine.check returned ['x'], expected an iterator"),
        ("def action_dim(self, env):\n        return True", "Mine.action_dim returned True, expected a number 1 .."),
        ("def task_description(self, task):\n        return None", "Mine.task_description returned None, expected a"),
        ("def __init__(self):\n        pass", "Mine.__init__(self) is called with (name)"),
        ("def cameras(self, env):\n        return []", "Mine.cameras(self, env) is called with ()"),
        ("def camera(self):\n        return []", "Mine.camera answers nothing that is asked - did you mean 'cameras'?"),
        ("def max_steps(self, env):\n        return 3", "Mine.max_steps answers nothing that is asked (names of its"),
    ],
)
def test_what_a_plugin_knows_is_checked_when_it_is_asked(workplace, body, said, request):
    name = f"info_{request.node.callspec.indices['body']}"
    workplace.write(INFO.format(name=name, info="Mine", body=f"    {body}\n"), f"{name}.py")
    (fault,) = workplace.faults(config_for(name).replace("  friction: 0.5\n", ""))
    assert fault.startswith("my.yaml:4:9: ") and said in fault
    assert f"{name}.py:" in fault or "answers nothing" in fault


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ("'nothing:Mine'", "there is no module 'nothing'"),
        ("'Mine'", "there is no module 'Mine' (it is 'module:class', or the class)"),
        ("'{name}:Min'", "did you mean 'Mine'?"),
        ("'embodyrl.config.infos:ModelInfo'", "which is no subclass of embodyrl.config.infos.SimulatorInfo"),
    ],
)
def test_an_info_that_is_none_is_a_fault_where_the_simulator_is_named(workplace, info, said, request):
    name = f"named_{request.node.callspec.indices['info']}"
    text = INFO.format(name=name, info=info.format(name=name), body="")
    workplace.write(text, f"{name}.py")
    (fault,) = workplace.faults(config_for(name).replace("  friction: 0.5\n", ""))
    assert fault.startswith(f"my.yaml:4:9: simulator {name!r} is registered with info=") and said in fault


def test_a_plugin_that_answers_well_is_left_alone(workplace):
    body = (
        "    LIMIT = 7\n\n    def _own(self):\n        return self.LIMIT\n\n"
        "    def time_limit(self, env):\n        return self._own()\n\n"
        "    def tasks(self):\n        return ('there',)\n"
    )
    workplace.write(INFO.format(name="info_well", info="Mine", body=body), "info_well.py")
    config = workplace.load(config_for("info_well").replace("  friction: 0.5\n", ""))
    assert config.env.time_limit == 7
