"""Data types between simulators, the EnvManager and policies; numpy only.

Shapes: `B` simulator slots (envs), `C` actions in a chunk, `D` action dims, `S` proprio dims, `V` cameras,
`H, W` pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.perturb.kinds import Perturbation, checked
from embodyrl.errors import UserError, did_you_mean

MOST_ACTION = 2.0**24
"""Largest number of an action. Float32 holds all whole numbers up to it; larger bounds mean that there are none."""
MEANINGS = (
    *("delta_position", "delta_rotation", "gripper", "joint_delta", "joint_target", "joint_torque", "force"),
    *("normalized", "native", "discrete"),
)
"""What an `ActionField` can mean."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSpec:
    """The episode that a slot plays. The main process chooses it, so the same spec gives the same episode in any
    process."""

    task: str
    """Task name, one of `SimulatorSpec.tasks`."""
    start_state: int
    """Id of the start state, >= 0. Training and evaluation use disjoint ids; members of a group share one."""
    seed: int
    """Seed of everything random inside the simulator during the episode, 0 .. 2**63 - 1. Shared by a group as well."""
    group: int = 0
    """Group of episodes that are compared with each other."""
    perturb: Perturbation = ()
    """Kinds of perturbation and their levels 1 .. 5, as in `(("camera", 2), ("noise", 1))`; drawn from `seed`."""
    source: str = ""
    """Simulator of a mix to which the task belongs, for statistics; empty in a run with one."""

    def __post_init__(self) -> None:
        """Check the perturbation."""
        if self.perturb:
            object.__setattr__(self, "perturb", checked(self.perturb))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> EpisodeSpec:
        """Return the episode that `to_plain` described; other entries are left out."""
        names = ("task", "start_state", "seed", "group", "perturb", "source")
        return cls(**{name: plain[name] for name in names if name in plain})

    def to_plain(self) -> dict[str, Any]:
        """Return the episode as values of JSON; without perturbations as it was before there were any."""
        numbers = {name: int(getattr(self, name)) for name in ("start_state", "seed", "group")}
        changes = {"perturb": [list(pair) for pair in self.perturb]} if self.perturb else {}
        source = {"source": self.source} if self.source else {}
        return {"task": self.task, **numbers, **changes, **source}


@dataclass(frozen=True, kw_only=True)
class ActionField:
    """A named part of the action vector, in the simulator's own units.

    Raises:
        UserError: its meaning is unknown, or its bounds are none.
    """

    name: str
    """For instance `arm`, `gripper`."""
    meaning: str
    """delta_position | delta_rotation | gripper | joint_delta | joint_target | joint_torque | force | normalized |
    native (the environment's own) | discrete (a float that holds one of the integers low .. high)"""
    unit: str
    """Unit of each number: `m`, `rad`, `N`, `N*m`, or `1` for a number without unit."""
    low: tuple[float, ...]
    """Smallest value of each number, at least -2**24."""
    high: tuple[float, ...]
    """Largest value of each number, at most 2**24."""
    scale: float = 1.0
    """Size of an action of 1 in `unit`: 0.01 if it moves the end effector by 1 cm and the unit is `m`."""
    opens: float | None = None
    """Value that opens a gripper with open and close commands; None for other fields."""
    closes: float | None = None
    """Value that closes it."""

    def __post_init__(self) -> None:
        """Check meaning and bounds."""
        if self.meaning not in MEANINGS:
            hint = did_you_mean(self.meaning, MEANINGS, lead=" - ")
            raise UserError(
                f"ActionField(name={self.name!r}) has meaning {self.meaning!r}{hint} (meanings: {', '.join(MEANINGS)})"
            )
        wrong = [
            f"number {number} goes from {low:g} to {high:g}, want -2**24 <= low <= high <= 2**24"
            for number, (low, high) in enumerate(zip(self.low, self.high, strict=False))
            if not -MOST_ACTION <= low <= high <= MOST_ACTION
        ]
        if len(self.low) != len(self.high):
            wrong.append("want as many numbers in both")
        if not wrong and self.meaning == "discrete" and any(end % 1 for end in (*self.low, *self.high)):
            wrong.append("choices are whole numbers")
        if wrong:
            raise UserError(f"ActionField(name={self.name!r}) has low {self.low} and high {self.high}: {wrong[0]}")


@dataclass(frozen=True, kw_only=True)
class SimulatorSpec:
    """Tasks, action and observation format of a simulator. Equal for every slot of a run."""

    tasks: Mapping[str, str]
    """Task name -> task description."""
    actions: tuple[ActionField, ...]
    proprio_dim: int
    """`S`, numbers in the state observation; 0 if there is none."""
    environment_state: tuple[int, int] = (0, 0)
    """Which of these numbers are the state of the environment and not of the robot: the first, and one past the last.
    A model that reads both separately (LeRobot's `observation.environment_state`) takes them from there."""
    max_episode_steps: int
    """Control steps after which an episode is truncated."""
    control_frequency: float
    """Control steps per simulated second [Hz]."""
    cameras: tuple[str, ...] = ()
    """Names of the `V` cameras in the order of `Observation.images`."""
    image_size: tuple[int, int] = (0, 0)
    """`(H, W)` of every camera [pixels]."""
    frames: int = 1
    """Images of each camera in an observation of a run: the newest, and those of decisions before. The EnvManager keeps
    and sets them (`env.frames`); a simulator shows the newest alone and leaves this at 1."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SimulatorSpec:
        """Return a spec from what `dataclasses.asdict` makes of it, after JSON made lists of its tuples."""
        actions = [
            ActionField(**each | {name: tuple(each[name]) for name in ("low", "high")}) for each in plain["actions"]
        ]
        sizes = {name: tuple(plain[name]) for name in ("cameras", "image_size", "environment_state")}
        return cls(**{**plain, **sizes, "actions": tuple(actions)})

    @property
    def num_images(self) -> int:
        """`V`, images in an observation: `frames` times all cameras, all of the newest frame first."""
        return self.frames * len(self.cameras)

    @property
    def action_dim(self) -> int:
        """`D`, numbers of one action."""
        return sum(len(field.low) for field in self.actions)

    @property
    def action_low(self) -> NDArray[np.float32]:
        """Smallest action `[D]`."""
        return np.concatenate([np.asarray(field.low, np.float32) for field in self.actions])

    @property
    def action_high(self) -> NDArray[np.float32]:
        """Largest action `[D]`."""
        return np.concatenate([np.asarray(field.high, np.float32) for field in self.actions])


@dataclass(kw_only=True)
class Observation:
    """Observations of `B` slots, the input of a policy."""

    images: NDArray[np.uint8] | None = None
    """`[B, V, H, W, 3]`, or None without cameras; `V` is `SimulatorSpec.num_images`."""
    proprio: NDArray[np.float32] | None = None
    """`[B, S]`, or None if S is 0."""
    task_descriptions: list[str]
    """Task description of each slot, length `B`."""
    privileged: NDArray[np.float32] | None = None
    """`[B, P]`: the state as an expert sees it who corrects the policy; None without one. No policy reads it."""

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Observation:
        """Return a copy of some rows: where the mask `[B]` is True, or those with these numbers, in their order."""
        numbers = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return Observation(
            images=None if self.images is None else self.images[numbers],
            proprio=None if self.proprio is None else self.proprio[numbers],
            task_descriptions=[self.task_descriptions[number] for number in numbers.tolist()],
            privileged=None if self.privileged is None else self.privileged[numbers],
        )

    @staticmethod
    def concat(observations: Sequence[Observation]) -> Observation:
        """Return the rows of all `observations`, one after the other; each has images, or none has, as with proprio."""
        images = [each.images for each in observations if each.images is not None]
        proprio = [each.proprio for each in observations if each.proprio is not None]
        privileged = [each.privileged for each in observations if each.privileged is not None]
        return Observation(
            images=np.concatenate(images) if images else None,
            proprio=np.concatenate(proprio) if proprio else None,
            task_descriptions=[task for each in observations for task in each.task_descriptions],
            privileged=np.concatenate(privileged) if privileged else None,
        )


@dataclass(kw_only=True)
class ChunkResult:
    """Result of one chunk of actions in `B` slots. Each slot stops at the end of its episode."""

    observation: Observation
    """Observation at the end of the chunk, or of the episode if it ended inside the chunk."""
    rewards: NDArray[np.float32]
    """`[B, C]`; zero for actions that were not executed."""
    success: NDArray[np.bool_]
    """`[B, C]`: the task's success condition held after this action; False for actions not executed."""
    terminated: NDArray[np.bool_]
    """`[B]`: the episode reached a final state inside the chunk."""
    truncated: NDArray[np.bool_]
    """`[B]`: the episode was cut off by the time limit at the end of this chunk, and did not terminate."""
    steps: NDArray[np.int32]
    """`[B]`: actions that were executed, 1 .. C."""
    success_known: NDArray[np.bool_] | None = None
    """`[B]`: the simulator has said in this episode whether the task is solved; where it has not, `success` is False
    and means nothing. None: it always does."""


def nothing_executed(batch: int, chunk: int) -> ChunkResult:
    """Return the initial result of a chunk: `batch` (B) slots, with none of `chunk` (C) actions executed."""
    return ChunkResult(
        observation=Observation(task_descriptions=[]),
        rewards=np.zeros((batch, chunk), np.float32),
        success=np.zeros((batch, chunk), np.bool_),
        terminated=np.zeros(batch, np.bool_),
        truncated=np.zeros(batch, np.bool_),
        steps=np.zeros(batch, np.int32),
    )


class Simulator(Protocol):
    """A batch of slots inside one process. Slots are numbered from 0 within the simulator."""

    spec: SimulatorSpec

    def reset(self, slots: Sequence[int], episodes: Sequence[EpisodeSpec]) -> Observation:
        """Start `episodes[i]` in slot `slots[i]`; returns the first observation of these slots, in that order."""
        ...

    def step_chunk(self, slots: Sequence[int], actions: NDArray[np.float32]) -> ChunkResult:
        """Execute `actions [B, C, D]` (simulator units), stopping each slot at its own end of episode."""
        ...

    def get_state(self, slots: Sequence[int]) -> list[bytes]:
        """Return a self-contained state per slot: physics, controllers, RNG, counters, episode. Never a pickle."""
        ...

    def set_state(self, slots: Sequence[int], states: Sequence[bytes]) -> Sequence[int] | None:
        """Continue from states of `get_state`, bit for bit, also in another process or another slot.

        Returns:
            The slots that were not restored exactly, whose episodes are then lost; None or empty if all were.
        """
        ...

    def observe(self, slots: Sequence[int]) -> Observation:
        """Return the current observation of these slots, that of the last reset, step_chunk or set_state."""
        ...

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """Render images for people, `[B, H, W, 3]`."""
        ...

    def close(self) -> None:
        """Release all resources; may be called twice."""
        ...
