"""What is known of simulators and models before they are imported: a light class for each, which its registry entry
names and which answers what configs are checked by.

A component answers what it knows, by methods of the same names; the answers here are those of one that says nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from embodyrl.errors import PluginError, near_match
from embodyrl.registry import SIMULATORS, Registry, SupportedModel, load_target

if TYPE_CHECKING:
    from embodyrl.config.issues import ConfigIssue
    from embodyrl.config.schema import Config, EnvConfig

USUAL_EPISODE_STEPS = 100
"""Time limit of simulators whose tasks have none of their own [control steps]."""


class Info:
    """What is known of a component without importing it.

    Args:
        name: the name under which it is registered.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __init_subclass__(cls) -> None:
        """Refuse a method that nobody asks for, because its name is misspelt, and one with other arguments than it is
        asked with."""
        super().__init_subclass__()
        if Info in cls.__bases__:
            return
        asked = {name: method for base in cls.__mro__[-2::-1] for name, method in vars(base).items() if base is not cls}
        for name, method in vars(cls).items():
            what = f"{cls.__qualname__}.{name}"
            if name.startswith("_"):
                continue
            if name not in asked:
                if (near := near_match(name, asked)) is not None:
                    raise TypeError(
                        f"{what} answers nothing that is asked - did you mean {near!r}? (a name of its own begins "
                        "with _)"
                    )
            elif callable(method):
                given = [*inspect.signature(asked[name]).parameters]
                try:
                    inspect.signature(method).bind(*given)
                except TypeError as error:
                    raise TypeError(f"{what} is called with ({', '.join(given)}): {error}") from error

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
        `config.schema.MOST_EPISODE_STEPS` if there is none."""
        return USUAL_EPISODE_STEPS

    def initial_state(self, start_state: int, env: Env) -> int:
        """Return the number of the initial state of a start state, where several start states are the same one."""
        return start_state

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


AnyInfo = TypeVar("AnyInfo", bound=Info)


def simulator_info(name: str, *, installed: bool = False) -> SimulatorInfo[Any]:
    """Return what is known of a simulator, nothing of an unknown one.

    Args:
        name: its name.
        installed: whether it knows nothing if its packages are missing.

    Raises:
        PluginError: it is registered with something else.
    """
    return _info(SIMULATORS, name, SimulatorInfo, installed)


def model_info(name: str, *, installed: bool = False) -> ModelInfo:
    """Return what is known of a model, see `simulator_info`."""
    return _info(SupportedModel, name, ModelInfo, installed)


def _info(registry: Registry[Any], name: str, base: type[AnyInfo], installed: bool) -> AnyInfo:
    if name not in registry or (installed and registry.entry(name).missing()):
        return base(name)
    info = registry.entry(name).info
    found = load_target(info) if isinstance(info, str) else info
    if not (isinstance(found, type) and issubclass(found, base)):
        raise PluginError(
            f"{registry.kind} {name!r} is registered with info={info!r}, which is no subclass of "
            f"{base.__module__}.{base.__name__}"
        )
    return found(name)
