"""Packages of Gymnasium environments that have a name of their own in `env.name`, and what is known of each.

One table for all of them: which module registers the ids, what installs it, which task descriptions its tasks have and
how it reports success. A package needs code of its own only where its environments cannot be used as they are; that is
in `adapters`. Importing this module imports no simulator.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodyrl.registry import Function, Requirement, load_target

SUCCESS_KEYS = ("is_success", "success", "succeed")
"""Names under which environments report success, the first that is there counts."""


def reported(info: Mapping[str, Any]) -> bool:
    """Return whether a step's info reports success; without any of `SUCCESS_KEYS` there is none."""
    return bool(next((info[key] for key in SUCCESS_KEYS if key in info), False))


def nothing_left(info: Mapping[str, Any]) -> bool:
    """Return whether all subtasks of a kitchen episode are completed, now or earlier in the episode."""
    return not info["tasks_to_complete"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One package of environments."""

    summary: str
    """One line for `embodyrl list simulators`."""
    requires: tuple[Requirement, ...]
    """What it needs."""
    modules: tuple[str, ...]
    """Modules to import, which register the ids; `module:function` is called."""
    ids: str = ""
    """Pattern of the ids in Gymnasium's registry that belong to it."""
    tasks: Function | None = None
    """`module:function` that returns its task names, where these are not ids of Gymnasium."""
    make: Function | None = None
    """`module:function` that makes an environment from a task and `env.kwargs`; None: `gymnasium.make` does."""
    descriptions: Mapping[str, str] = field(default_factory=dict)
    """Task descriptions, by task without its version and without the name of its reward."""
    success: Callable[[Mapping[str, Any]], bool] = reported
    """How a step's info tells success."""

    def has_id(self, task: str) -> bool:
        """Return whether `task` is an id of Gymnasium that belongs to it, without importing anything."""
        return self.tasks is None and re.fullmatch(self.ids, task) is not None

    def known_tasks(self) -> list[str]:
        """Import the package and return all task names, sorted."""
        self.load()
        if self.tasks is not None:
            return sorted(load_target(self.tasks)())
        import gymnasium

        return sorted(name for name in gymnasium.registry if self.has_id(name))

    def load(self) -> None:
        """Import the package, so that its ids are registered."""
        for module in self.modules:
            if ":" in module:
                load_target(module)()
            else:
                importlib.import_module(module)


MUJOCO = "embodyrl.envs.mujoco.rendering:import_mujoco"
"""Imports MuJoCo without OpenGL, which the first image loads; before anything else imports it."""


def _extra(name: str, *modules: str) -> tuple[Requirement, ...]:
    return tuple(Requirement(module=module, install=f"pip install 'embodyrl[{name}]'") for module in modules)


FAMILIES: dict[str, Family] = {
    "mujoco": Family(
        summary="MuJoCo locomotion and control of Gymnasium (v5): HalfCheetah, Ant, Humanoid, Reacher, ...",
        requires=_extra("mujoco", "mujoco", "imageio"),
        modules=(MUJOCO, "gymnasium.envs.mujoco"),
        ids="(Ant|HalfCheetah|Hopper|Humanoid|HumanoidStandup|InvertedPendulum|InvertedDoublePendulum|Pusher|Reacher"
        "|Swimmer|Walker2d)-v[45]",
        descriptions={
            "Ant": "walk forward on four legs",
            "HalfCheetah": "run forward",
            "Hopper": "hop forward on one leg",
            "Humanoid": "walk forward on two legs",
            "HumanoidStandup": "stand up",
            "InvertedPendulum": "balance the pole on the cart",
            "InvertedDoublePendulum": "balance the two poles on the cart",
            "Pusher": "push the cylinder to the goal",
            "Reacher": "move the fingertip to the target",
            "Swimmer": "swim forward",
            "Walker2d": "walk forward on two legs",
        },
    ),
    "pusht": Family(
        summary="gym-pusht: push a T-shaped block onto its mark with a round finger (pymunk)",
        requires=tuple(
            Requirement(
                module=module,
                install="pip install 'embodyrl[pusht]' && pip install --no-deps gym-pusht==0.1.8   (in a checkout: "
                "make pusht)",
            )
            for module in ("gym_pusht", "pymunk")
        ),
        modules=("gym_pusht",),
        ids="gym_pusht/.*",
        descriptions={"gym_pusht/PushT": "push the T-shaped block onto the green T"},
    ),
}


def family(simulator: str) -> Family | None:
    """Return the family of this `env.name`; None for `gymnasium` itself."""
    return FAMILIES.get(simulator)


_ENDING = re.compile(r"(Dense|Sparse)?(-v\d+)?$")


def task_description(task: str) -> str:
    """Return the task description of a task: that of its family, else the words of its name."""
    bare = _ENDING.sub("", task)
    for known in FAMILIES.values():
        if bare in known.descriptions:
            return known.descriptions[bare]
    return f"control {bare.rsplit('/')[-1]}"
