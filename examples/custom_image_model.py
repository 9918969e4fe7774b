"""A model with images in one file, outside the package: a small convolutional Gaussian policy.

    embodyrl run examples/custom_image_model.yaml

It steers the point mass of custom_simulator.py from a camera image. `examples/custom_model.py` is the simplest model;
this one adds `preprocess`, which images need. It gets the same types in rollouts and in learning.
"""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True)
class ConvConfig(ModelConfig):
    """A convolutional policy. These fields become the model's section of the YAML."""

    channels: int = setting(16, low=1, high=256)
    """Channels of the first convolution; the second has twice as many."""
    noise: float = setting(0.5, above=0.0, high=2.0)
    """Standard deviation of exploration, in units of half the action range."""


class ConvPolicy(Policy):
    """Two convolutions over the images of all cameras, then a mean action and a value."""

    centre: Tensor
    half_width: Tensor

    def __init__(self, config: ConvConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        if not simulator.cameras or is_discrete(simulator):
            raise PolicyError("model 'conv' needs images and continuous actions: set env.cameras")
        self.spec = PolicySpec(
            kind="gaussian",
            chunk_size=chunk_size,
            action_dim=simulator.action_dim,
            proprio_dim=simulator.proprio_dim,
        )
        self.noise = config.noise
        self.num_cameras, (height, width) = len(simulator.cameras), simulator.image_size
        self.encoder = nn.Sequential(
            nn.Conv2d(3 * self.num_cameras, config.channels, kernel_size=5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(config.channels, 2 * config.channels, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        features = 2 * config.channels * -(-height // 4) * -(-width // 4)
        self.body = nn.Sequential(nn.Linear(features + simulator.proprio_dim, 64), nn.Tanh())
        self.mean = nn.Linear(64, simulator.action_dim)
        self.value = nn.Linear(64, 1)
        centre, half_width = unit_range(simulator)
        self.register_buffer("centre", torch.from_numpy(centre))
        self.register_buffer("half_width", torch.from_numpy(half_width))

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """Move an observation to the policy's device; images stay uint8: `[B, V, H, W, 3]` -> `[B, V*3, H, W]`."""
        device = self.centre.device
        assert observation.images is not None, "the simulator has cameras, see __init__"
        planes = observation.images.to(device).permute(0, 1, 4, 2, 3).flatten(1, 2)
        proprio = torch.zeros(len(planes), 0) if observation.proprio is None else observation.proprio
        return {"planes": planes, "proprio": proprio.to(device)}

    def act(
        self, inputs: Inputs, mode: Literal["train", "eval"], generator: torch.Generator | None = None
    ) -> ActOutput:
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

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """Score stored samples under the current weights."""
        distribution, values = self.predict(inputs)
        return EvalOutput(
            logprobs=distribution.log_prob(trace["sample"]),
            entropy=distribution.entropy(),
            values=values,
        )

    def predict(self, inputs: Inputs) -> tuple[Normal, Tensor]:
        """Return the distribution of the action `[B, D]` in units of half the range, and the value `[B]`; both
        float32."""
        # Images become floats here and not in `preprocess`, whose results may be kept for several epochs: uint8 takes a
        # quarter of the memory.
        features = self.encoder(inputs["planes"].float() / 255.0)
        hidden = self.body(torch.cat([features, inputs["proprio"].to(features.dtype)], dim=1))
        mean = self.mean(hidden).float()
        distribution = Normal(mean, torch.full_like(mean, self.noise), validate_args=False)
        return distribution, self.value(hidden).squeeze(-1).float()


SupportedModel.register(
    "conv",
    target=ConvPolicy,
    options=ConvConfig,
    critic=True,
    max_chunk=1,
    summary="small convolutional Gaussian policy (examples/custom_image_model.py)",
)
