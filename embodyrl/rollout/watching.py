"""The beginning of an evaluation's first episode, kept as it passes by: what simulators gave for certain actions.

Shapes: `C` actions in a chunk, `D` action dims, `S` proprio dims, `V` images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodyrl.envs import EpisodeSpec, Observation, SimulatorSpec
from embodyrl.envs.manager import EnvManager, MixedManager, Simulators, StepResult
from embodyrl.envs.manager.memory import Slots
from embodyrl.envs.states import MAGIC, StateError, unpack

WATCHED_STEPS = 20
"""Control steps of an episode that are watched: enough for the end effector to touch things, few enough
for rounding to stay small in physics without contacts."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """An observation, and the simulator's state that it shows."""

    observation: Observation
    """Of one env: images `[1, V, H, W, 3]`, proprio `[1, S]`."""
    state: bytes | None
    """Of `get_state`; None: the simulator saves its states by replaying actions, so that they are no state."""


@dataclass(kw_only=True)
class RecordedStart:
    """The first steps of an episode."""

    episode: EpisodeSpec
    moments: list[Moment]
    """After the reset and, unless the episode ended before, after all actions."""
    actions: list[NDArray[np.float32]] = field(default_factory=list)
    """Chunks `[C, D]` that were executed."""
    proprio: list[NDArray[np.float32]] = field(default_factory=list)
    """`[S]` after each chunk; empty without."""
    rewards: list[NDArray[np.float32]] = field(default_factory=list)
    """`[C]` of each chunk."""
    steps: int = 0
    """Control steps that were executed."""
    renderer: Mapping[str, str] = field(default_factory=dict)
    """See `envs.images`."""


class StartRecorder:
    """Simulators that remember how the first episode of slot 0 begins. All calls pass through unchanged; beside them,
    the state of that slot is read twice.

    Args:
        manager: the simulators.
    """

    spec: SimulatorSpec
    num_envs: int
    chunk_size: int

    def __init__(self, manager: Simulators) -> None:
        self._manager = manager
        self.spec, self.num_envs, self.chunk_size = manager.spec, manager.num_envs, manager.chunk_size
        # An episode that ends has no state any more, so its second moment is half way at the latest.
        self._steps = min(WATCHED_STEPS, max(1, manager.spec.max_episode_steps // 2))
        self._found: RecordedStart | None = None
        self._is_done = False

    def seen(self) -> RecordedStart | None:
        """Return what was seen, once; None if the episode was lost with its process."""
        found, self._found = self._found, None
        if found is not None and isinstance(self._manager, EnvManager | MixedManager):
            found.renderer = self._manager.renderer_names()
        return found

    def reset(self, slots: Slots, episodes: Sequence[EpisodeSpec]) -> Observation:
        """See `EpisodePlayer`."""
        observation = self._manager.reset(slots, episodes)
        row = self._row(slots)
        if row is not None and self._found is None:
            self._found = RecordedStart(episode=episodes[row], moments=[self._moment(observation, row)])
        return observation

    def step(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> StepResult:
        """See `EpisodePlayer`."""
        result = self._manager.step(slots, actions, next_episodes)
        self._see(slots, np.asarray(actions, np.float32), result)
        return result

    def step_recorded(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> tuple[StepResult, list[NDArray[np.uint8]]]:
        """See `EpisodePlayer`."""
        result, images = self._manager.step_recorded(slots, actions, next_episodes)
        self._see(slots, np.asarray(actions, np.float32), result)
        return result, images

    @staticmethod
    def _row(slots: Slots) -> int | None:
        rows = np.flatnonzero(np.asarray(slots) == 0)
        return int(rows[0]) if len(rows) else None

    def _see(self, slots: Slots, actions: NDArray[np.float32], result: StepResult) -> None:
        """Take a chunk of the watched episode."""
        row = self._row(slots)
        if self._is_done or self._found is None or row is None:
            return
        if result.lost[row]:
            self._found, self._is_done = None, True
            return
        found, last = self._found, result.final_observation
        found.actions.append(actions[row].copy())
        found.rewards.append(result.rewards[row].copy())
        found.steps += int(result.steps[row])
        if last.proprio is not None:
            found.proprio.append(last.proprio[row].copy())
        # The state of an episode that ended is gone: its slot may play the next one already.
        self._is_done = bool(result.ended[row]) or found.steps >= self._steps
        if self._is_done and not result.ended[row]:
            found.moments.append(self._moment(last, row))

    def _moment(self, observation: Observation, row: int) -> Moment:
        (state,) = self._manager.get_state([0])
        return Moment(observation=observation.take(np.array([row])), state=state if _stands_alone(state) else None)


def _stands_alone(state: bytes) -> bool:
    """Return whether a state of `get_state` is one, and not the actions that lead to it."""
    return MAGIC in state and b'"saved_by": "replay"' not in state


def arrays_of(state: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays of a state that a manager's `get_state` returned.

    Raises:
        StateError: it is damaged, or of another form.
    """
    if MAGIC not in state:
        raise StateError("the state was not saved by this kind of simulator")
    header, arrays = unpack(state[state.index(MAGIC) :])
    return unpack(arrays["simulator"].tobytes())[1] if "frames" in header else arrays
