"""A plug-in whose every number is known: proprio is (start state, step), the reward of step n is n; an episode
terminates after step `start_state % 7 + 1`, or is cut off at the time limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import EnvConfig
from embodyrl.envs.base import Slot, SlotSimulator, Transition
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.registry import SIMULATORS

TASKS = {"count": "count up", "recount": "count again"}


def last_step(start_state: int) -> int:
    """The step with which an episode terminates."""
    return start_state % 7 + 1


class Counter(SlotSimulator):
    def __init__(self, config: EnvConfig, num_slots: int) -> None:
        field = ActionField(name="push", meaning="normalized", unit="1", low=(-1.0, -1.0), high=(1.0, 1.0))
        spec = SimulatorSpec(
            tasks={task: TASKS[task] for task in config.tasks},
            actions=(field,),
            proprio_dim=2,
            max_episode_steps=config.max_episode_steps,
            control_frequency=1.0,
        )
        super().__init__(spec, num_slots)

    def make_slot(self, task: str) -> Slot:
        return CounterSlot()


class CounterSlot(Slot):
    start_state = 0
    count = 0

    def reset(self, episode: EpisodeSpec) -> None:
        self.start_state, self.count = episode.start_state, 0

    def step(self, action: NDArray[np.float32]) -> Transition:
        self.count += 1
        done = self.count == last_step(self.start_state)
        return Transition(float(self.count), done, done)

    def observe(self) -> tuple[None, NDArray[np.float32]]:
        return None, np.array([self.start_state, self.count], np.float32)


SIMULATORS.register("counter", target=Counter, options=EnvConfig, summary="counts")
