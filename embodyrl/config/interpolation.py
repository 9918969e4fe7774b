"""Resolves interpolations such as `${env.max_episode_steps}`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from embodyrl.config.compose import Settings
from embodyrl.config.fields import all_paths, defaults_below
from embodyrl.config.files import UNREADABLE
from embodyrl.config.issues import ConfigIssue, KeyPath, dotted
from embodyrl.config.values import LARGEST_TEXT, REFERENCE, escape, nested, show
from embodyrl.errors import near_match

_NAME = re.compile(r"\$\{([\w.]+)\}")
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)\s*\}")
"""Matches `${oc.env:NAME}` without a default."""
LONGEST_CHAIN = 50
"""Most texts in a chain of references."""


class _Unresolved(Exception):
    """Raised for a text that cannot be resolved, with the reason."""


@dataclass
class Resolved:
    """Result of resolving the texts with `${...}`."""

    faults: list[ConfigIssue] = field(default_factory=list)
    environment: dict[KeyPath, str] = field(default_factory=dict)
    """Texts that read environment variables, directly or through other settings, by path."""


def resolve_interpolations(settings: Settings, schema: type, *, may_read: bool = True) -> Resolved:
    """Resolve every `${...}` in place. It may name any setting, including those at their default.

    Args:
        settings: composed settings.
        schema: the dataclass of the whole config.
        may_read: whether environment variables may be read.
    """
    found = Resolved()
    texts = dict(_interpolated(settings.data, ()))
    if not texts:
        return found
    resolver = _Resolver(OmegaConf.create(_plain(defaults_below(schema, settings.data))), texts, may_read)
    with resolver.watching():
        for path, text in texts.items():
            try:
                value = resolver.value(path)
            except (OmegaConfBaseException, _Unresolved) as error:
                value = UNREADABLE
                unset = [name for name in _VARIABLE.findall(text) if may_read and name not in os.environ]
                why = (str(error).splitlines() or [type(error).__name__])[0]
                if unset:
                    why = f"the environment variable {unset[0]} is not set"
                message = f"{dotted(path)} = {show(text)} cannot be resolved ({why})"
                known = [dotted(each) for each in all_paths(schema, settings.data)]
                remedy = _remedy_for_variable(unset[0]) if unset else _remedy(text, known)
                found.faults.append(ConfigIssue((path,), message, remedy, settings.origins[path].value))
            _replace(settings.data, path, value)
    found.environment = {path: texts[path] for path in texts if path in resolver.from_environment}
    return found


class _Resolver:
    """Resolves each text once, after the texts it refers to. Sizes are checked before a value is built, so that chains
    that double at every step end early.

    Args:
        tree: the settings.
        texts: texts with interpolations, by path.
        may_read: whether environment variables may be read.
    """

    def __init__(self, tree: Any, texts: Mapping[KeyPath, str], may_read: bool) -> None:
        self._tree, self._texts, self._may_read = tree, texts, may_read
        self._values: dict[KeyPath, Any] = {}
        self._open: list[KeyPath] = []
        self.from_environment: set[KeyPath] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record within the block which texts read environment variables."""

        def read(*arguments: Any) -> Any:
            self.from_environment.update(self._open)
            if not self._may_read:
                raise KeyError("it may not read environment variables")
            return oc.env(*arguments)

        OmegaConf.register_new_resolver("oc.env", read, replace=True)
        try:
            yield
        finally:
            OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)

    def value(self, path: KeyPath) -> Any:
        """Return the resolved value of the text at `path`.

        Raises:
            _Unresolved: it leads back to itself, through too many others, or its value is too large.
            OmegaConfBaseException: it names no setting.
        """
        if path in self._values:
            return self._values[path]
        if path in self._open or len(self._open) == LONGEST_CHAIN:
            raise _Unresolved("it leads back to itself" if path in self._open else "it leads through too many others")
        self._open.append(path)
        try:
            size = len(self._texts[path]) + sum(self._size_of(name) for name in self._named_by(path))
            if size > LARGEST_TEXT:
                raise _Unresolved(f"it stands for more than {LARGEST_TEXT} characters")
            node: Any = self._tree
            for key in path[:-1]:
                node = node[key]
            value = node[path[-1]]
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            node[path[-1]] = escape(value)
        finally:
            self._open.pop()
        self._values[path] = value
        return value

    def _named_by(self, path: KeyPath) -> Iterator[KeyPath]:
        """Yield the paths that a text refers to."""
        for dots, name in REFERENCE.findall(self._texts[path]):
            keys = tuple(re.findall(r"[\w-]+", name))
            yield (*path[: len(path) - len(dots)], *keys) if dots else keys

    def _size_of(self, named: KeyPath) -> int:
        """Return the number of characters at a path, after resolving the texts in it and around it."""
        for path in self._texts:
            known = tuple(map(str, path))
            if known[: len(named)] == named or named[: len(known)] == known:
                self.value(path)
                if path in self.from_environment:
                    self.from_environment.update(self._open)
        node: Any = self._tree
        for key in named:
            if not OmegaConf.is_config(node):
                return 0
            try:
                node = node[int(key) if OmegaConf.is_list(node) else key]
            except (OmegaConfBaseException, ValueError):
                return 0  # no such setting: OmegaConf reports it
        return _size(OmegaConf.to_container(node) if OmegaConf.is_config(node) else node)


def _size(value: Any) -> int:
    return sum(len(each) if isinstance(each, str) else 1 for each in nested(value))


def _interpolated(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path and text of every interpolation."""
    if isinstance(value, str) and "${" in value:
        yield path, value
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _interpolated(child, (*path, key))


def _remedy(text: str, settings: list[str]) -> str:
    near = [match for name in _NAME.findall(text) if name not in settings and (match := near_match(name, settings))]
    return f"did you mean ${{{near[0]}}}?" if near else "name a setting by its whole path, as in ${env.num_envs}"


def _remedy_for_variable(name: str) -> str:
    lead, default = f"did you mean {{}}? Else run: export {name}=...", f"or write a default: ${{oc.env:{name},...}}"
    near = near_match(name, os.environ, cutoff=0.8)
    return f"{lead.format(near) if near else f'run: export {name}=...'}, {default}"


def _replace(data: Any, path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def _plain(value: Any) -> Any:
    """Replace enums by their values, since OmegaConf keeps them as objects."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items() if isinstance(key, str)}
    return value.value if hasattr(value, "value") else value
