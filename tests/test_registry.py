from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from embodyrl import registry
from embodyrl.config.infos import model_info, simulator_info
from embodyrl.errors import DuplicateNameError, MissingPackageError, PluginError, UnknownNameError
from embodyrl.registry import ADVANTAGES, REWARDS, SIMULATORS, STAGES, Entry, Registry, Requirement, SystemLibrary

HOME = """
from shelf import SHELF

SHELF.register("hammer", target="tools:Hammer", summary="hits nails")
SHELF.register("saw", target="tools:Saw", summary="cuts wood")
"""


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry whose home declares two tools that are never imported unless asked for."""
    registry: Registry = Registry("tool", home="shelf_home", group="embodyrl.tests.none", entry=Entry)
    module = type(sys)("shelf")
    module.SHELF = registry
    monkeypatch.setitem(sys.modules, "shelf", module)
    for name in ("shelf_home", "tools"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "shelf_home.py").write_text(HOME)
    (tmp_path / "tools.py").write_text("class Hammer: ...\nclass Saw: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return registry


def test_a_component_is_imported_only_when_it_is_loaded(shelf: Registry) -> None:
    assert shelf.names() == ["hammer", "saw"] and "tools" not in sys.modules
    assert shelf.load("hammer").__name__ == "Hammer"


def test_a_target_that_names_nothing_says_so(shelf: Registry, tmp_path: Path) -> None:
    shelf.register("chisel", target="tools:Hamer", summary="cuts stone")
    shelf.register("plane", target="shed.tools:Plane", summary="smooths")
    shelf.register("rasp", target="rasps:Rasp", summary="scrapes")
    (tmp_path / "rasps.py").write_text("import iron_that_is_not_there\n")
    with pytest.raises(PluginError, match=r"'tools:Hamer' .* module 'tools' has no 'Hamer' - did you mean 'Hammer'"):
        shelf.load("chisel")
    with pytest.raises(PluginError, match=r"'shed\.tools:Plane' cannot be imported: there is no module 'shed'"):
        shelf.load("plane")
    with pytest.raises(ModuleNotFoundError, match="iron_that_is_not_there"):
        shelf.load("rasp")


def test_an_unknown_name_brings_the_near_match_and_the_list(shelf: Registry) -> None:
    message = r"tool 'hamer' is not registered - did you mean 'hammer'\? \(registered: hammer, saw\)"
    with pytest.raises(UnknownNameError, match=message):
        shelf.entry("hamer")


def test_a_taken_name_is_refused_even_if_nobody_looked_before(shelf: Registry) -> None:
    with pytest.raises(DuplicateNameError, match=r"tool 'saw' is already registered \(built-in\)"):
        shelf.register("saw", target=object, summary="another saw")


def test_entries_say_where_they_come_from(shelf: Registry) -> None:
    shelf.register("drill", target=object, summary="makes holes")
    assert {entry.name: entry.source for entry in shelf.entries()} == {
        "hammer": "built-in",
        "saw": "built-in",
        "drill": "plug-in",
    }


def test_a_missing_package_brings_its_install_command(shelf: Registry) -> None:
    needs = [Requirement(module="no_such_package_xyz", install="pip install xyz")]
    shelf.register("laser", target="tools:Laser", summary="burns", requires=needs)
    assert shelf.entry("laser").missing() == needs
    with pytest.raises(MissingPackageError, match=r"'laser' needs no_such_package_xyz, .* pip install xyz"):
        shelf.load("laser")


def test_a_missing_system_library_is_a_missing_requirement_too(shelf: Registry) -> None:
    there = SystemLibrary(module="libc.so.6", install="none")
    absent = SystemLibrary(module="libnosuchthing.so.9", install="apt install nosuchthing")
    shelf.register("mill", target="tools:Saw", summary="grinds", requires=[there, absent])
    with pytest.raises(MissingPackageError, match=r"'mill' needs libnosuchthing\.so\.9, .* apt install nosuchthing"):
        shelf.load("mill")


def test_entry_points_are_called_and_a_broken_one_is_named(
    shelf: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.group = "embodyrl.tests.tools"
    registry._entry_points.cache_clear()
    (tmp_path / "vendor.py").write_text(
        "from shelf import SHELF\n"
        "def register():\n    SHELF.register('vise', target=object, summary='holds')\n"
        "def broken():\n    raise ValueError('out of steel')\n"
    )
    info = tmp_path / "vendor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[embodyrl.tests.tools]\nvise = vendor:register\n")
    assert shelf.entry("vise").source == "entry point vise"

    shelf._filled, shelf._entries = False, {}
    registry._entry_points.cache_clear()
    monkeypatch.delitem(sys.modules, "shelf_home")
    (info / "entry_points.txt").write_text("[embodyrl.tests.tools]\nvise = vendor:broken\n")
    with pytest.raises(PluginError, match=r"entry point 'vise' .*out of steel.*uninstall or fix"):
        shelf.names()


def test_what_has_to_be_told_of_a_component_is_required() -> None:
    with pytest.raises(
        TypeError, match=r"advantage 'mine' is registered without 'critic' and 'whole': add critic=\.\.\."
    ):
        ADVANTAGES.register("mine", target=print, summary="mine")
    with pytest.raises(TypeError, match=r"reward 'mine' is registered without 'summary': add summary=\.\.\. \(str; "):
        REWARDS.register("mine", target=print, whole=False)
    assert "mine" not in ADVANTAGES and "mine" not in REWARDS


def test_what_no_entry_has_is_refused_with_the_near_match() -> None:
    with pytest.raises(
        TypeError, match=r"registered with 'critc', which no AdvantageEntry has - did you mean 'critic'\?"
    ):
        ADVANTAGES.register("mine", target=print, summary="mine", critc=False, critic=False, whole=False)
    with pytest.raises(TypeError, match=r"stage 'mine' is registered with 'read', .* did you mean 'reads'\?"):
        STAGES.register("mine", target=print, summary="mine", read=("rewards",))
    assert "mine" not in ADVANTAGES and "mine" not in STAGES


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"info": ["front"]}, r"info=\['front'\], expected the class, or 'module:class'$"),
        (
            {"cameras": "mine:names"},
            r"cameras='mine:names': write it as method 'cameras' of a subclass of embodyrl.config.infos.SimulatorInfo, "
            r"and register that with info='module:class'$",
        ),
        ({"options": dataclasses.fields}, r"options=<function .*, expected their dataclass, or 'module:class'"),
    ],
)
def test_a_simulator_is_registered_with_a_class_of_what_is_known_of_it(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"simulator 'mine' is registered with {message}"):
        SIMULATORS.register("mine", target=print, summary="mine", **given)
    assert "mine" not in SIMULATORS


def test_what_is_known_is_a_class_of_the_right_kind_without_misspelt_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SIMULATORS, "_entries", dict(SIMULATORS._entries))
    SIMULATORS.register("mine", target=print, summary="mine", info="embodyrl.config.infos:ModelInfo")
    with pytest.raises(PluginError, match=r"info='.*:ModelInfo', which is no subclass of .*\.SimulatorInfo$"):
        simulator_info("mine")
    SIMULATORS.register("other", target=print, summary="other", info="embodyrl.config.infos:SimulatorInf")
    with pytest.raises(PluginError, match="did you mean 'SimulatorInfo'"):
        simulator_info("other")
    assert simulator_info("unknown").tasks() is None and model_info("unknown").executed(Path()) == {}


def test_a_registration_as_it_was_written_before_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"write them as arguments of their own, critic=False, whole=True$"):
        ADVANTAGES.register("mine", target=print, summary="mine", facts={"critic": False, "whole": True})


def test_entries_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ADVANTAGES.entry("gae").critic = False
