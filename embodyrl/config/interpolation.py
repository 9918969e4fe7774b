"""Replaces `${env.max_episode_steps}` by the value it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodyrl.config.compose import Settings
from embodyrl.config.faults import Fault, KeyPath, dotted
from embodyrl.config.fields import all_paths, defaults_below
from embodyrl.config.marks import UNREADABLE
from embodyrl.config.values import show
from embodyrl.registry import near_match

_NAME = re.compile(r"\$\{([\w.]+)\}")


def resolve_interpolations(settings: Settings, schema: type) -> list[Fault]:
    """Resolve every `${...}` in place; it may name any setting, also one that has its default."""
    texts = list(_interpolated(settings.data, ()))
    if not texts:
        return []
    faults = []
    tree = OmegaConf.create(_plain(defaults_below(schema, settings.data)))
    for path, text in texts:
        node: Any = tree
        try:
            for key in path:
                node = node[key]
            value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            value = UNREADABLE
            message = f"{dotted(path)} = {show(text)} cannot be resolved ({str(error).splitlines()[0]})"
            remedy = _remedy(text, [dotted(known) for known in all_paths(schema, settings.data)])
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


def _remedy(text: str, settings: list[str]) -> str:
    near = [match for name in _NAME.findall(text) if name not in settings and (match := near_match(name, settings))]
    return f"did you mean ${{{near[0]}}}?" if near else "name a setting by its whole path, as in ${env.num_envs}"


def _replace(data: Any, path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def _plain(value: Any) -> Any:
    """Defaults without enums, which OmegaConf keeps as objects."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    return value.value if hasattr(value, "value") else value
