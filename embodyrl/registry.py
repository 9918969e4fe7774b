"""Names -> components, imported only when they are used.

Built-in components are declared by name in one module per registry (its `home`), which imports nothing heavy. Third
parties add theirs through an entry point of the registry's group, or by calling `register` in a module that the YAML
lists under `plugins:`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from embodyrl.errors import DuplicateNameError, MissingPackageError, PluginError, UnknownNameError, did_you_mean

E = TypeVar("E", bound="Entry")


@functools.cache
def _entry_points() -> Any:  # its class is another one in Python 3.12
    """Those of all installed packages; reading them takes as long as checking a config."""
    return importlib.metadata.entry_points()


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
        """Return whether the package can be found (it is not imported)."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # the package around a submodule is missing
            return False


@dataclass(frozen=True, kw_only=True)
class SystemLibrary(Requirement):
    """A shared library of the operating system that a component's package links to; `module` is its file name."""

    def is_met(self) -> bool:
        """Return whether the dynamic linker finds it."""
        try:
            ctypes.CDLL(self.module)
        except OSError:
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One registered component, and what is to be known of it without importing it."""

    name: str
    target: Any
    """The component, or `module:object` where it is imported from on first use."""
    summary: str
    """One line for `embodyrl list`."""
    options: str | type | None = None
    """Dataclass of the component's own options (the class, or `module:object`); it becomes part of the config
    schema."""
    requires: Sequence[Requirement] = ()
    """Packages that it imports."""
    source: str = "built-in"
    """Where it comes from."""

    def missing(self) -> list[Requirement]:
        """Requirements that are not installed here."""
        return [requirement for requirement in self.requires if not requirement.is_met()]

    def load(self) -> Any:
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
        return load_target(self.target) if isinstance(self.target, str) else self.target

    def load_options(self) -> type | None:
        """The options dataclass, imported if need be."""
        return load_target(self.options) if isinstance(self.options, str) else self.options


@dataclass(frozen=True, kw_only=True)
class ModelEntry(Entry):
    """A policy. Target: a `models.Policy` class."""

    critic: bool
    """Whether it predicts values."""
    max_chunk: int | None = None
    """Most actions that one decision can hold; None: no limit."""
    usual_chunk: int = 1
    """Actions per decision of its public checkpoints."""
    blocks: bool | None = None
    """Whether it consists of layers that can be recomputed, sharded and adapted; None: its `parallel_plan` says so."""
    standalone: bool = False
    """Whether it can be built from its checkpoint without a simulator."""
    check: str | None = None
    """`module:function` that takes the whole config and yields what the model finds wrong with it, each as (path of the
    setting, message, remedy), without importing torch."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Options that a saved policy keeps where a config leaves them null (`options_to_save` says what they have become);
    with what they were where nothing says it."""
    notes: str | None = None
    """`module:function` that says of the whole config what `embodyrl validate` should note about it."""
    published: str | None = None
    """What its published size is called, if one was published."""


@dataclass(frozen=True, kw_only=True)
class SimulatorEntry(Entry):
    """A simulator backend. Target: callable (config, num_slots) -> `envs.Simulator`."""

    tasks: str | None = None
    """`module:function` that lists all task names without importing the simulator; None: only the simulator knows."""
    cameras: str | None = None
    """The same for camera names."""
    state_dim: str | None = None
    """`module:function` that says of its part of a config how many numbers a state has, or None where only the
    simulator knows."""
    action_dim: str | None = None
    """The same of an action."""
    task_description: str | None = None
    """`module:function` that returns the task description of a task."""
    graphics: str | None = None
    """`opengl` or `vulkan`: what MuJoCo or SAPIEN draws with, so that its processes are told which driver to use."""
    rendering_checks: str | None = None
    """`module:function` that tells `embodyrl doctor` how to try whether the simulator renders here: takes the machine's
    `placement.plan.Inventory`, returns a list of `placement.graphics.RenderingCheck`."""
    preload: Sequence[str] | None = None
    """Modules that are imported once before its processes are forked, see `placement.child`; None: it is not safe."""
    check: str | None = None
    """`module:function` that takes the whole config and yields what the simulator finds wrong with it, each as (path of
    the setting, message, remedy), without importing the simulator."""
    check_here: str | None = None
    """The same for what it finds missing on this machine."""
    assets: str | None = None
    """`module:function` that tells `embodyrl doctor` which downloads are here, and what to do for others, or ""."""
    fills_gpu: str | None = None
    """`module:function` that says of its part of a config whether each process computes on a GPU of its own."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmEntry(Entry):
    """The stages of an iteration. Target: callable (config) -> list of `pipelines.Stage`."""

    critic: bool | None = None
    """Whether its stages pass a critic's values on; None: either will do."""
    demonstrations: bool = False
    """Whether it learns from those of `data.path`."""
    check: str | None = None
    """As with models."""


@dataclass(frozen=True, kw_only=True)
class AdvantageEntry(Entry):
    """An advantage estimator. Target: see docs/algorithms.md, as for losses, rewards and filters."""

    critic: bool
    """Whether it needs the values of a critic."""
    whole: bool
    """Whether it needs whole episodes."""
    group: bool | str = False
    """Whether it compares the episodes of a group, or `module:function` that says so of its options."""
    actions: bool = False
    """Whether it works on rewards of actions, too."""
    check: str | None = None
    """As with models."""


@dataclass(frozen=True, kw_only=True)
class LossEntry(Entry):
    """A policy loss."""

    whole: bool
    """Whether it needs whole episodes."""
    check: str | None = None
    """As with models."""


@dataclass(frozen=True, kw_only=True)
class RewardEntry(Entry):
    """What is learned from."""

    whole: bool
    """Whether it needs whole episodes."""
    check: str | None = None
    """As with models."""


@dataclass(frozen=True, kw_only=True)
class FilterEntry(Entry):
    """Which groups are learned from."""

    group: bool = True
    """False for one that keeps all groups."""
    check: str | None = None
    """As with models."""


@dataclass(frozen=True, kw_only=True)
class StageEntry(Entry):
    """What a stage of an iteration does: names of columns and resources, see `pipelines.Stage`."""

    reads: Sequence[str] = ()
    """What it looks at."""
    writes: Sequence[str] = ()
    """Columns that it adds."""
    changes: Sequence[str] = ()
    """What it replaces, uses up or alters."""


class Registry(Generic[E]):
    """A table of components of one kind.

    Args:
        kind: what the entries are, for messages: `model`, `simulator`.
        home: module that declares the built-in entries when it is imported, or `module:function` that declares them
            when it is called; no other registry may have the same one.
        group: entry-point group through which installed packages add entries; each entry point names a module or a
            callable that calls `register`.
        entry: dataclass of its entries, which says what has to be told of a component.
    """

    def __init__(self, kind: str, *, home: str, group: str, entry: type[E]) -> None:
        self.kind = kind
        self.entry_type = entry
        self.home = home
        self.group = group
        self._entries: dict[str, E] = {}
        self._filled = False
        self._source = "plug-in"
        """Where entries that are registered now come from."""

    def register(self, name: str, target: Any, **known: Any) -> None:
        """Add a component.

        Args:
            name: what configs call it.
            target: the component, or `module:object`.
            known: the other fields of the registry's entries (`AdvantageEntry`, ...), `summary` and `options` included.

        Raises:
            DuplicateNameError: the name is taken.
            TypeError: a field is missing, or there is none of that name.
        """
        self._fill()
        if name in self._entries:
            raise DuplicateNameError(
                f"{self.kind} {name!r} is already registered ({self._entries[name].source}): choose another name"
            )
        self._require_fields(name, known)
        self._entries[name] = self.entry_type(name=name, target=target, source=self._source, **known)

    def _require_fields(self, name: str, known: Mapping[str, Any]) -> None:
        """Refuse what an entry does not have, and what it lacks, each in one sentence."""
        what, entry = f"{self.kind} {name!r}", self.entry_type.__name__
        fields = {each.name: each for each in dataclasses.fields(self.entry_type)}
        for set_here in ("name", "target", "source"):
            del fields[set_here]
        if isinstance(known.get("facts"), Mapping):
            instead = ", ".join(f"{key}={value!r}" for key, value in known["facts"].items())
            raise TypeError(f"{what} is registered with facts={{...}}: write them as arguments of their own, {instead}")
        for key in known:
            if key not in fields:
                hint = did_you_mean(key, list(fields), lead=" - ")
                raise TypeError(
                    f"{what} is registered with {key!r}, which no {entry} has{hint} (it has {', '.join(fields)})"
                )
        lacking = [key for key, each in fields.items() if key not in known and _is_required(each)]
        if lacking:
            raise TypeError(
                f"{what} is registered without {' and '.join(map(repr, lacking))}: add "
                f"{', '.join(f'{key}=...' for key in lacking)} ({fields[lacking[0]].type}; embodyrl.registry.{entry})"
            )

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._fill()
        return sorted(self._entries)

    def entries(self) -> list[E]:
        """All entries, sorted by name."""
        return [self._entries[name] for name in self.names()]

    def __contains__(self, name: object) -> bool:
        self._fill()
        return name in self._entries

    def entry(self, name: str) -> E:
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
        hint = did_you_mean(name, self.names(), lead=" - ")
        return f"{self.kind} {name!r} is not registered{hint} (registered: {', '.join(self.names()) or 'none'})"

    def load(self, name: str) -> Any:
        """Import the component called `name`; see `entry` and `Entry.load` for what is raised."""
        return self.entry(name).load()

    def _fill(self) -> None:
        """Register what comes with embodyrl and with installed packages, once and before anything else."""
        if self._filled:
            return
        self._filled = True
        self._source = "built-in"
        module, _, declare = self.home.partition(":")
        home = importlib.import_module(module)
        if declare:
            getattr(home, declare)()
        for point in _entry_points().select(group=self.group):
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


def _is_required(of_entry: dataclasses.Field[Any]) -> bool:
    return of_entry.default is dataclasses.MISSING and of_entry.default_factory is dataclasses.MISSING


SupportedModel = Registry("model", home="embodyrl.models.builtin", group="embodyrl.models", entry=ModelEntry)
"""Policies."""

SIMULATORS = Registry("simulator", home="embodyrl.envs.builtin", group="embodyrl.envs", entry=SimulatorEntry)
"""Simulator backends."""

ALGORITHMS = Registry("algorithm", home="embodyrl.pipelines.builtin", group="embodyrl.algorithms", entry=AlgorithmEntry)
"""Iterations, each as a list of stages."""

ADVANTAGES = Registry(
    "advantage",
    home="embodyrl.algorithms.builtin:declare_advantages",
    group="embodyrl.advantages",
    entry=AdvantageEntry,
)
"""Advantage estimators."""

LOSSES = Registry("loss", home="embodyrl.algorithms.builtin:declare_losses", group="embodyrl.losses", entry=LossEntry)
"""Policy losses."""

REWARDS = Registry(
    "reward", home="embodyrl.algorithms.builtin:declare_rewards", group="embodyrl.rewards", entry=RewardEntry
)
"""What is learned from."""

FILTERS = Registry(
    "filter", home="embodyrl.algorithms.builtin:declare_filters", group="embodyrl.filters", entry=FilterEntry
)
"""Which groups are learned from."""

ENCODERS = Registry(
    "encoder", home="embodyrl.algorithms.builtin:declare_encoders", group="embodyrl.encoders", entry=Entry
)
"""What turns the observations of an episode into a vector. Target: callable (images, proprio, dim=) -> `[E]`."""

STAGES = Registry("stage", home="embodyrl.pipelines.builtin_stages", group="embodyrl.stages", entry=StageEntry)
"""What a stage of an iteration does. Target: callable (iteration) -> None."""

OPTIMIZERS = Registry("optimizer", home="embodyrl.engine.builtin", group="embodyrl.optimizers", entry=Entry)
"""What steps weights along gradients. Target: callable (groups of parameters, `config.schema.OptimizerConfig`) -> torch
optimiser whose state is all in `state_dict`, so that it can be saved and moved."""

SINKS = Registry("sink", home="embodyrl.tracking.builtin", group="embodyrl.sinks", entry=Entry)
"""Where metrics go. Target: callable (context) -> `tracking.Sink`."""

EXPERTS = Registry("expert", home="embodyrl.data.builtin_experts", group="embodyrl.experts", entry=Entry)
"""Who demonstrates the tasks of a simulator, under the simulator's name. Target: callable (env config) ->
`data.experts.Demonstrator`."""


def all_registries() -> list[Registry[Any]]:
    """Every registry of this module."""
    return [thing for thing in globals().values() if isinstance(thing, Registry)]
