"""Checking a config needs neither torch nor a simulator."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import pytest

from embodyrl.envs.gymnasium.tasks import own_tasks
from embodyrl.registry import SIMULATORS

PROBE = """
import sys
from embodyrl.config import ConfigError, list_experiments, load_config, to_commented_yaml
for experiment in list_experiments():
    if "dm_control" in experiment or "lift" in experiment:  # what tasks there are only their suites know
        continue
    try:
        to_commented_yaml(load_config(experiment).config)
    except ConfigError as error:  # its simulator is not installed, or what it starts from not made
        lacking = ("not installed", "not on this machine", "no Vulkan driver", "demonstrations", "model.checkpoint")
        assert all(any(words in fault.message for words in lacking) for fault in error.faults), error
heavy = ("torch", "metaworld", "mujoco", "mani_skill", "sapien", "tensorboard", "tensordict", "ray")
print(sorted(name for name in heavy if name in sys.modules))
"""


def test_gymnasium_is_imported_only_for_ids_that_are_not_its_own():
    probe = "import sys; from embodyrl.config import load_config; load_config({!r}); print('gymnasium' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", probe.format("gym_pendulum")], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.strip() == "False"
    assert "Pendulum-v1" in own_tasks().keys() <= set(gymnasium.registry)


@pytest.mark.parametrize("name", ["gymnasium", "metaworld", "libero", "maniskill"])
def test_simulator_processes_import_nothing_that_reads_configs(name):
    if missing := SIMULATORS.entry(name).missing():
        pytest.skip(f"{missing[0].module} is not installed")
    module = f"embodyrl.envs.{name}.simulator"
    probe = f"import sys, {module}; print(*sorted({{'hydra', 'omegaconf', 'yaml', 'torch'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n"


def test_nothing_heavy_is_imported():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "[]"


def test_a_simulator_process_does_not_need_hydra():
    probe = "import sys, embodyrl.config.schema, embodyrl.envs.options; print('hydra' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "False"


def test_the_help_of_the_command_line_needs_neither_hydra_nor_the_schema():
    heavy = {"hydra", "omegaconf", "yaml", "embodyrl.config.schema"}
    probe = f"import sys, embodyrl.cli.main; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "set()"


def test_runs_of_small_models_need_no_library_of_large_ones():
    heavy = {"timm", "transformers", "tokenizers", "torchvision"}
    modules = "embodyrl.engine.hybrid, embodyrl.runner.build, embodyrl.runner.runner, embodyrl.methods.replay.rules"
    probe = f"import sys, {modules}; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "set()"


def test_what_is_not_installed_is_one_fault_here_and_a_note_for_another_machine():
    probe = """
import sys
sys.modules |= dict.fromkeys(("pyarrow", "tokenizers", "transformers", "timm"))
from embodyrl.config import ConfigError, ConfigUse, load_config
experiment = "experiment/tiny_oft_sft"
try:
    load_config(experiment, use=ConfigUse.check)
except ConfigError as error:
    print(*(fault.message for fault in error.faults), sep="\\n")
print(*load_config(experiment, use=ConfigUse.elsewhere).notes, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=240)
    lacking = [
        "model 'openvla_oft' is not installed (it needs the packages 'transformers', 'timm')",
        "algorithm 'sft' is not installed (it needs the package 'pyarrow')",
    ]
    lines = done.stdout.splitlines()
    assert set(lacking) <= set(lines)
    assert {f"unchecked until the run: {each}" for each in lacking} <= set(lines)
    assert sum("cannot be loaded" in line for line in lines) == 0
