"""A good simulator and a good model in one file, as a plug-in."""

from __future__ import annotations

import uuid
from pathlib import Path

GOOD = """
import random
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal

from embodyrl.config.schema import EnvConfig, ModelConfig, setting
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.envs.base import Slot, SlotSimulator, Transition
from embodyrl.envs.conventions import from_unit_range, unit_range
from embodyrl.models import ActOutput, EvalOutput, Policy, PolicySpec
from embodyrl.registry import SIMULATORS, SupportedModel


@dataclass(frozen=True, kw_only=True)
class CartConfig(EnvConfig):
    friction: float = setting(0.1, low=0.0, high=1.0)


class Track(Slot):
    def __init__(self, config, task):
        self.config, self.place, self.speed, self.random = config, 0.0, 0.0, np.random.default_rng(0)

    def reset(self, episode):
        layout = np.random.default_rng(episode.start_state)
        self.random = np.random.default_rng(episode.seed)
        self.place = layout.uniform(-0.5, 0.5)
        self.speed = 0.0

    def step(self, action):
        wind = self.random.normal(0.0, 0.01)
        self.speed = (1.0 - self.config.friction) * self.speed + 0.1 * float(action[0]) + wind
        before, self.place = self.place, self.place + 0.1 * self.speed
        return Transition(reward=self.place - before, terminated=False, success=self.place > 1.0)

    def observe(self):
        return None, np.array([self.place, self.speed], np.float32)


class Cart(SlotSimulator):
    def __init__(self, config, num_slots):
        self.config = config
        push = ActionField(name="push", meaning="force", unit="N", low=(-2.0,), high=(2.0,))
        spec = SimulatorSpec(
            tasks={task: "drive to the right" for task in config.tasks},
            actions=(push,),
            proprio_dim=2,
            max_episode_steps=config.time_limit,
            control_frequency=10.0,
        )
        super().__init__(spec, num_slots)

    def make_slot(self, task):
        return Track(self.config, task)


@dataclass(frozen=True, kw_only=True)
class LineConfig(ModelConfig):
    noise: float = setting(0.5, above=0.0)


class Line(Policy):
    def __init__(self, config, simulator, chunk_size):
        super().__init__(config, simulator, chunk_size)
        self.spec = PolicySpec(
            kind="gaussian",
            chunk_size=chunk_size,
            action_dim=simulator.action_dim,
            proprio_dim=simulator.proprio_dim,
        )
        self.noise = config.noise
        self.mean = nn.Linear(simulator.proprio_dim, simulator.action_dim)
        self.value = nn.Linear(simulator.proprio_dim, 1)
        centre, half = unit_range(simulator)
        self.register_buffer("centre", torch.from_numpy(centre))
        self.register_buffer("half_width", torch.from_numpy(half))

    def act(self, inputs, mode, generator):
        distribution, values = self.predict(inputs)
        sample = distribution.mean
        if mode == "train":
            sample = sample + self.noise * torch.randn(sample.shape, generator=generator)
        return ActOutput(
            actions=from_unit_range(sample, self.centre, self.half_width).unsqueeze(1),
            logprobs=distribution.log_prob(sample),
            values=values,
            trace={"sample": sample},
        )

    def evaluate(self, inputs, trace):
        distribution, values = self.predict(inputs)
        logprobs, entropy = distribution.log_prob(trace["sample"]), distribution.entropy()
        return EvalOutput(logprobs=logprobs, entropy=entropy, values=values)

    def predict(self, inputs):
        mean = self.mean(inputs["proprio"])
        return Normal(mean, torch.full_like(mean, self.noise)), self.value(inputs["proprio"]).squeeze(-1)


SIMULATORS.register("NAME", target=Cart, options=CartConfig, summary="a cart")
SupportedModel.register("NAME", target=Line, options=LineConfig, critic=True, max_chunk=1, summary="a line")
"""
CONFIG = """
defaults: [algorithm: ppo, _self_]
plugins: [NAME]
env: {name: NAME, tasks: [drive], num_envs: 2}
model: {name: NAME}
"""


def write(folder: Path, text: str = GOOD) -> tuple[Path, Path]:
    """Write the plug-in and its config; returns the config and the module, whose name no other test has."""
    name = f"cart_{uuid.uuid4().hex[:12]}"
    module, config = folder / f"{name}.py", folder / "my.yaml"
    module.write_text(text.replace("NAME", name))
    config.write_text(CONFIG.replace("NAME", name))
    return config, module
