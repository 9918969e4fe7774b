"""The schema itself: every setting is documented, typed so that it can be checked, and read by some code."""

from __future__ import annotations

import ast
import inspect
import typing
from enum import Enum
from pathlib import Path

import pytest

import embodyrl
from embodyrl.config.fields import choices_of, docs_of, registry_of, settings_of
from embodyrl.config.schema import AdvantageConfig, Config, FilterConfig, LossConfig, RewardConfig


def all_sections(section: type = Config) -> list[type]:
    """Every dataclass of the schema, with the options of the built-in components."""
    found = [candidate for candidate in choices_of(section) if candidate.__module__.startswith("embodyrl.")]
    for candidate in list(found):
        for setting in settings_of(candidate).values():
            below = setting.section or setting.section_of_entries
            if below is not None:
                found += all_sections(below)
    return list(dict.fromkeys(found))


SETTINGS = [(section, setting) for section in all_sections() for setting in settings_of(section).values()]
CODE = [path for path in Path(embodyrl.__file__).parent.rglob("*.py") if "config" not in path.parts]


def name_of(section: type, setting) -> str:
    return f"{section.__name__}.{setting.name}"


def test_the_walk_reaches_the_options_of_components():
    names = {section.__name__ for section in all_sections()}
    assert {"Config", "OptimizerConfig", "MLPConfig", "MetaWorldConfig", "GymnasiumConfig"} <= names


@pytest.mark.parametrize(("section", "setting"), SETTINGS, ids=[name_of(*pair) for pair in SETTINGS])
def test_every_setting_is_documented(section, setting):
    assert len(docs_of(section)[setting.name]) >= 10


@pytest.mark.parametrize("section", all_sections(), ids=lambda section: section.__name__)
def test_every_section_says_what_it_is(section):
    assert section.__doc__ and not section.__doc__.startswith(section.__name__ + "(")


@pytest.mark.parametrize(("section", "setting"), SETTINGS, ids=[name_of(*pair) for pair in SETTINGS])
def test_every_type_is_one_that_can_be_checked(section, setting):
    kinds = setting.kinds
    if len(kinds) > 1:
        assert set(kinds) <= {int, float, str} or set(kinds) == {bool, str}
        assert setting.field.metadata["words"] or str not in kinds
        return
    [kind] = kinds
    if typing.get_origin(kind) is list:
        [kind] = typing.get_args(kind)
    elif typing.get_origin(kind) is dict:
        key, kind = typing.get_args(kind)
        assert key is str
        if kind is typing.Any:
            return
    is_section = kind in (setting.section, setting.section_of_entries)
    assert kind in (bool, int, float, str) or issubclass(kind, Enum) or is_section


@pytest.mark.parametrize(("section", "setting"), SETTINGS, ids=[name_of(*pair) for pair in SETTINGS])
def test_every_default_is_within_its_own_limits(section, setting):
    if setting.required or setting.section is not None:
        return
    limits = setting.field.metadata
    values = setting.default if isinstance(setting.default, list) else [setting.default]
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert limits["low"] is None or value >= limits["low"]
            assert limits["high"] is None or value <= limits["high"]
            assert limits["above"] is None or value > limits["above"]
            assert limits["below"] is None or value < limits["below"]


def names_read(path: Path) -> set[str]:
    """The attributes that a module reads, by name or with `getattr` over a constant tuple of names."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    if any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" for node in nodes):
        tuples = [
            node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        ]
        names |= {str(item.value) for names in tuples for item in names.elts if isinstance(item, ast.Constant)}
    return names


@pytest.fixture(scope="module")
def attributes_read() -> set[str]:
    """The name of every attribute that code outside the config room reads."""
    return set().union(*map(names_read, CODE))


def named_by_its_components(section: type) -> set[str]:
    """The arguments of all functions whose options a section describes."""
    if not issubclass(section, (LossConfig, AdvantageConfig, RewardConfig, FilterConfig)):
        return set()
    entries = [entry for entry in registry_of(section).entries() if issubclass(entry.load_options() or object, section)]
    return set.intersection(*(set(inspect.signature(entry.load()).parameters) for entry in entries))


@pytest.mark.parametrize(("section", "setting"), SETTINGS, ids=[name_of(*pair) for pair in SETTINGS])
def test_every_setting_is_read_by_some_code(section, setting, attributes_read):
    assert setting.name in attributes_read | named_by_its_components(section)
