"""What is known of simulators and models before they are imported: a light class for each, which its registry entry
names and which answers what configs are checked by.

A component answers what it knows, by methods of the same names; the answers here are those of one that says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.signatures import wrong_methods
from embodyrl.errors import PluginError, UserError, at_line, did_you_mean, line_of, line_of_plugin
from embodyrl.registry import SIMULATORS, Registry, SupportedModel, load_target

if TYPE_CHECKING:
    from embodyrl.config.schema import Config, EnvConfig

MOST_EPISODE_STEPS = 10_000_000
"""Longest time limit of an episode [control steps]; stands for none."""
MOST_NUMBERS = 1_000_000
"""Most numbers of a state or an action."""
MOST_NAMES = 100_000
"""Most tasks or cameras."""
USUAL_EPISODE_STEPS = 100
"""Time limit of simulators whose tasks have none of their own [control steps]."""


class Info:
    """What is known of a component without importing it. Names of a subclass that nobody asks for begin with _.

    Args:
        name: the name under which it is registered.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def says(self, name: str) -> bool:
        """Return whether the component answers this itself, not by default."""
        base = next(each for each in type(self).__mro__ if Info in each.__bases__)
        return getattr(type(self), name) is not getattr(base, name)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config, without importing the component."""
        yield from ()


Env = TypeVar("Env", bound="EnvConfig", contravariant=True)
"""Options of a simulator: the section `env`."""


class SimulatorInfo(Info, Generic[Env]):
    """What is known of a simulator without importing it."""

    def tasks(self) -> Sequence[str] | None:
        """Return all task names; None: known only to the running simulator."""
        return None

    def listed_tasks(self) -> Sequence[str] | None:
        """Return all task names for `embodyrl list tasks`, for which it may import packages."""
        return self.tasks()

    def further_tasks(self, env: Env) -> dict[str, str] | None:
        """Return the tasks that its options add to `tasks`, with their task descriptions; None if what they are read
        from is not on this machine."""
        return {}

    def task_description(self, task: str) -> str:
        """Return the task description of a task; empty: known only to the running simulator."""
        return ""

    def cameras(self) -> Sequence[str] | None:
        """Return all camera names; None: as with tasks."""
        return None

    def state_dim(self, env: Env) -> int | None:
        """Return the size of the state (S); None if only the running simulator knows it."""
        return None

    def environment_state(self, env: Env) -> tuple[int, int] | None:
        """Return which numbers of the state are the environment's (`SimulatorSpec`), in the same way."""
        return (0, 0) if self.says("state_dim") else None

    def action_dim(self, env: Env) -> int | None:
        """Return the size of an action (D), in the same way."""
        return None

    def control_frequency(self, env: Env) -> float | None:
        """Return the control steps per second [Hz], in the same way."""
        return None

    def discrete(self, env: Env) -> bool | None:
        """Return whether an action is a choice, in the same way."""
        return False

    def time_limit(self, env: Env) -> int | None:
        """Return the tasks' own time limit [control steps], the longest of them, in the same way;
        `MOST_EPISODE_STEPS` if there is none."""
        return USUAL_EPISODE_STEPS

    def initial_state(self, start_state: int, env: Env) -> int:
        """Return the number of the initial state of a start state, where several start states are the same one."""
        return start_state

    def perturbations(self, env: Env) -> Sequence[str]:
        """Return the kinds of perturbation that it can do, of those in `env.perturb`: by default what
        `embodyrl.envs.base.SlotSimulator` does for every simulator."""
        return ["noise", "words"] if env.cameras else ["words"]

    def fills_gpu(self, env: Env) -> bool:
        """Return whether each process occupies a GPU."""
        return False

    def check_here(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for everything that this machine lacks for a config."""
        yield from ()

    def assets(self) -> tuple[str, str] | None:
        """Return which downloads are present, and the remedy for missing ones or ""; None: there are none."""
        return None

    def rendering_checks(self, machine: Any) -> Sequence[Any] | None:
        """Return the `placement.graphics.RenderingCheck`s of a machine (`placement.plan.Inventory`), for `embodyrl
        doctor`; None: those of the simulators with the same graphics."""
        return None


class ModelInfo(Info):
    """What is known of a model without importing it."""

    def notes(self, config: Config) -> Iterator[str]:
        """Yield notes for `embodyrl validate`: what is no fault, such as options read from the checkpoint's files."""
        yield from ()

    def executed(self, folder: Path) -> dict[str, Any]:
        """Return the settings of `eval` that execute the chunks of a checkpoint as its own library does; empty: it does
        not say."""
        return {}

    def check_learning(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield issues of options with which it can act, but not learn by reinforcement."""
        yield from ()

    def untrainable(self) -> tuple[str, str] | None:
        """Return why no run can train it, and what to do with it instead; None: it has weights that can be trained."""
        return None


class InfoError(PluginError):
    """Raised when what a stranger wrote of a component cannot be asked, or answers what cannot be.

    Args:
        message: what is wrong, and where.
        kind: of the component, `simulator` or `model`.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.setting = {"simulator": "env.name", "model": "model.name"}[kind]
        """The setting that names the component."""


class Answer(NamedTuple):
    """What a method may answer."""

    words: str
    fits: Callable[[Any], bool]
    is_list: bool = False
    """Whether it may be any iterable."""


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, Integral) and not isinstance(found, bool) and low <= int(found) <= high


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda found: found is None or fits(found)


def _are(kind: type) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, list) and all(isinstance(each, kind) for each in found)


def _is_map(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(each, str) for each in found)


def _is_rate(found: Any) -> bool:
    return isinstance(found, Real) and not isinstance(found, bool) and 0.0 < float(found) < math.inf


def _is_pair(found: Any) -> bool:
    return isinstance(found, tuple | list) and len(found) == 2 and all(_whole(0, MOST_NUMBERS)(each) for each in found)


def _are_two_texts(found: Any) -> bool:
    return isinstance(found, tuple | list) and len(found) == 2 and _are(str)([*found])


_NAMES = Answer("a list of names, or None", _or_none(_are(str)), True)
_FLAG = Answer("True or False", lambda found: isinstance(found, bool))
_ISSUES = Answer("an iterator of ConfigIssue: yield one for each fault", _are(ConfigIssue), True)
ANSWERS = {
    **{name: _NAMES for name in ("tasks", "listed_tasks", "cameras")},
    "further_tasks": Answer(
        "a dictionary {task: description}, or None",
        _or_none(lambda found: _is_map(found) and _are(str)([*found.values()])),
    ),
    "task_description": Answer("a text", lambda found: isinstance(found, str)),
    "state_dim": Answer(f"a number 0 .. {MOST_NUMBERS:,}, or None", _or_none(_whole(0, MOST_NUMBERS))),
    "environment_state": Answer("two numbers, begin and end, or None", _or_none(_is_pair)),
    "action_dim": Answer(f"a number 1 .. {MOST_NUMBERS:,}, or None", _or_none(_whole(1, MOST_NUMBERS))),
    "control_frequency": Answer("a number above 0, or None", _or_none(_is_rate)),
    "discrete": Answer("True, False or None", _or_none(_FLAG.fits)),
    "time_limit": Answer(
        f"a number of control steps 1 .. {MOST_EPISODE_STEPS:,}, or None", _or_none(_whole(1, MOST_EPISODE_STEPS))
    ),
    "initial_state": Answer("a number from 0 on", _whole(0, 2**63 - 1)),
    "perturbations": Answer("a list of names", _are(str), True),
    "fills_gpu": _FLAG,
    "check": _ISSUES,
    "check_here": _ISSUES,
    "assets": Answer("two texts, what is present and the remedy, or None", _or_none(_are_two_texts)),
    "rendering_checks": Answer("a list of RenderingCheck, or None", _or_none(_are(object)), True),
    "notes": Answer("an iterator of texts: yield one for each note", _are(str), True),
    "executed": Answer("a dictionary of settings of `eval`", _is_map),
    "untrainable": Answer("two texts, why and what to do instead, or None", _or_none(_are_two_texts)),
}
"""What methods may answer, by name."""


AnyInfo = TypeVar("AnyInfo", bound=Info)


def simulator_info(name: str, *, installed: bool = False) -> SimulatorInfo[Any]:
    """Return what is known of a simulator, nothing of an unknown one.

    Args:
        name: its name.
        installed: whether it knows nothing if its packages are missing.

    Raises:
        InfoError: a plug-in registered something else, or a class that cannot be asked.
    """
    return _info(SIMULATORS, name, SimulatorInfo, installed)


def model_info(name: str, *, installed: bool = False) -> ModelInfo:
    """Return what is known of a model, see `simulator_info`."""
    return _info(SupportedModel, name, ModelInfo, installed)


def _info(registry: Registry[Any], name: str, base: type[AnyInfo], installed: bool) -> AnyInfo:
    if name not in registry or (installed and registry.entry(name).missing()):
        return base(name)
    entry, what = registry.entry(name), f"{registry.kind} {name!r}"
    try:
        found = load_target(entry.info) if isinstance(entry.info, str) else entry.info
    except Exception as error:  # its module may do anything
        message = f"{what} is registered with info={entry.info!r}: {error} (it is 'module:class', or the class)"
        raise InfoError(message, registry.kind) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        is_no = f"which is no subclass of {base.__module__}.{base.__name__}"
        raise InfoError(f"{what} is registered with info={entry.info!r}, {is_no}", registry.kind)
    # The package's own are checked by mypy; what a stranger wrote is checked when it is asked.
    if entry.source == "built-in":
        return found(name)
    if (fault := _fault_of(found)) is not None:
        raise InfoError(f"{what}: {fault}", registry.kind)
    info: AnyInfo = _checked(found, found, registry.kind)(name)
    for method, expected in ANSWERS.items():
        if hasattr(info, method):
            setattr(info, method, _checked(found, getattr(info, method), registry.kind, expected))
    return info


def _fault_of(found: type[Any]) -> str | None:
    """Return the first name or signature of a stranger's class that does not suit how it is asked."""
    known = {name for base in found.__mro__ if base.__module__.startswith("embodyrl.") for name in vars(base)}
    for name in vars(found):
        if not (name.startswith("_") or name.isupper() or name in known):
            hint = did_you_mean(name, [each for each in known if not each.startswith("_")], lead=" - ")
            return f"{found.__qualname__}.{name} answers nothing that is asked{hint} (names of its own begin with _)"
    base = next(each for each in found.__mro__ if each.__module__.startswith("embodyrl."))
    return next((" - ".join(fault) for fault in wrong_methods(found, base, beside=("__init__",))), None)


def _entries(answer: Any) -> Any:
    """Return what can be iterated as a list, other answers as they are."""
    can_be = isinstance(answer, Iterable) and not isinstance(answer, str)
    return list(islice(answer, MOST_NAMES)) if can_be else answer  # it need not end


def _checked(found: type[Info], method: Any, kind: str, expected: Answer | None = None) -> Any:
    """Return a function that asks a method of a stranger's class, and says who gave a wrong answer."""
    what = f"{found.__qualname__}.{getattr(method, '__name__', '')}" if expected else f"{found.__qualname__}(name)"

    def ask(*arguments: Any) -> Any:
        try:
            answer = method(*arguments)
            if (
                expected is not None
                and expected.is_list
                and isinstance(answer, Iterable)
                and not isinstance(answer, str)
            ):
                answer = list(islice(answer, MOST_NAMES))  # it need not end
        except UserError:
            raise
        except Exception as error:  # whatever a stranger's method raises
            place = f" ({at_line(*line)})" if (line := line_of_plugin(error)) is not None else line_of(method)
            raise InfoError(f"{what} failed: {type(error).__name__}: {error}{place}", kind) from error
        if expected is not None and not expected.fits(answer):
            message = f"{what} returned {answer!r:.80}, expected {expected.words}{line_of(method)}"
            raise InfoError(message, kind)
        return answer

    return ask


def repeated_for(env: EnvConfig, wanted: float, frequency: float) -> int | None:
    """Return the value of `action_repeat` with which a simulator takes `wanted` actions per second, in place of
    `frequency`; None if there is none."""
    steps = frequency * getattr(env, "action_repeat", 0)
    repeat = round(steps / wanted)
    return repeat if repeat and round(steps / repeat) == round(wanted) else None
