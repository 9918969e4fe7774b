"""Names -> components, imported only when they are used.

Built-in components are declared by name in one module per registry (its `home`), which imports nothing heavy. Third
parties add theirs through an entry point of the registry's group, or by calling `register` in a module that the YAML
lists under `plugins:`.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from embodyrl.errors import DuplicateNameError, MissingPackageError, PluginError, UnknownNameError

T = TypeVar("T")


def near_match(name: str, known: Sequence[str]) -> str | None:
    """The entry of `known` that `name` was probably meant to be, or None."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def load_target(target: str) -> Any:
    """Import `module:object` and return the object."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A package that a component imports, and the command that installs it."""

    module: str
    """Name to import, as in `import mani_skill`."""
    install: str
    """Command that installs it."""

    def is_met(self) -> bool:
        """Whether the package can be found (it is not imported)."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # the package around a submodule is missing
            return False


@dataclass(frozen=True, kw_only=True)
class SystemLibrary(Requirement):
    """A shared library of the operating system that a component's package links to; `module` is its file name."""

    def is_met(self) -> bool:
        """Whether the dynamic linker finds it."""
        try:
            ctypes.CDLL(self.module)
        except OSError:
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[T]):
    """One registered component."""

    name: str
    target: str | T
    """The component, or `module:object` where it is imported from on first use."""
    summary: str
    """One line for `embodyrl list`."""
    options: str | type | None = None
    """Dataclass of the component's own options (the class, or `module:object`); it becomes part of the config
    schema."""
    requires: tuple[Requirement, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What config rules must know without importing the target; the keys are documented at each registry below."""
    source: str = "built-in"

    def missing(self) -> list[Requirement]:
        """Requirements that are not installed here."""
        return [requirement for requirement in self.requires if not requirement.is_met()]

    def load(self) -> T:
        """Import the component.

        Raises:
            MissingPackageError: a required package is not installed.
        """
        missing = self.missing()
        if missing:
            raise MissingPackageError(
                f"{self.name!r} needs {', '.join(requirement.module for requirement in missing)}, which is not "
                f"installed: {missing[0].install}"
            )
        return cast(T, load_target(self.target)) if isinstance(self.target, str) else self.target

    def load_options(self) -> type | None:
        """The options dataclass, imported if need be."""
        return load_target(self.options) if isinstance(self.options, str) else self.options


class Registry(Generic[T]):
    """A table of components of one kind.

    Args:
        kind: what the entries are, for messages: `model`, `simulator`.
        home: module that declares the built-in entries when it is imported; no other registry may have the same one.
        group: entry-point group through which installed packages add entries; each entry point names a module or a
            callable that calls `register`.
    """

    def __init__(self, kind: str, *, home: str, group: str) -> None:
        self.kind = kind
        self.home = home
        self.group = group
        self._entries: dict[str, Entry[T]] = {}
        self._filled = False
        self._source = "plug-in"
        """Where entries that are registered now come from."""

    def register(
        self,
        name: str,
        target: str | T,
        *,
        summary: str,
        options: str | type | None = None,
        requires: Sequence[Requirement] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a component; see `Entry` for the arguments.

        Raises:
            DuplicateNameError: the name is taken.
        """
        self._fill()
        if name in self._entries:
            raise DuplicateNameError(
                f"{self.kind} {name!r} is already registered ({self._entries[name].source}): choose another name"
            )
        self._entries[name] = Entry(
            name=name,
            target=target,
            summary=summary,
            options=options,
            requires=tuple(requires),
            facts=dict(facts or {}),
            source=self._source,
        )

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._fill()
        return sorted(self._entries)

    def entries(self) -> list[Entry[T]]:
        """All entries, sorted by name."""
        return [self._entries[name] for name in self.names()]

    def __contains__(self, name: object) -> bool:
        self._fill()
        return name in self._entries

    def entry(self, name: str) -> Entry[T]:
        """The entry called `name`.

        Raises:
            UnknownNameError: with the near match and the full list.
        """
        self._fill()
        if name not in self._entries:
            raise UnknownNameError(self.unknown(name))
        return self._entries[name]

    def unknown(self, name: str) -> str:
        """The sentence that says `name` is not registered, with the near match and the full list."""
        near = near_match(name, self.names())
        hint = f" - did you mean {near!r}?" if near else ""
        return f"{self.kind} {name!r} is not registered{hint} (registered: {', '.join(self.names()) or 'none'})"

    def load(self, name: str) -> T:
        """Import the component called `name`; see `entry` and `Entry.load` for what is raised."""
        return self.entry(name).load()

    def _fill(self) -> None:
        """Register what comes with embodyrl and with installed packages, once and before anything else."""
        if self._filled:
            return
        self._filled = True
        self._source = "built-in"
        importlib.import_module(self.home)
        for point in importlib.metadata.entry_points(group=self.group):
            self._source = f"entry point {point.name}"
            try:
                loaded = point.load()
                if callable(loaded):
                    loaded()
            except Exception as error:
                raise PluginError(
                    f"entry point {point.name!r} of group {self.group} ({point.value}) failed: {error!r}; "
                    f"uninstall or mend the package that provides it"
                ) from error
        self._source = "plug-in"


SupportedModel: Registry[Any] = Registry("model", home="embodyrl.models.builtin", group="embodyrl.models")
"""Policies. Target: a `models.Policy` class. Facts: `max_chunk` (most actions that one decision can hold, int or absent
for no limit), `critic` (bool: predicts values), `usual_chunk` (actions per decision of its public checkpoints; absent:
1), `standalone` (bool: it can be built from its checkpoint without a simulator), `check` (`module:function` that takes
the whole config and yields what the model finds wrong with it, each as (path of the setting, message, remedy), without
importing torch)."""

SIMULATORS: Registry[Any] = Registry("simulator", home="embodyrl.envs.builtin", group="embodyrl.envs")
"""Simulator backends. Target: callable (config, num_slots) -> `envs.Simulator`. Facts: `tasks` (`module:function`
that lists all task names without importing the simulator, or absent where only the simulator knows them), `cameras`
(the same for camera names), `state_dim` (`module:function` that says of its part of a config how many numbers a state
has, or None where only the simulator knows), `action_dim` (the same of an action), `sentence`
(`module:function` that says what a policy is told about a task), `graphics` (`opengl` or `vulkan`:
what MuJoCo or SAPIEN draws with, so that its processes are told which driver to use), `preload` (modules that are
imported once before its processes are forked, see `placement.zygote`; absent where that is not safe), `check`
(`module:function` that takes the whole config and yields what the simulator finds wrong with it, each as (path of the
setting, message, remedy), without importing the simulator), `assets` (`module:function` that tells `embodyrl doctor`
which downloads are here, and what to do for others, or ""), `fills_gpu` (`module:function` that says of its part of a
config whether each process computes on a GPU of its own)."""

ALGORITHMS: Registry[Any] = Registry("algorithm", home="embodyrl.pipelines.builtin", group="embodyrl.algorithms")
"""Iteration graphs. Target: callable (config) -> `pipelines.Graph`. Facts: `critic` (bool: its nodes pass a critic's
values on, or absent where either will do), `demonstrations` (bool: it learns from those of `data.path`; absent: False),
`check` (as with simulators)."""

ADVANTAGES: Registry[Any] = Registry(
    "advantage", home="embodyrl.algorithms.builtin_advantages", group="embodyrl.advantages"
)
"""Advantage estimators. Facts: `critic` (bool: needs values), `whole` (bool: needs whole episodes), `group` (bool:
compares the episodes of a group, unless `algorithm.norm` says otherwise), `actions` (bool: works on rewards of actions,
too)."""

LOSSES: Registry[Any] = Registry("loss", home="embodyrl.algorithms.builtin_losses", group="embodyrl.losses")
"""Policy losses. Facts: `whole` (bool: needs whole episodes)."""

REWARDS: Registry[Any] = Registry("reward", home="embodyrl.algorithms.builtin_rewards", group="embodyrl.rewards")
"""What is learned from. Target: callable that names columns of the batch and settings as keyword arguments and returns
rewards `[K, B, C]`. Facts: `whole` (bool: needs whole episodes)."""

FILTERS: Registry[Any] = Registry("filter", home="embodyrl.algorithms.builtin_filters", group="embodyrl.filters")
"""Which groups are learned from. Target: callable that names outcomes `[B/G, G]` and settings as keyword arguments and
returns which groups to keep, bool `[B/G]`. Facts: `group` (bool: False for the one that keeps all)."""

ENCODERS: Registry[Any] = Registry("encoder", home="embodyrl.algorithms.builtin_encoders", group="embodyrl.encoders")
"""What turns the observations of an episode into a vector. Target: callable (images, proprio, dim=) -> `[E]`."""

STAGES: Registry[Any] = Registry("stage", home="embodyrl.pipelines.builtin_stages", group="embodyrl.stages")
"""What a node of an iteration graph does. Target: callable (iteration) -> None. Facts: `reads`, `writes`, `changes`
(names of columns and resources, see `pipelines.Node`)."""

OPTIMIZERS: Registry[Any] = Registry(
    "optimizer", home="embodyrl.engine.builtin_optimizers", group="embodyrl.optimizers"
)
"""What steps weights along gradients. Target: callable (groups of parameters, `config.schema.OptimizerConfig`) -> torch
optimiser whose state is all in `state_dict`, so that it can be saved and moved. Facts: none so far."""

SINKS: Registry[Any] = Registry("sink", home="embodyrl.tracking.builtin", group="embodyrl.sinks")
"""Where metrics go. Target: callable (context) -> `tracking.Sink`. Facts: none so far."""

EXPERTS: Registry[Any] = Registry("expert", home="embodyrl.data.builtin_experts", group="embodyrl.experts")
"""Who demonstrates the tasks of a simulator, under the simulator's name. Target: callable (env config) ->
`data.experts.Demonstrator`. Facts: none so far."""


def all_registries() -> list[Registry[Any]]:
    """Every registry of this module."""
    return [thing for thing in globals().values() if isinstance(thing, Registry)]
