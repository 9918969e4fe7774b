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
