"""A plug-in with a simulator that misbehaves on command: entry 0 of an action says how, entry 1 is added up."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from embodyrl.config.schema import EnvConfig, setting
from embodyrl.envs.types import ActionField, ChunkResult, EpisodeSpec, Observation, SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.registry import SIMULATORS


class Do(IntEnum):
    STEP = 0
    END = 1
    RAISE = 2
    EXIT = 3
    HANG = 4
    DIE = 5
    NAN_REWARD = 6
    INF_OBSERVATION = 7
    SLOW = 8


@dataclass(frozen=True, kw_only=True)
class ToyConfig(EnvConfig):
    name: str = "toy"
    tasks: list[str] = setting(["add", "subtract"])
    images: bool = False
    start: str = "well"
    """How the simulator starts: well, badly (it raises), not (it hangs), killed, refused (a mistake of the user)."""
    hangs: str | None = None
    """A file: while it is there, processes hang when they start."""
    doomed: str | None = None
    """A file with a number: so many processes are killed while they start, each counting it down, if it is there."""


class Toy:
    """Adds numbers up. `proprio` is the total, the steps and a constant."""

    def __init__(self, config: ToyConfig, num_slots: int) -> None:
        if config.start == "badly":
            raise ValueError("no such robot")
        if config.start == "refused":
            raise UserError("the assets are missing: download them")
        if config.doomed is not None and (file := Path(config.doomed)).exists() and (left := int(file.read_text())):
            counted = file.with_name(f"{file.name}.{os.getpid()}")  # others read it meanwhile, and never half of it
            counted.write_text(str(left - 1))
            counted.replace(file)
            os.kill(os.getpid(), signal.SIGKILL)
        if config.hangs is not None and Path(config.hangs).exists():
            time.sleep(1000)
        if config.start == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.start == "not":
            time.sleep(1000)
        self.config = config
        self.spec = SimulatorSpec(
            tasks={"add": "add the numbers up", "subtract": "subtract the numbers"},
            actions=(
                ActionField(name="do", meaning="native", unit="1", low=(0.0,), high=(10.0,)),
                ActionField(name="number", meaning="native", unit="1", low=(-1.0,), high=(1.0,)),
            ),
            proprio_dim=3,
            max_episode_steps=config.max_episode_steps,
            control_frequency=10.0,
            cameras=("front", "wrist") if config.images else (),
            image_size=(4, 6) if config.images else (0, 0),
        )
        self.slots = [None] * num_slots

    def reset(self, slots, episodes):
        for slot, episode in zip(slots, episodes, strict=True):
            self.slots[slot] = {
                "episode": vars(episode),
                "total": float(episode.start_state),
                "steps": 0,
                "dice": np.random.default_rng(episode.seed).bit_generator.state,
                "broken": False,
            }
        return self.observe(slots)

    def step_chunk(self, slots, actions):
        batch, chunk = actions.shape[:2]
        result = ChunkResult(
            observation=Observation(task_descriptions=[]),
            rewards=np.zeros((batch, chunk), np.float32),
            success=np.zeros((batch, chunk), bool),
            terminated=np.zeros(batch, bool),
            truncated=np.zeros(batch, bool),
            steps=np.zeros(batch, np.int32),
        )
        for row, slot in enumerate(slots):
            for column, action in enumerate(actions[row]):
                do = Do(int(action[0]))
                result.rewards[row, column] = self.step(self.slots[slot], do, float(action[1]))
                result.steps[row] += 1
                result.terminated[row] = result.success[row, column] = do is Do.END
                result.truncated[row] = do is not Do.END and self.slots[slot]["steps"] >= self.config.max_episode_steps
                if result.terminated[row] or result.truncated[row]:
                    break
        result.observation = self.observe(slots)
        return result

    def step(self, state, do, number):
        state["steps"] += 1
        if do is Do.RAISE:
            raise ArithmeticError(f"cannot add {number:.1f}")
        if do is Do.EXIT:
            sys.exit(3)
        if do is Do.HANG:
            time.sleep(1000)
        if do is Do.SLOW:
            time.sleep(0.5)
        if do is Do.DIE:
            print("the arm has come off")
            os.kill(os.getpid(), signal.SIGKILL)
        state["broken"] |= do is Do.INF_OBSERVATION
        dice = np.random.default_rng()
        dice.bit_generator.state = state["dice"]
        state["total"] += (number if state["episode"]["task"] == "add" else -number) + dice.normal()
        state["dice"] = dice.bit_generator.state
        return np.nan if do is Do.NAN_REWARD else state["total"]

    def observe(self, slots):
        states = [self.slots[slot] for slot in slots]
        rows = [[np.inf if state["broken"] else state["total"], state["steps"], 7.0] for state in states]
        proprio = np.array(rows, np.float32)
        images = None
        if self.config.images:
            pixels = [np.full((2, 4, 6, 3), int(abs(state["total"])) % 256, np.uint8) for state in states]
            images = np.stack(pixels)
        return Observation(
            images=images,
            proprio=proprio,
            task_descriptions=[self.spec.tasks[state["episode"]["task"]] for state in states],
        )

    def get_state(self, slots):
        return [json.dumps(self.slots[slot]).encode() for slot in slots]

    def set_state(self, slots, states):
        for slot, state in zip(slots, states, strict=True):
            self.slots[slot] = json.loads(state)

    def render(self, slots):
        return np.stack([np.full((8, 8, 3), self.slots[slot]["steps"], np.uint8) for slot in slots])

    def close(self):
        pass


def episode(start_state=0, *, task="add", seed=0, group=0):
    return EpisodeSpec(task=task, start_state=start_state, seed=seed, group=group)


def actions(num_slots, chunk_size=1, *, number=0.5, **commands):
    """STEP everywhere, except `slot<b>=Do.X` (last action of slot b's chunk) for rows given by keyword."""
    chunk = np.zeros((num_slots, chunk_size, 2), np.float32)
    chunk[:, :, 1] = number
    for row, do in commands.items():
        chunk[int(row.removeprefix("slot")), -1, 0] = do
    return chunk


SIMULATORS.register("toy", target=Toy, options=ToyConfig, summary="adds numbers up and breaks on command")
