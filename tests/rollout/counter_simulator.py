"""A plug-in whose every number is known: proprio is (start state, step), the reward of step n is n, images show
`shade`; an episode terminates after step `start_state % 7 + 1`, or is cut off at the time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import EnvConfig
from embodyrl.envs.base import Slot, SlotSimulator, Transition
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.registry import SIMULATORS

TASKS = {"count": "count up", "recount": "count again"}
COUNTING = EnvConfig(name="counter", tasks=list(TASKS), start_states=50)
COUNT = EnvConfig(name="counter", tasks=["count"])


def last_step(start_state: int) -> int:
    """The step with which an episode terminates."""
    return start_state % 7 + 1


def shade(start_state: int, step: int) -> int:
    """The value of every pixel."""
    return 5 * start_state % 200 + step


class Counter(SlotSimulator):
    action = ActionField(name="push", meaning="normalized", unit="1", low=(-1.0, -1.0), high=(1.0, 1.0))

    def __init__(self, config: EnvConfig, num_slots: int) -> None:
        spec = SimulatorSpec(
            tasks={task: TASKS[task] for task in config.tasks},
            actions=(self.action,),
            proprio_dim=2,
            max_episode_steps=config.max_episode_steps,
            control_frequency=1.0,
            cameras=tuple(config.cameras),
            image_size=tuple(config.image_size) if config.cameras else (0, 0),
        )
        super().__init__(spec, num_slots)

    def make_slot(self, task: str) -> Slot:
        return CounterSlot(self.spec)


class CounterSlot(Slot):
    start_state = 0
    count = 0

    def __init__(self, spec: SimulatorSpec) -> None:
        self.images = (len(spec.cameras), *spec.image_size, 3)

    def reset(self, episode: EpisodeSpec) -> None:
        self.start_state, self.count = episode.start_state, 0

    def step(self, action: NDArray[np.float32]) -> Transition:
        self.count += 1
        done = self.count == last_step(self.start_state)
        return Transition(float(self.count), done, done)

    def observe(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32]]:
        images = np.full(self.images, shade(self.start_state, self.count), np.uint8) if self.images[0] else None
        return images, np.array([self.start_state, self.count], np.float32)


class Chooser(Counter):
    """Takes one choice among five."""

    action = ActionField(name="push", meaning="discrete", unit="1", low=(0.0,), high=(4.0,))


class Dawdler(Counter):
    """Steps of some episodes take long."""

    def make_slot(self, task: str) -> Slot:
        return DawdlerSlot(self.spec)


class DawdlerSlot(CounterSlot):
    def step(self, action: NDArray[np.float32]) -> Transition:
        if self.start_state % 4 == 3:
            time.sleep(0.1)
        return super().step(action)


SIMULATORS.register("counter", target=Counter, options=EnvConfig, summary="counts")
SIMULATORS.register("chooser", target=Chooser, options=EnvConfig, summary="counts and takes choices")
SIMULATORS.register("dawdler", target=Dawdler, options=EnvConfig, summary="counts at different speeds")


class Mortal(Counter):
    """Dies before the third step of an episode, once: the file that `MORTAL` names is there until it happens."""

    def make_slot(self, task: str) -> Slot:
        return MortalSlot(self.spec)


class MortalSlot(CounterSlot):
    def step(self, action: NDArray[np.float32]) -> Transition:
        if self.count == 2:
            with contextlib.suppress(FileNotFoundError):  # of several that come here at once, one dies
                Path(os.environ["MORTAL"]).unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


SIMULATORS.register("mortal", target=Mortal, options=EnvConfig, summary="counts and dies")


class Dice(Counter):
    """Episodes with an odd start state show another number each time they are reset, so they do not come back."""

    def make_slot(self, task: str) -> Slot:
        return DiceSlot(self.spec)


class DiceSlot(CounterSlot):
    thrown = 0.0

    def reset(self, episode: EpisodeSpec) -> None:
        super().reset(episode)
        self.thrown = int.from_bytes(os.urandom(6)) / 2**48 if episode.start_state % 2 else 0.0

    def observe(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32]]:
        images, proprio = super().observe()
        return images, proprio + np.array([0.0, self.thrown], np.float32)


SIMULATORS.register("dice", target=Dice, options=EnvConfig, summary="counts and throws dice")
