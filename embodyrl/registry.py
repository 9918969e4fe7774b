"""Registries of components by name. A component is imported on first use.

Built-in components are declared in one module per registry (its `home`), which imports nothing heavy. Installed
packages add theirs through entry points of the registry's group; users call `register` in a module that the YAML lists
under `plugins:`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fnmatch
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from embodyrl.errors import DuplicateNameError, MissingPackageError, PluginError, UnknownNameError, did_you_mean

E = TypeVar("E", bound="Entry")
Function = str
"""`module:function`, which is imported when it is first called."""


@functools.cache
def _entry_points() -> Any:  # the class differs between Python 3.11 and 3.12
    """Return the entry points of all installed packages, read once: that takes as long as checking a config."""
    return importlib.metadata.entry_points()


def load_target(target: str) -> Any:
    """Import `module:object` and return the object.

    Raises:
        PluginError: there is no such module, or no such object in it.
    """
    module, _, attribute = target.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another one
        raise PluginError(f"{target!r} cannot be imported: there is no module {error.name!r}") from error
    if not hasattr(found, attribute):
        hint = did_you_mean(attribute, vars(found), lead=" - ")
        raise PluginError(f"{target!r} cannot be imported: module {module!r} has no {attribute!r}{hint}")
    return getattr(found, attribute)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Leave the garbage collector out of a block that imports: nothing of it is garbage, and looking for some takes a
    sixth of the time, for some libraries a quarter."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # What is there now counts as old from here on without being looked at, and is still collected when it is not
        # needed any more. What somebody has frozen stays so.
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if collects:
            gc.enable()


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A package that a component imports, and the command that installs it."""

    module: str
    """Name of the module, as in `import mani_skill`."""
    install: str
    """Command that installs it."""

    def is_met(self) -> bool:
        """Return whether the package is installed, without importing it."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # the parent package of a submodule is missing
            return False

    def load(self, what: str) -> Any:
        """Import the package for a purpose, as in `videos are written`, and return the module.

        Raises:
            MissingPackageError: it cannot be imported.
        """
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            raise MissingPackageError(
                f"{what} with package {self.module!r}, which cannot be imported here ({error}): {self.install}"
            ) from error


PYAV = Requirement(module="av", install="pip install av")
"""Package that videos are written and read with, and nothing else is."""


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
    """A registered component, and what is known of it without importing it."""

    name: str
    target: Any
    """The component, or `module:object` to import it from on first use."""
    summary: str
    """One line for `embodyrl list`."""
    options: str | type | None = None
    """Dataclass of the component's own options (the class, or `module:object`); it becomes part of the config
    schema."""
    requires: Sequence[Requirement] = ()
    """Packages that it needs."""
    source: str = "built-in"
    """Origin: `built-in`, `entry point NAME` or `plug-in`."""

    def missing(self) -> list[Requirement]:
        """Return the requirements that are not installed."""
        return [requirement for requirement in self.requires if not requirement.is_met()]

    def load(self) -> Any:
        """Import the component.

        Raises:
            MissingPackageError: a required package is not installed.
            PluginError: the target names nothing.
        """
        missing = self.missing()
        if missing:
            raise MissingPackageError(
                f"{self.name!r} needs {', '.join(requirement.module for requirement in missing)}, which is not "
                f"installed: {missing[0].install}"
            )
        if not isinstance(self.target, str):
            return self.target
        if self.target.partition(":")[0] in sys.modules:
            return load_target(self.target)
        with nothing_collected():
            return load_target(self.target)

    def load_options(self) -> type | None:
        """Return the options dataclass, imported if necessary; None if the component has no options."""
        return load_target(self.options) if isinstance(self.options, str) else self.options


@dataclass(frozen=True, kw_only=True)
class PublicCheckpoint:
    """A checkpoint on the Hugging Face hub, and what it was trained for."""

    name: str
    """Its name there, as in hf://owner/name."""
    tasks: Sequence[str] = ()
    """Patterns of the tasks that it was trained for, each `simulator/task`; none: a base that is fine-tuned first."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model that it needs, as far as they tell it from other checkpoints for these tasks."""

    def is_for(self, task: str) -> bool:
        """Return whether it was trained for a task, given as `simulator/task`."""
        return any(fnmatch.fnmatchcase(task, pattern) for pattern in self.tasks)


@dataclass(frozen=True, kw_only=True)
class ModelEntry(Entry):
    """A policy. Target: a `models.Policy` class."""

    critic: bool
    """Whether it predicts values."""
    off_policy: bool = False
    """Whether it can learn from a replay (a `models.policy.SoftPolicy`)."""
    weighs: bool = False
    """Whether its `sft_loss` uses the weight of each sample (`models.policy.SAMPLE_WEIGHTS`)."""
    images: bool = True
    """Whether it reads images at all."""
    words: bool = True
    """Whether it reads the task description."""
    frames: bool = False
    """Whether it reads images of earlier decisions, too (`env.frames`)."""
    max_chunk: int | None = None
    """Largest chunk [actions] that it can predict; None: no limit."""
    whole_chunks: bool = False
    """Whether its log-probs belong to whole chunks and none to a single action (`models.policy.ActOutput.counted`)."""
    usual_chunk: int = 1
    """Chunk size of its public checkpoints [actions]."""
    blocks: bool | None = None
    """Whether it consists of layers that can be recomputed, sharded and adapted; None: see its `parallel_plan`."""
    standalone: bool = False
    """Whether it can be built from its checkpoint without a simulator."""
    info: str | type = "embodyrl.config.infos:ModelInfo"
    """What else is known without importing it: a subclass of `config.infos.ModelInfo`, or `module:class`."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Options that a saved policy keeps where a config leaves them null (see `options_to_save`), with their values in
    policies that did not save them."""
    published: str | None = None
    """Name of its published size, or None."""
    checkpoints: Sequence[PublicCheckpoint] = ()
    """Its public checkpoints."""


@dataclass(frozen=True, kw_only=True)
class SimulatorEntry(Entry):
    """A simulator backend. Target: callable (config, num_slots) -> `envs.Simulator`."""

    info: str | type = "embodyrl.config.infos:SimulatorInfo"
    """What else is known without importing it: a subclass of `config.infos.SimulatorInfo`, or `module:class`."""
    graphics: str | None = None
    """Graphics interface of its renderer, `opengl` (MuJoCo) or `vulkan` (SAPIEN); decides the driver variables of its
    processes."""
    preload: Sequence[str] | None = None
    """Modules to import once before its processes are forked, see `placement.child`; None: forking is not safe."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmEntry(Entry):
    """The stages of an iteration. Target: callable (config) -> list of `pipelines.Stage`."""

    options: str | type | None = "embodyrl.methods.on_policy.config:OnPolicyConfig"
    """Its settings, a subclass of `config.schema.AlgorithmConfig`, which also says what it needs."""
    learner: Function | type = "embodyrl.methods.on_policy.learner:OnPolicyLearner"
    """What its stages call: a subclass of `methods.learner.Learner`."""
    critic: bool | None = None
    """Whether its stages provide a critic's values; None: works with and without."""
    demonstrations: bool | None = False
    """Whether it learns from the demonstrations of `data.path`; None: from them if there are any."""

    def load_learner(self) -> Any:
        """Return the class of its learner, imported if necessary."""
        return load_target(self.learner) if isinstance(self.learner, str) else self.learner


@dataclass(frozen=True, kw_only=True)
class AdvantageEntry(Entry):
    """An advantage estimator. Target: see docs/algorithms.md, as for losses, rewards and filters."""

    critic: bool
    """Whether it needs the values of a critic."""
    whole: bool
    """Whether it needs whole episodes."""
    group: bool | Function = False
    """Whether it compares the episodes of a group, or `module:function` that takes its options and returns this."""
    actions: bool = False
    """Whether it supports rewards per action (`algorithm.reward_level: action`)."""
    check: Function | None = None
    """`module:function` that takes the whole config and yields a `config.issues.ConfigIssue` for each fault."""


@dataclass(frozen=True, kw_only=True)
class LossEntry(Entry):
    """A policy loss."""

    whole: bool
    """Whether it needs whole episodes."""
    corrects_staleness: bool = False
    """Whether it weights by the policy that acted, so that it may be an older one (`rollout.mode: async`)."""
    check: Function | None = None
    """As with advantages."""


@dataclass(frozen=True, kw_only=True)
class RewardEntry(Entry):
    """A reward to learn from."""

    whole: bool
    """Whether it needs whole episodes."""
    of_decisions: bool = False
    """Whether it can be computed for single decisions, as they come from a replay: from `rewards`, `success` (only the
    first of an episode), the column `judged`, `executed`, `steps`, `terminated` and `truncated`."""
    judge: Function | None = None
    """`module:function` that takes a `rollout.judging.Seat` and returns the hook that judges observations in rollouts,
    in each process with simulators; None: nothing does."""
    notes: Function | None = None
    """`module:function` that takes the whole config and yields texts: what is no fault, and should be known."""
    judged: str | None = None
    """Column of a rollout in which that hook leaves its judgements, see `rollout.replay_fields.JUDGED`."""
    check: Function | None = None
    """As with advantages."""


@dataclass(frozen=True, kw_only=True)
class FilterEntry(Entry):
    """A filter of groups."""

    group: bool = True
    """Whether it drops groups."""
    check: Function | None = None
    """As with advantages."""


@dataclass(frozen=True, kw_only=True)
class StageEntry(Entry):
    """A stage function, with the columns and resources that it uses, see `pipelines.Stage`."""

    reads: Sequence[str] = ()
    """Columns and resources that it reads."""
    writes: Sequence[str] = ()
    """Columns that it adds."""
    changes: Sequence[str] = ()
    """Columns and resources that it replaces or changes."""
    apart: bool = False
    """Whether it does without large columns that lie with other ranks, or fetches them itself; others get those that
    they declare."""


@dataclass(frozen=True, kw_only=True)
class ExpertEntry(Entry):
    """A scripted expert. Target: callable (env config) -> `data.experts.Demonstrator`."""

    tasks: Sequence[str] = ()
    """Patterns of the tasks that it plays; none: all of its simulator."""

    def cannot_play(self, tasks: Sequence[str]) -> str | None:
        """Return a sentence about those of `tasks` that it does not play, or None if it plays all."""
        others = [task for task in tasks if not any(fnmatch.fnmatchcase(task, pattern) for pattern in self.tasks)]
        if not self.tasks or not others:
            return None
        return f"the scripted expert {self.name!r} does not play {', '.join(others)}: it plays {', '.join(self.tasks)}"


class Registry(Generic[E]):
    """A table of components of one kind.

    Args:
        kind: name of the kind in messages: `model`, `simulator`.
        home: module that declares the built-in entries when it is imported, or `module:function` that declares them
            when it is called. Each registry needs its own.
        group: entry-point group through which installed packages add entries; each entry point names a module or a
            callable that calls `register`.
        entry: dataclass of its entries; its fields are the arguments of `register`.
    """

    def __init__(self, kind: str, *, home: str, group: str, entry: type[E]) -> None:
        self.kind = kind
        self.entry_type = entry
        self.home = home
        self.group = group
        self._entries: dict[str, E] = {}
        self._filled = False
        self._source = "plug-in"
        """Source of entries that are registered now."""

    def register(self, name: str, target: Any, **known: Any) -> None:
        """Add a component.

        Args:
            name: its name in configs.
            target: the component, or `module:object`.
            known: the other fields of the registry's entries (`AdvantageEntry`, ...), with `summary` and `options`.

        Raises:
            DuplicateNameError: the name is taken.
            TypeError: a required field is missing or is no text where one is required, or the entry has no such field.
        """
        self._fill()
        if name in self._entries:
            raise DuplicateNameError(
                f"{self.kind} {name!r} is already registered ({self._entries[name].source}): choose another name"
            )
        self._require_fields(name, known)
        self._require_texts(name, known)
        self._entries[name] = self.entry_type(name=name, target=target, source=self._source, **known)

    def _require_fields(self, name: str, known: Mapping[str, Any]) -> None:
        """Raise TypeError for fields that the entry type does not have, and for missing required ones."""
        what, entry = f"{self.kind} {name!r}", self.entry_type.__name__
        fields = {each.name: each for each in dataclasses.fields(self.entry_type)}
        for set_here in ("name", "target", "source"):
            del fields[set_here]
        if isinstance(known.get("facts"), Mapping):
            instead = ", ".join(f"{key}={value!r}" for key, value in known["facts"].items())
            raise TypeError(f"{what} is registered with facts={{...}}: write them as arguments of their own, {instead}")
        for key in known:
            if key not in fields:
                if "info" in fields and hasattr(load_target(base := str(fields["info"].default)), key):
                    raise TypeError(
                        f"{what} is registered with {key}={known[key]!r:.80}: write it as method {key!r} of a subclass "
                        f"of {base.replace(':', '.')}, and register that with info='module:class'"
                    )
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

    def _require_texts(self, name: str, known: Mapping[str, Any]) -> None:
        """Raise TypeError for a function itself, or its result, where an entry holds `module:function`, and for options
        that are no class."""
        for each in dataclasses.fields(self.entry_type):
            value = known.get(each.name)
            if each.name in ("options", "learner", "info"):
                what = "their dataclass" if each.name == "options" else "the class"
                is_right, wanted = isinstance(value, str | type), f"{what}, or 'module:class'"
            else:
                is_right = "Function" not in str(each.type) or isinstance(value, str | bool)
                wanted = "the text 'module:function', which is imported when it is first called"
            if value is None or is_right:
                continue
            module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
            write = f": write {each.name}={f'{module}:{attribute}'!r}" if module and attribute else ""
            raise TypeError(
                f"{self.kind} {name!r} is registered with {each.name}={value!r:.80}, expected {wanted}{write}"
            )

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        self._fill()
        return sorted(self._entries)

    def entries(self) -> list[E]:
        """Return all entries, sorted by name."""
        return [self._entries[name] for name in self.names()]

    def __contains__(self, name: object) -> bool:
        self._fill()
        return name in self._entries

    def entry(self, name: str) -> E:
        """Return the entry called `name`.

        Raises:
            UnknownNameError: with the near match and the full list.
        """
        self._fill()
        if name not in self._entries:
            raise UnknownNameError(self.unknown(name))
        return self._entries[name]

    def unknown(self, name: str) -> str:
        """Return the message for a name that is not registered, with the near match and the full list."""
        hint = did_you_mean(name, self.names(), lead=" - ")
        return f"{self.kind} {name!r} is not registered{hint} (registered: {', '.join(self.names()) or 'none'})"

    def load(self, name: str) -> Any:
        """Import the component called `name`; see `entry` and `Entry.load` for what is raised."""
        return self.entry(name).load()

    def _fill(self) -> None:
        """Register the components of embodyrl and of installed packages, once, before any other."""
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
                    f"uninstall or fix the package that provides it"
                ) from error
        self._source = "plug-in"


def _is_required(of_entry: dataclasses.Field[Any]) -> bool:
    return of_entry.default is dataclasses.MISSING and of_entry.default_factory is dataclasses.MISSING


SupportedModel = Registry("model", home="embodyrl.models.builtin", group="embodyrl.models", entry=ModelEntry)
"""Policies."""

SIMULATORS = Registry("simulator", home="embodyrl.envs.builtin", group="embodyrl.envs", entry=SimulatorEntry)
"""Simulator backends."""

ALGORITHMS = Registry(
    "algorithm",
    home="embodyrl.methods.builtin:declare_algorithms",
    group="embodyrl.algorithms",
    entry=AlgorithmEntry,
)
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
"""Rewards to learn from."""

FILTERS = Registry(
    "filter", home="embodyrl.algorithms.builtin:declare_filters", group="embodyrl.filters", entry=FilterEntry
)
"""Filters of groups."""

ENCODERS = Registry(
    "encoder", home="embodyrl.algorithms.builtin:declare_encoders", group="embodyrl.encoders", entry=Entry
)
"""Encoders of the observations of an episode. Target: callable (images, proprio, dim=) -> vector `[E]`."""

STAGES = Registry("stage", home="embodyrl.methods.builtin:declare_stages", group="embodyrl.stages", entry=StageEntry)
"""Stage functions of an iteration. Target: callable (iteration) -> None."""

OPTIMIZERS = Registry("optimizer", home="embodyrl.engine.builtin", group="embodyrl.optimizers", entry=Entry)
"""Optimizers. Target: callable (parameter groups, `config.schema.OptimizerConfig`) -> torch optimizer. Its whole state
must be in `state_dict`, so that it can be saved and offloaded."""

SINKS = Registry("sink", home="embodyrl.tracking.builtin", group="embodyrl.sinks", entry=Entry)
"""Sinks of metrics. Target: callable (context) -> `tracking.Sink`."""

EXPERTS = Registry("expert", home="embodyrl.data.experts:declare", group="embodyrl.experts", entry=ExpertEntry)
"""Scripted experts, each under the name of its simulator."""


def all_registries() -> list[Registry[Any]]:
    """Return every registry of this module."""
    return [thing for thing in globals().values() if isinstance(thing, Registry)]
