"""A model with task descriptions and action chunks in one file, outside the package.

    embodyrl run examples/custom_text_model.yaml

It plays both tasks of custom_simulator.py, whose observations are alike: only the task description says where the point
shall go. From one observation it predicts a chunk of `C` actions.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from embodyrl.config.schema import ModelConfig, setting
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import from_unit_range, is_discrete, unit_range
from embodyrl.models import ActOutput, EvalOutput, Inputs, Policy, PolicyError, PolicyObservation, PolicySpec
from embodyrl.registry import SupportedModel

WORDS = 512
"""Rows of the word table. A word's row is a checksum of it, so that no vocabulary must be kept; row 0 is padding."""
LONGEST = 32
"""Words of a task description that are read (L)."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(ModelConfig):
    """A policy that reads the task description. These fields become the model's section of the YAML."""

    width: int = setting(64, low=1, high=4096)
    """Units of the hidden layers."""
    noise: float = setting(0.5, above=0.0, high=2.0)
    """Standard deviation of exploration, in units of half the action range."""


class TextPolicy(Policy):
    """A chunk of mean actions and a value, of the state observation and the sum of the description's word vectors."""

    centre: Tensor
    half_width: Tensor

    def __init__(self, config: TextConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        if simulator.proprio_dim == 0 or is_discrete(simulator):
            raise PolicyError("model 'text' needs a state observation and continuous actions")
        self.spec = PolicySpec(
            kind="gaussian",
            chunk_size=chunk_size,
            action_dim=simulator.action_dim,
            proprio_dim=simulator.proprio_dim,
        )
        self.noise = config.noise
        self.words = nn.EmbeddingBag(WORDS, config.width, mode="sum", padding_idx=0)
        self.state = nn.Linear(simulator.proprio_dim, config.width)
        self.body = nn.Sequential(nn.Tanh(), nn.Linear(config.width, config.width), nn.Tanh())
        self.mean = nn.Linear(config.width, chunk_size * simulator.action_dim)
        self.value = nn.Linear(config.width, 1)
        centre, half_width = unit_range(simulator)
        self.register_buffer("centre", torch.from_numpy(centre))
        self.register_buffer("half_width", torch.from_numpy(half_width))

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """Return the state `[B, S]` and the numbers of the words `[B, L]`, 0 after the last one."""
        assert observation.proprio is not None, "the simulator has a state observation, see __init__"
        device = self.centre.device
        words = torch.zeros(len(observation.task_descriptions), LONGEST, dtype=torch.int64)
        for row, description in zip(words, observation.task_descriptions, strict=True):
            numbers = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in description.split()[:LONGEST]]
            row[: len(numbers)] = torch.tensor(numbers)
        return {"proprio": observation.proprio.to(device), "words": words.to(device)}

    def act(
        self, inputs: Inputs, mode: Literal["train", "eval"], generator: torch.Generator | None = None
    ) -> ActOutput:
        """Choose a chunk of actions: a sample in training, the mean in evaluation."""
        distribution, values = self.predict(inputs)
        sample = mean = distribution.mean
        if mode == "train":
            sample = mean + self.noise * torch.randn(mean.shape, generator=generator, device=mean.device)
        return ActOutput(
            actions=from_unit_range(sample, self.centre, self.half_width),
            logprobs=distribution.log_prob(sample).flatten(1),
            values=values,
            trace={"sample": sample},
        )

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """Score stored samples under the current weights."""
        distribution, values = self.predict(inputs)
        return EvalOutput(
            logprobs=distribution.log_prob(trace["sample"]).flatten(1),
            entropy=distribution.entropy().flatten(1),
            values=values,
        )

    def predict(self, inputs: Inputs) -> tuple[Normal, Tensor]:
        """Return the distribution of the chunk `[B, C, D]` in units of half the range, and the value `[B]`; both
        float32."""
        hidden = self.body(self.state(inputs["proprio"]) + self.words(inputs["words"]))
        means = self.mean(hidden).float().unflatten(1, (self.spec.chunk_size, self.spec.action_dim))
        distribution = Normal(means, torch.full_like(means, self.noise), validate_args=False)
        return distribution, self.value(hidden).squeeze(-1).float()


SupportedModel.register(
    "text",
    target=TextPolicy,
    options=TextConfig,
    critic=True,
    summary="small Gaussian policy with chunks and task descriptions (examples/custom_text_model.py)",
)
