"""Rules about the classes of plug-ins, as far as importing them shows it: what they derive from, methods that they
lack, signatures, and parts of actions that are written out. What shows only when they run is left to `embodyrl check`.

Nothing is imported for it. A class that derives from one of the package has imported that, so base classes are looked
for among the modules that are there.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from embodyrl.config.infos import InfoError, simulator_info
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import rule
from embodyrl.config.schema import Config
from embodyrl.config.signatures import Fault, definition, wrong_methods, wrong_signature
from embodyrl.errors import UserError, at_line, line_of
from embodyrl.registry import SIMULATORS, Registry, SupportedModel


@rule
def model_is_a_policy(config: Config) -> Iterator[ConfigIssue]:
    """Check the class of a model from a plug-in."""
    where, name = "model.name", config.model.name
    target = _target_of(SupportedModel, name)
    if not isinstance(target, type):
        return
    soft = SupportedModel.entry(name).off_policy
    base_name = "SoftPolicy" if soft else "Policy"
    base = _base("embodyrl.models.policy", base_name)
    if base is None or not issubclass(target, base):
        why = " because it is registered with off_policy=True" if soft else ""
        message = (
            f"model {name!r}: class {target.__qualname__} must derive from embodyrl.models.policy.{base_name}{why}"
        )
        yield ConfigIssue(where, message + line_of(target), f"write class {target.__qualname__}({base_name}):")
        return
    for message, remedy in wrong_methods(target, base, beside=("__init__",)):
        yield ConfigIssue(where, f"model {name!r}: {message}", remedy)


@rule
def simulator_keeps_its_interface(config: Config) -> Iterator[ConfigIssue]:
    """Check the class of a simulator from a plug-in, the slots beside it, and the parts of actions written there."""
    where, name = "env.name", config.env.name
    target = _target_of(SIMULATORS, name)
    if target is None:
        return
    for message, remedy in _wrong_simulator(target):
        yield ConfigIssue(where, f"simulator {name!r}: {message}", remedy)
    for module in dict.fromkeys([getattr(target, "__module__", ""), *config.plugins]):
        for message, remedy in (*_wrong_slots(module), *_wrong_actions(module)):
            yield ConfigIssue(where, f"simulator {name!r}: {message}", remedy)


@rule
def what_is_known_can_be_asked(config: Config) -> Iterator[ConfigIssue]:
    """Check all answers of a plug-in's `SimulatorInfo`: some are asked for only while a run starts."""
    env = config.env
    if env.name not in SIMULATORS or SIMULATORS.entry(env.name).source == "built-in":
        return
    info = simulator_info(env.name, installed=True)
    of_options = (info.state_dim, info.environment_state, info.action_dim, info.control_frequency, info.discrete)
    for ask in (*of_options, info.time_limit, info.fills_gpu):
        try:
            ask(env)
        except InfoError as error:
            yield ConfigIssue((error.setting,), str(error))
    for task in env.tasks:
        info.task_description(task)


def _target_of(registry: Registry[Any], name: str) -> Any:
    """Return the component of a plug-in, if it has been imported already; else None."""
    if name not in registry or (entry := registry.entry(name)).source == "built-in":
        return None
    if not isinstance(entry.target, str):
        return entry.target
    module, _, attribute = entry.target.partition(":")
    return getattr(sys.modules.get(module), attribute, None)


def _base(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _wrong_simulator(target: Any) -> Iterator[Fault]:
    if not callable(target):
        yield f"its target {target!r:.60} cannot be called", "register the class: target=MySimulator"
        return
    names = ["config", "num_slots"]
    if (fault := wrong_signature(target, names)) is not None:
        own = getattr(target, "__qualname__", repr(target))
        init = inspect.getattr_static(target, "__init__") if isinstance(target, type) else target
        yield f"{own}{fault}{line_of(init) or line_of(target)}", f"write {definition('__init__', names)}"
    base = _base("embodyrl.envs.base", "SlotSimulator")
    if isinstance(target, type) and base is not None and issubclass(target, base):
        yield from wrong_methods(target, base)
    elif isinstance(target, type):
        yield from wrong_methods(target, _base("embodyrl.envs.types", "Simulator"))


def _wrong_slots(module: str) -> Iterator[Fault]:
    """Find the faults of the slots that a module defines; one that others derive from may be incomplete."""
    base = _base("embodyrl.envs.base", "Slot")
    for each in list(vars(sys.modules[module]).values()) if base is not None and module in sys.modules else []:
        if isinstance(each, type) and issubclass(each, base) and each.__module__ == module:
            yield from wrong_methods(each, base) if not each.__subclasses__() else ()


def _wrong_actions(module: str) -> Iterator[Fault]:
    """Find the faults of each `ActionField(...)` in a module whose arguments are plain values."""
    field, found = _base("embodyrl.envs.types", "ActionField"), sys.modules.get(module)
    try:
        source = inspect.getsource(found) if found is not None and field is not None else ""
        calls = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call)]
    except (OSError, TypeError, SyntaxError):  # compiled, or changed since
        return
    for call in calls:
        if getattr(call.func, "id", getattr(call.func, "attr", "")) != "ActionField":
            continue
        try:
            field(**{str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
        except UserError as error:
            file = inspect.getsourcefile(found) or module  # type: ignore[arg-type]
            yield f"{error} ({at_line(file, call.lineno)})", ""
        except (ValueError, TypeError):  # computed, or wrong in a way that shows when it runs
            continue
