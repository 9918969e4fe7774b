"""A plug-in for several benchmarks: a simulator whose control steps sleep for a random time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import EnvConfig, setting
from embodyrl.envs.base import Slot, SlotSimulator, Transition
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.registry import SIMULATORS


@dataclass(frozen=True, kw_only=True)
class SleepingConfig(EnvConfig):
    """Duration of steps."""

    name: str = "sleeping"
    tasks: list[str] = setting(["sleep"])
    step_ms: float = setting(5.0, above=0.0)
    """Mean length of a control step [ms]."""
    sigma: float = setting(0.6, low=0.0)
    """Standard deviation of its logarithm; 0: all are equal."""
    length: float = setting(0.0, low=0.0)
    """Median length of an episode in control steps, with a long tail (lognormal); 0: all last until the time limit."""
    length_sigma: float = setting(0.6, low=0.0)
    """Standard deviation of its logarithm."""


class Sleeping(SlotSimulator):
    """Sleeps; the CPU is free meanwhile."""

    def __init__(self, config: SleepingConfig, num_slots: int) -> None:
        """Build `num_slots` slots."""
        self.config = config
        field = ActionField(name="all", meaning="native", unit="1", low=(-1.0,) * 7, high=(1.0,) * 7)
        spec = SimulatorSpec(
            tasks={"sleep": "sleep well"},
            actions=(field,),
            proprio_dim=8,
            max_episode_steps=config.time_limit,
            control_frequency=20.0,
        )
        super().__init__(spec, num_slots)

    def make_slot(self, task: str) -> Slot:
        """One sleeper."""
        return Sleeper(self.config)


class Sleeper(Slot):
    """Lengths of steps depend only on the episode, so that every schedule gets the same ones."""

    def __init__(self, config: SleepingConfig) -> None:
        """Sleep as `config` says."""
        self.config = config
        self.mean, self.sigma = config.step_ms / 1e3, config.sigma
        self.dice = np.random.default_rng()
        self.left = math.inf

    def reset(self, episode: EpisodeSpec) -> None:
        """Seed the lengths of steps, and of the episode, by the episode."""
        self.dice = np.random.default_rng(episode.seed)
        self.left = math.inf
        if self.config.length:
            self.left = self.config.length * float(np.exp(self.config.length_sigma * self.dice.normal()))

    def step(self, action: NDArray[np.float32]) -> Transition:
        """Sleep for a lognormally distributed time with the mean that was asked for."""
        time.sleep(self.mean * float(np.exp(self.sigma * self.dice.normal() - self.sigma**2 / 2)))
        self.left -= 1
        return Transition(0.0, self.left <= 0, self.left <= 0)

    def observe(self) -> tuple[None, NDArray[np.float32]]:
        """Return a constant observation."""
        return None, np.zeros(8, np.float32)


SIMULATORS.register("sleeping", target=Sleeping, options=SleepingConfig, summary="steps that only take time")
