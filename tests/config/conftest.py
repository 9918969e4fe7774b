"""Helpers for tests of the config front."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

import pytest

from embodyrl.config import ConfigError, load_config
from embodyrl.registry import ALGORITHMS, SIMULATORS, Entry, Registry, all_registries

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
def no_strangers(monkeypatch) -> None:
    """Only what comes with embodyrl is registered, whether or not its packages are installed here and what else it
    finds on this machine, and plug-ins that other tests imported are imported anew."""
    for registry in all_registries():
        entries = [entry for entry in registry.entries() if entry.source == "built-in"]
        own = {
            entry.name: dataclasses.replace(entry, requires=(), facts=_anywhere(registry, entry)) for entry in entries
        }
        monkeypatch.setattr(registry, "_entries", own)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith((str(BROKEN), tempfile.gettempdir())):
            del sys.modules[name]


def _anywhere(registry: Registry, entry: Entry) -> dict[str, object]:
    """The facts of an entry without those that look at this machine; tests/envs has tests of them."""
    here = {"tasks", "cameras"} if entry.missing() else set()
    if registry in (SIMULATORS, ALGORITHMS):
        here |= {"check", "check_here"}
    return {name: fact for name, fact in entry.facts.items() if name not in here}


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Workplace:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return Workplace(tmp_path)
