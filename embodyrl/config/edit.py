"""Changes single settings in the text of a config file; comments, order and layout of the rest stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from embodyrl.config.build import inline
from embodyrl.config.files import PlainLoader
from embodyrl.config.issues import KeyPath, dotted

INDENT = "  "
"""Indentation of sections that are added."""


class EditError(ValueError):
    """Raised when a file is written in a way in which a single setting cannot be changed, for instance with aliases."""


def set_value(text: str, path: KeyPath, value: Any) -> str:
    """Return the text of a file with a setting set; sections that it lacks are added."""
    root = _root(text)
    data = _data(text)
    _put(data, path, value)
    depth, section = _deepest(root, path)
    if depth == len(path):
        changed = _replace(text, section, value)
    else:
        for key in reversed(path[depth + 1 :]):
            value = {key: value}
        changed = _insert(text, section, root, str(path[depth]), value)
    return _checked(changed, data, path)


def leave_out(text: str, path: KeyPath) -> str:
    """Return the text of a file without a setting, and without sections in which nothing is left."""
    root = _root(text)
    data = _data(text)
    while len(path) > 1 and len(_at(data, path[:-1])) == 1:
        path = path[:-1]
    del _at(data, path[:-1])[path[-1]]
    _, parent = _deepest(root, path[:-1])
    assert isinstance(parent, yaml.MappingNode), "it holds the setting"
    index = next(index for index, (key, _) in enumerate(parent.value) if key.value == path[-1])
    key, value = parent.value[index]
    if parent.flow_style:
        start, end = key.start_mark.index, value.end_mark.index
        if index + 1 < len(parent.value):
            end = parent.value[index + 1][0].start_mark.index
        elif index:
            start = parent.value[index - 1][1].end_mark.index
    else:
        start = text.rfind("\n", 0, key.start_mark.index) + 1
        end = _end_of_line(text, _end(key, value))
    return _checked(text[:start] + text[end:], data, path)


def choose(text: str, group: str, option: str) -> str:
    """Return the text of a file whose defaults list chooses an option of a group. A list that lacks the group, or a
    file without a list, gets the entry."""
    root = _root(text)
    data = _data(text)
    listed = data.get("defaults")
    if listed is None:
        return _checked(*_with_list(text, root, data, group, option), ("defaults",))
    node = next(value for key, value in root.value if key.value == "defaults")
    if not isinstance(listed, list) or not isinstance(node, yaml.SequenceNode) or not listed:
        raise EditError("its defaults are no list of choices")
    for index, item in enumerate(listed):
        if isinstance(item, dict) and [_bare(key) for key in item] == [group]:
            [key] = item
            item[key] = option
            [(_, value)] = node.value[index].value
            return _checked(_replace(text, value, option), data, ("defaults", index))
    index = listed.index("_self_") if "_self_" in listed else len(listed)
    listed.insert(index, {group: option})
    before = node.value[min(index, len(node.value) - 1)]
    entry = f"{group}: {option}"
    if node.flow_style:
        place = before.start_mark.index if index < len(node.value) else before.end_mark.index
        added = f"{entry}, " if index < len(node.value) else f", {entry}"
        return _checked(text[:place] + added + text[place:], data, ("defaults", index))
    line = text.rfind("\n", 0, before.start_mark.index) + 1
    place = line if index < len(node.value) else _end_of_line(text, _end(before))
    dash = text[line : before.start_mark.index]
    return _checked(f"{_closed(text[:place])}{dash}{entry}\n{text[place:]}", data, ("defaults", index))


def _with_list(text: str, root: yaml.MappingNode, data: dict[str, Any], group: str, option: str) -> tuple[str, Any]:
    """Return text and data of a file that gets a defaults list, in front of its first setting."""
    if root.flow_style:
        raise EditError("its settings are in braces")
    place = _start_of_comment(text, root.value[0][0].start_mark.index)
    listed = f"defaults:\n{INDENT}- {group}: {option}\n{INDENT}- _self_\n"
    return text[:place] + listed + text[place:], {"defaults": [{group: option}, "_self_"], **data}


def _start_of_comment(text: str, place: int) -> int:
    """Return where the comment right above a setting begins; `place`, where the setting does, if it has none of its
    own: comments that a file begins with are about the file."""
    lines = text[:place].splitlines(keepends=True)
    own = len(lines)
    while own and lines[own - 1].startswith("#"):
        own -= 1
    return sum(map(len, lines[:own])) if own else place


def _bare(key: str) -> str:
    """Return the group of a key in a defaults list: `override /env` is `env`."""
    words = str(key).split()
    return words[-1].lstrip("/").partition("@")[0] if words else str(key)


def _root(text: str) -> yaml.MappingNode:
    root = yaml.compose(text, PlainLoader)
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise EditError("it holds no settings")
    return root


def _data(text: str) -> dict[str, Any]:
    try:
        data: dict[str, Any] = _unshared(yaml.load(text, PlainLoader))
    except Exception as error:  # constructors of YAML raise whatever they come across
        raise EditError(f"it cannot be read ({type(error).__name__})") from error
    return data


def _unshared(value: Any) -> Any:
    """Return a copy in which nothing is shared, so that a change of what aliases share is found by `_checked`."""
    if isinstance(value, dict):
        return {key: _unshared(child) for key, child in value.items()}
    return [_unshared(child) for child in value] if isinstance(value, list) else value


def _checked(text: str, data: Any, path: KeyPath) -> str:
    """Return the changed text if it has exactly this data."""
    try:
        is_right = yaml.load(text, PlainLoader) == data
    except yaml.YAMLError:
        is_right = False
    if not is_right:
        raise EditError(f"{dotted(path)} cannot be changed by itself")
    return text


def _at(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data[key]
    return data


def _put(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(data.get(str(key)), dict):
            data[str(key)] = {}
        data = data[str(key)]
    data[str(path[-1])] = value


def _deepest(root: yaml.Node, path: KeyPath) -> tuple[int, yaml.Node]:
    """Return the node at a path, or the nearest one around it, and how many keys lead to it."""
    node = root
    for depth, key in enumerate(path):
        children = node.value if isinstance(node, yaml.MappingNode) else []
        child = next((value for each, value in children if each.value == key), None)
        if child is None:
            return depth, node
        node = child
    return len(path), node


def _nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    yield node
    for child in node.value if not isinstance(node, yaml.ScalarNode) else ():
        for each in child if isinstance(child, tuple) else (child,):
            yield from _nodes(each)


def _end(*nodes: yaml.Node) -> int:
    """Return where the contents of nodes end. A block's own end is that of the comments behind it."""
    return max(
        each.end_mark.index
        for node in nodes
        for each in _nodes(node)
        if not isinstance(each, yaml.CollectionNode) or each.flow_style or not each.value
    )


def _end_of_line(text: str, place: int) -> int:
    """Return where the next line begins."""
    if place and text[place - 1] == "\n":  # a block of text ends there
        return place
    end = text.find("\n", place)
    return len(text) if end < 0 else end + 1


def _closed(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def _replace(text: str, node: yaml.Node, value: Any) -> str:
    """Return the text with another value in place of a node's."""
    start, end = node.start_mark.index, _end(node)
    space = " " if start == end and text[start - 1] == ":" else ""
    return text[:start] + space + inline(value) + text[end:]


def _insert(text: str, section: yaml.Node, root: yaml.MappingNode, key: str, value: Any) -> str:
    """Return the text with a further key in a section."""
    if isinstance(section, yaml.MappingNode) and section.flow_style:
        entry = f"{key}: {inline(value)}"
        if not section.value:
            place = section.start_mark.index + 1
            return text[:place] + entry + text[place:]
        place = _end(*section.value[-1])
        return f"{text[:place]}, {entry}{text[place:]}"
    if isinstance(section, yaml.MappingNode):
        first, (*_, last) = section.value[0][0], section.value
        place = _end_of_line(text, _end(*last))
        return _closed(text[:place]) + as_lines({key: value}, " " * first.start_mark.column) + text[place:]
    if section.start_mark.index != section.end_mark.index:
        raise EditError(f"there is no section for {key}")
    # A section without settings, as in `rollout:`.
    line = text.rfind("\n", 0, section.start_mark.index) + 1
    own = text[line:]
    indent = own[: len(own) - len(own.lstrip(" "))] + INDENT
    place = _end_of_line(text, section.start_mark.index)
    return _closed(text[:place]) + as_lines({key: value}, indent) + text[place:]


def as_lines(data: Mapping[str, Any], indent: str = "") -> str:
    """Write settings as lines of YAML."""
    lines = []
    for key, value in data.items():
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{key}:\n{as_lines(value, indent + INDENT)}")
        else:
            lines.append(f"{indent}{key}: {inline(value)}\n")
    return "".join(lines)
