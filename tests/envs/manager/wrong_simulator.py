"""A plug-in with two simulators that return something else than they declare: `wrong_slots` and `wrong_batch`."""

from dataclasses import dataclass

import numpy as np

from embodyrl.config.schema import EnvConfig, setting
from embodyrl.envs import ActionField, ChunkResult, Observation, SimulatorSpec
from embodyrl.envs.base import Slot, SlotSimulator, Transition
from embodyrl.registry import SIMULATORS


@dataclass(frozen=True, kw_only=True)
class WrongConfig(EnvConfig):
    tasks: list[str] = setting(["wait"])
    wrong: str = "nothing"
    """What is wrong."""


def spec_of(config):
    return SimulatorSpec(
        tasks={"wait": "wait"},
        actions=(ActionField(name="push", meaning="force", unit="N", low=(-1.0,), high=(1.0,)),),
        proprio_dim=2,
        max_episode_steps=config.max_episode_steps,
        control_frequency=10.0,
        cameras=tuple(config.cameras),
        image_size=(8, 12) if config.wrong == "spec" else tuple(config.image_size),
    )


IMAGES = {
    "size": lambda images: images[:, :-1],
    "type": lambda images: (images / 255).astype(np.float32),
    "channels": lambda images: np.moveaxis(images, -1, -3),
    "views": lambda images: images[0],
}


class Waiting(Slot):
    def __init__(self, config):
        self.wrong = config.wrong
        self.images = np.zeros((1, *config.image_size, 3), np.uint8)

    def reset(self, episode):
        pass

    def step(self, action):
        return {
            "tuple": (0.0, False, False),
            "reward": Transition(reward=np.zeros(2), terminated=False, success=False),
            "no reward": Transition(reward=None, terminated=False, success=False),
            "terminated": Transition(reward=0.0, terminated=np.zeros(2, bool), success=False),
            "own": Transition(reward=float("zero"), terminated=False, success=False) if self.wrong == "own" else None,
        }.get(self.wrong, Transition(reward=0.0, terminated=False, success=False))

    def observe(self):
        images = IMAGES.get(self.wrong, lambda images: images)(self.images)
        state = np.zeros(3 if self.wrong == "state" else 2, np.float64 if self.wrong == "double" else np.float32)
        return state if self.wrong == "pair" else (images, state)


class WrongSlots(SlotSimulator):
    def __init__(self, config, num_slots):
        self.config = config
        super().__init__(spec_of(config), num_slots)

    def make_slot(self, task):
        return Waiting(self.config)


class WrongBatch:
    def __init__(self, config, num_slots):
        self.wrong = config.wrong
        self.spec = spec_of(config)

    def observe(self, slots):
        observation = Observation(
            images=np.zeros((len(slots), 1, *self.spec.image_size, 4 if self.wrong == "images" else 3), np.uint8),
            proprio=None if self.wrong == "no state" else np.zeros((len(slots), 2), np.float32),
            task_descriptions=["go" if self.wrong == "task" else "wait"] * len(slots),
        )
        return (observation, {}) if self.wrong == "pair" else observation

    def reset(self, slots, episodes):
        return self.observe(slots)

    def step_chunk(self, slots, actions):
        batch, chunk = actions.shape[:2]
        return ChunkResult(
            observation=self.observe(slots),
            rewards=np.zeros(batch if self.wrong == "rewards" else (batch, chunk), np.float32),
            success=np.zeros((batch, chunk), bool),
            terminated=None if self.wrong == "done" else np.zeros(batch, bool),
            truncated=np.zeros(batch, bool),
            steps=np.full(batch, chunk, np.int32),
        )

    def close(self):
        pass


for name, target in (("wrong_slots", WrongSlots), ("wrong_batch", WrongBatch)):
    SIMULATORS.register(name, target=target, options=WrongConfig, summary="returns what it does not declare")
