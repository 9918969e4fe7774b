"""The schema itself: every setting is documented, typed so that it can be checked, and read by some code."""

from __future__ import annotations

import ast
import inspect
import typing
from enum import Enum
from pathlib import Path

import embodyrl
from embodyrl.config.fields import choices_of, docs_of, registry_of, settings_of
from embodyrl.config.schema import AdvantageConfig, Config, FilterConfig, LossConfig, RewardConfig


def all_sections(section: type = Config, known: frozenset[type] = frozenset()) -> list[type]:
    """Every dataclass of the schema, with the options of the built-in components."""
    every = [candidate for candidate in choices_of(section) if candidate.__module__.startswith("embodyrl.")]
    # A simulator may consist of others.
    found = [candidate for candidate in every if candidate not in known]
    for candidate in list(found):
        for setting in settings_of(candidate).values():
            below = setting.section or setting.section_of_entries
            if below is not None:
                found += all_sections(below, known | {*found})
    return list(dict.fromkeys(found))


SETTINGS = [(section, setting) for section in all_sections() for setting in settings_of(section).values()]
CODE = [
    path
    for path in Path(embodyrl.__file__).parent.rglob("*.py")
    if "config" not in path.parts or path.name == "mix.py"  # where the entries of a mix become simulators
]


def name_of(section: type, setting) -> str:
    return f"{section.__name__}.{setting.name}"


def test_the_walk_reaches_the_options_of_components():
    names = {section.__name__ for section in all_sections()}
    assert {"Config", "OptimizerConfig", "MLPConfig", "MetaWorldConfig", "GymnasiumConfig"} <= names


def test_every_setting_is_documented():
    short = [name_of(*pair) for pair in SETTINGS if len(docs_of(pair[0])[pair[1].name]) < 10]
    assert not short


def test_every_section_says_what_it_is():
    sections = all_sections()
    mute = [each for each in sections if not each.__doc__ or each.__doc__.startswith(each.__name__ + "(")]
    assert len(sections) > 50 and not mute


def can_be_checked(setting):
    kinds = setting.kinds
    if len(kinds) > 1:
        known = set(kinds) <= {int, float, str} or set(kinds) == {bool, str}
        return known and (setting.field.metadata["words"] or str not in kinds)
    [kind] = kinds
    if typing.get_origin(kind) is list:
        [kind] = typing.get_args(kind)
    elif typing.get_origin(kind) is dict:
        key, kind = typing.get_args(kind)
        if key is not str or kind is typing.Any:
            return key is str
    is_section = kind in (setting.section, setting.section_of_entries)
    return kind in (bool, int, float, str) or issubclass(kind, Enum) or is_section


def test_every_type_is_one_that_can_be_checked():
    assert not [name_of(section, setting) for section, setting in SETTINGS if not can_be_checked(setting)]


def within_limits(value, limits):
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    low, high, above, below = (limits[name] for name in ("low", "high", "above", "below"))
    inside = (low is None or value >= low) and (high is None or value <= high)
    return inside and (above is None or value > above) and (below is None or value < below)


def test_every_default_is_within_its_own_limits():
    outside = []
    for section, setting in SETTINGS:
        if setting.required or setting.section is not None:
            continue
        values = setting.default if isinstance(setting.default, list) else [setting.default]
        outside += [name_of(section, setting) for value in values if not within_limits(value, setting.field.metadata)]
    assert len(SETTINGS) > 650 and not outside


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


def named_by_its_components(section: type) -> set[str]:
    """The arguments of all functions whose options a section describes."""
    if not issubclass(section, (LossConfig, AdvantageConfig, RewardConfig, FilterConfig)):
        return set()
    entries = [entry for entry in registry_of(section).entries() if issubclass(entry.load_options() or object, section)]
    return set.intersection(*(set(inspect.signature(entry.load()).parameters) for entry in entries))


def test_every_setting_is_read_by_some_code():
    """By name, in code outside the config room."""
    read = set().union(*map(names_read, CODE))
    named = {section: named_by_its_components(section) for section in all_sections()}
    assert not [name_of(*pair) for pair in SETTINGS if pair[1].name not in read | named[pair[0]]]
