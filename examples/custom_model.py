"""A model in one file: a linear Gaussian policy, outside the package.

    embodyrl run examples/custom_model.yaml

The YAML has `plugins: [custom_model]`, so this module is imported before anything else (also in simulator
processes), and `model: {name: linear}` then finds it. A package would declare an entry point in the group
`embodyrl.models` instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from embodyrl.config.schema import ModelConfig, setting
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import from_unit_range, is_discrete, unit_range
from embodyrl.models import ActOutput, EvalOutput, Policy, PolicyError, PolicySpec
from embodyrl.registry import SupportedModel


@dataclass(frozen=True, kw_only=True)
class LinearConfig(ModelConfig):
    """A linear policy. These fields become the model's section of the YAML: checked, documented, with defaults."""

    noise: float = setting(0.5, above=0.0, high=2.0)
    """Standard deviation of exploration, in units of half the action range."""


class LinearPolicy(Policy):
    """Mean action and value are linear in the state observation; the noise is fixed."""

    centre: Tensor
    half_width: Tensor

    def __init__(self, config: LinearConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        if simulator.proprio_dim == 0 or is_discrete(simulator):
            raise PolicyError("model 'linear' needs a state observation and continuous actions")
        self.spec = PolicySpec(
            kind="gaussian",
            chunk_size=chunk_size,
            action_dim=simulator.action_dim,
            proprio_dim=simulator.proprio_dim,
        )
        self.noise = config.noise
        self.mean = nn.Linear(simulator.proprio_dim, simulator.action_dim)
        self.value = nn.Linear(simulator.proprio_dim, 1)
        centre, half_width = unit_range(simulator)
        self.register_buffer("centre", torch.from_numpy(centre))
        self.register_buffer("half_width", torch.from_numpy(half_width))

    def act(self, inputs: dict[str, Tensor], mode: str, generator: torch.Generator | None = None) -> ActOutput:
        """Choose an action: a sample in training, the mean in evaluation."""
        distribution, values = self.predict(inputs)
        sample = mean = distribution.mean
        if mode == "train":
            sample = mean + self.noise * torch.randn(mean.shape, generator=generator, device=mean.device)
        return ActOutput(
            actions=from_unit_range(sample, self.centre, self.half_width).unsqueeze(1),
            logprobs=distribution.log_prob(sample),
            values=values,
            trace={"sample": sample},
        )

    def evaluate(self, inputs: dict[str, Tensor], trace: dict[str, Tensor]) -> EvalOutput:
        """Score stored samples under the current weights."""
        distribution, values = self.predict(inputs)
        return EvalOutput(
            logprobs=distribution.log_prob(trace["sample"]),
            entropy=distribution.entropy(),
            values=values,
        )

    def predict(self, inputs: dict[str, Tensor]) -> tuple[Normal, Tensor]:
        """Return the distribution of the action `[B, D]` in units of half the range, and value `[B]`; float32, though
        the layers may multiply in bfloat16 (`engine.precision`)."""
        proprio = inputs["proprio"]
        mean = self.mean(proprio).float()
        # Validating the mean would wait for the GPU, and a float as the noise would be copied to it each time.
        distribution = Normal(mean, torch.full_like(mean, self.noise), validate_args=False)
        return distribution, self.value(proprio).squeeze(-1).float()


SupportedModel.register(
    "linear",
    target=LinearPolicy,
    options=LinearConfig,
    critic=True,
    max_chunk=1,
    summary="linear Gaussian policy (examples/custom_model.py)",
)
