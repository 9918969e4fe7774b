"""What is known of environments of Gymnasium before they run, and checks of configs with them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from embodyrl.config.issues import ConfigIssue, MissingDependency
from embodyrl.envs.gymnasium.families import OWN_PACKAGES, family, task_description
from embodyrl.envs.gymnasium.tasks import (
    GYMNASIUM,
    OBSERVATION,
    RENDER,
    Facts,
    known_tasks,
    limit_of,
    own_tasks,
    why_not_single,
    why_unknown,
)
from embodyrl.envs.mujoco.info import MuJoCoInfo
from embodyrl.envs.options import GymnasiumConfig
from embodyrl.errors import UserError, did_you_mean
from embodyrl.registry import load_target

if TYPE_CHECKING:
    from embodyrl.config.schema import Config


class GymnasiumInfo(MuJoCoInfo[GymnasiumConfig]):
    """Tasks of Gymnasium or of one family, and what their environments say of themselves."""

    def listed_tasks(self) -> list[str]:
        """Return all task names; packages are imported."""
        return known_tasks(self.name)

    def task_description(self, task: str) -> str:
        """Return the task description of a task: that of its family, else the words of its name."""
        return task_description(task)

    def state_dim(self, env: GymnasiumConfig) -> int | None:
        """Return the size of the state (S)."""
        facts = _first(env)
        return None if facts is None else facts.state_dim

    def environment_state(self, env: GymnasiumConfig) -> tuple[int, int] | None:
        """Return which numbers of the state are the environment's, see `SimulatorSpec.environment_state`."""
        facts = _first(env)
        return None if facts is None else facts.environment_state

    def action_dim(self, env: GymnasiumConfig) -> int | None:
        """Return the size of an action (D)."""
        facts = _first(env)
        return None if facts is None else facts.action_dim

    def control_frequency(self, env: GymnasiumConfig) -> float | None:
        """Return the control steps per second [Hz]; None if the environment does not declare them."""
        facts = _first(env)
        return None if facts is None else facts.control_frequency

    def discrete(self, env: GymnasiumConfig) -> bool | None:
        """Return whether an action is a choice."""
        facts = _first(env)
        return None if facts is None else facts.discrete

    def time_limit(self, env: GymnasiumConfig) -> int | None:
        """Return the longest of the tasks' own time limits [control steps]; None where their package is missing."""
        try:
            known = known_tasks(env.name)
        except Exception:  # of any kind, by code of its own
            return None
        return max((limit_of(env.name, task) for task in env.tasks if task in known), default=None)

    def perturbations(self, env: GymnasiumConfig) -> list[str]:
        """Return the kinds of perturbation that it can do: with cameras of a MuJoCo scene those of its look."""
        of = family(env.name)
        has_scene = of is None or of.on_mujoco
        scene = [each for each in env.cameras if each not in (RENDER, OBSERVATION)] if has_scene else []
        shown = [*self._shown(env), "layout"] if scene and self._has_scene(env) else []
        return [*shown, *(["robot"] if of and of.start else []), *super().perturbations(env)]

    def _has_scene(self, env: GymnasiumConfig) -> bool:
        """Return whether MuJoCo simulates the tasks; of `gymnasium` only Gymnasium's own are known."""
        if family(env.name) is not None:
            return True
        return all(own_tasks().get(task, "mujoco") == "mujoco" for task in env.tasks)

    def check_here(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each task that is registered neither by Gymnasium nor by a plug-in, for each whose package
        is not installed, and for each whose actions the algorithm cannot learn."""
        issues = list(_unknown(config)) or list(_lacking(config)) or list(_misfits(config))
        yield from issues
        needs = config.algorithm.needs(config)
        if not issues and needs.replay is not None and not needs.imitates:
            yield from _choices(config)


def _unknown(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each task that is not registered, or not as a single environment."""
    simulator = config.env.name
    if simulator == GYMNASIUM and "gymnasium" not in sys.modules and own_tasks().keys() >= set(config.env.tasks):
        return
    of = family(simulator)
    try:
        known = known_tasks(simulator) if of is None else of.names()
    except ImportError as error:  # of what it needs itself: that it is installed has been checked
        remedy = "install it again" + ("" if of is None else f": {of.requires[0].install}")
        yield ConfigIssue("env.name", f"the package of {simulator!r} is there and cannot be imported: {error}", remedy)
        return
    for index, task in enumerate(config.env.tasks):
        if task not in known:
            yield ConfigIssue(f"env.tasks.{index}", *why_unknown(simulator, task, known))
        elif (why := why_not_single(task)) is not None:
            yield ConfigIssue(f"env.tasks.{index}", *why)


def _lacking(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each task of Gymnasium itself that needs a package which is not installed."""
    folders = own_tasks() if config.env.name == GYMNASIUM else {}
    for index, task in enumerate(config.env.tasks):
        needed = OWN_PACKAGES.get(folders.get(task, ""))
        if needed is not None and not needed.is_met():
            message = f"the Gymnasium environment {task!r} needs the package {needed.module!r}, which is not installed"
            yield MissingDependency(f"env.tasks.{index}", message, needed.install)


def _misfits(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each of env.kwargs that a constructor does not take, else for what an environment says of
    itself that a run cannot use."""
    env: Any = config.env
    if not (env.kwargs or env.cameras or env.environment_state or len(env.tasks) > 1):
        return  # nothing to compare: whatever an environment needs, its simulator says
    unknown = list(_unknown_arguments(env))
    yield from unknown
    if not unknown and len(env.image_size) == 2:
        yield from _unusable(env)


def _unknown_arguments(env: Any) -> Iterator[ConfigIssue]:
    """Yield an issue for each of env.kwargs that some task's constructor does not take."""
    for key in env.kwargs:
        for task in env.tasks:
            legal = _arguments(env.name, task)
            if legal is not None and key not in legal:
                listed = f"it takes {', '.join(sorted(legal))}" if legal else "it takes none"
                hint = did_you_mean(key, legal, otherwise=listed)
                yield ConfigIssue((("env", "kwargs", key),), f"{task!r} takes no argument {key!r} (env.kwargs)", hint)
                break


def _unusable(env: Any) -> Iterator[ConfigIssue]:
    """Yield an issue for each task that cannot be used with this section, and for those unlike the first."""
    from embodyrl.envs.gymnasium.simulator import look

    shapes: dict[str, tuple[int, int, bool]] = {}
    for index, task in enumerate(env.tasks):
        try:
            facts = look(task, env)
        except UserError as error:
            where = (
                "env.kwargs" if "env.kwargs" in str(error) else "env.cameras" if env.cameras else f"env.tasks.{index}"
            )
            yield ConfigIssue(where, str(error))
        except Exception:  # of any kind, by code of its own, which the simulator will tell of
            continue
        else:
            shapes[task] = (facts.state_dim, facts.action_dim, facts.discrete)
    first = next(iter(shapes), "")
    for task, shape in shapes.items():
        if shape != shapes[first]:
            yield ConfigIssue(
                f"env.tasks.{env.tasks.index(task)}",
                f"env.tasks mixes environments of different shapes: {task!r} has {_shape(shape)}, {first!r} has "
                f"{_shape(shapes[first])}",
                "name environments of one shape",
            )


def _shape(shape: tuple[int, int, bool]) -> str:
    states, actions, discrete = shape
    return f"{states} observation numbers and " + ("a choice for action" if discrete else f"{actions} action numbers")


def _arguments(simulator: str, task: str) -> set[str] | None:
    """Return the arguments that the constructor of an environment takes; None if it does not say so."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    try:
        if (of := family(simulator)) is not None and of.make is not None:
            _, *there = inspect.signature(load_target(of.make)).parameters.values()
        else:
            entry = gymnasium.spec(task).entry_point
            creator: Any = load_env_creator(entry) if isinstance(entry, str) else entry
            there = list(inspect.signature(creator).parameters.values())
    except Exception:  # of any kind, by code of its own, which the simulator will tell of
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in there):
        return None
    return {each.name for each in there if each.kind is not inspect.Parameter.VAR_POSITIONAL}


def _choices(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each task with discrete actions, where they must be continuous."""
    from embodyrl.config.rules import on_policy_algorithms  # not in simulator processes, which ask for the time limit

    head = ", with model.head: gaussian" if hasattr(config.model, "head") else ""
    for index, task in enumerate(config.env.tasks):
        facts = _facts(config.env, task)
        if facts is not None and facts.discrete:
            yield ConfigIssue(
                (f"env.tasks.{index}", "algorithm.name"),
                f"algorithm {config.algorithm.name!r} learns continuous actions, and those of {task!r} are discrete",
                f"set algorithm to {on_policy_algorithms(config)}{head}",
            )


# ---- what an environment says of itself

_SEEN: dict[str, Facts | None] = {}
"""Facts by what they depend on: rules ask for them several times."""


def _facts(env: Any, task: str) -> Facts | None:
    """Return what an environment says of itself; None if it cannot be made, of which its simulator will say why."""
    try:
        import gymnasium

        from embodyrl.envs.gymnasium.simulator import look

        known_tasks(env.name)  # imports what registers them
        options = env.kwargs, env.cameras, env.image_size, env.environment_state
        key = repr((env.name, task, gymnasium.registry.get(task), *options))
        if key not in _SEEN:
            _SEEN[key] = None
            _SEEN[key] = look(task, env)
    except Exception:  # of any kind, by code of its own
        return None
    return _SEEN[key]


def _first(env: Any) -> Facts | None:
    """Return the facts of the first task; those of the others must be the same."""
    return _facts(env, env.tasks[0]) if env.tasks else None
