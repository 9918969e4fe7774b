"""Helpers for tests of the config front."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

import pytest

from embodyrl.config import ConfigError, load_config
from embodyrl.config.infos import SimulatorInfo, simulator_info
from embodyrl.methods.replay import rules as replay_rules
from embodyrl.methods.reward_classifier.config import RewardClassifierConfig
from embodyrl.methods.sft.config import SFTConfig
from embodyrl.registry import SIMULATORS, Entry, Registry, all_registries

BROKEN = Path(__file__).parent / "broken"
GOOD = """\
defaults: [env: metaworld/reach, model: mlp, algorithm: ppo, _self_]
"""


class Workplace:
    """A folder with config files, which is also the working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, text: str, name: str = "my.yaml") -> Path:
        """Write a file below the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def load(self, text: str = GOOD, *overrides: str):
        """Load `text` as my.yaml."""
        self.write(text)
        return load_config("my.yaml", overrides).config

    def faults(self, text: str = GOOD, *overrides: str) -> list[str]:
        """What is wrong with `text`, one line each."""
        self.write(text)
        with pytest.raises(ConfigError) as caught:
            load_config("my.yaml", overrides)
        return [str(fault) for fault in caught.value.faults]


@pytest.fixture(autouse=True)
def no_strangers(monkeypatch, tmp_path_factory) -> None:
    """What tests of the config front see of this machine."""
    leave_strangers_out(monkeypatch, tmp_path_factory.getbasetemp())


def leave_strangers_out(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have only registered what comes with embodyrl, whether or not its packages are installed here and what else it
    finds on this machine, and have plug-ins that other tests imported imported anew, from `folder` and `broken/`."""
    # Not everything below the temporary folder: this checkout may lie there itself.
    plugins = (f"{BROKEN}/", f"{folder}/")
    for registry, own in _built_in():
        patch.setattr(registry, "_entries", dict(own))
    for check in ("check_demonstrations", "check_for_critics"):  # read them, which are not here
        patch.setattr(replay_rules, check, lambda config: ())
    for kind in (SFTConfig, RewardClassifierConfig):
        patch.setattr(kind, "check", lambda algorithm, config: ())
    for name, module in list(sys.modules.items()):
        if str(vars(module).get("__file__", "")).startswith(plugins):
            del sys.modules[name]


@functools.cache
def _built_in() -> list[tuple[Registry, dict[str, Entry]]]:
    """What comes with embodyrl, by name."""
    found = []
    for registry in all_registries():
        entries = [entry for entry in registry.entries() if entry.source == "built-in"]
        own = [dataclasses.replace(entry, requires=(), **_not_asked(registry, entry)) for entry in entries]
        found.append((registry, {entry.name: entry for entry in own}))
    return found


def _not_asked(registry: Registry, entry: Entry) -> dict[str, type]:
    """What is known of a simulator, without what looks at this machine; tests/envs has tests of that."""
    if registry is not SIMULATORS:
        return {}
    here = ["tasks", "cameras", "task_description", "further_tasks"] if entry.missing() else []
    if entry.name != "gymnasium":  # which is always installed
        here += ["check", "check_here"]
    info = type(simulator_info(entry.name))
    return {"info": type(info.__name__, (info,), {name: getattr(SimulatorInfo, name) for name in here})}


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Workplace:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return Workplace(tmp_path)
