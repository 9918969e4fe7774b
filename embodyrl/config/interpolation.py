"""Replaces `${env.max_episode_steps}` by the value it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodyrl.config.compose import Settings
from embodyrl.config.faults import Fault, KeyPath, dotted
from embodyrl.config.fields import defaults_below
from embodyrl.config.marks import UNREADABLE


def resolve_interpolations(settings: Settings, schema: type) -> list[Fault]:
    """Resolve every `${...}` in place; it may name any setting, also one that has its default."""
    faults = []
    for path, text in list(_interpolated(settings.data, ())):
        fault = _unreadable(settings, path, text)
        if fault is not None:
            faults.append(fault)
            _replace(settings.data, path, UNREADABLE)
    texts = list(_interpolated(settings.data, ()))
    if not texts:
        return faults
    tree = OmegaConf.create(_plain(defaults_below(schema, settings.data)))
    for path, text in texts:
        node: Any = tree
        try:
            for key in path:
                node = node[key]
            value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            value = UNREADABLE
            why = str(error).splitlines()[0]
            message = f"{dotted(path)}: {text} cannot be resolved ({why})"
            remedy = "name a setting by its whole path, as in ${env.num_envs}"
            faults.append(Fault(path, message, remedy, settings.origins[path].value))
        _replace(settings.data, path, value)
    return faults


def _interpolated(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Every text that holds an interpolation, with its place."""
    if isinstance(value, str) and "${" in value:
        yield path, value
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _interpolated(child, (*path, key))


def _unreadable(settings: Settings, path: KeyPath, text: str) -> Fault | None:
    try:
        OmegaConf.create({"value": text})
    except OmegaConfBaseException:
        message = f"{dotted(path)}: {_show(text)} is no complete interpolation"
        remedy = "write ${section.setting}, or \\${ for the characters themselves"
        return Fault(path, message, remedy, settings.origins[path].value)
    return None


def _show(text: str) -> str:
    """A text in quotes, shortened."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _replace(data: Any, path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def _plain(value: Any) -> Any:
    """Defaults without enums, which OmegaConf keeps as objects."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    return value.value if hasattr(value, "value") else value
