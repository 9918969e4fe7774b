"""The model of verified.py, which simulator processes do not import."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from verified import changed

from embodyrl.config.schema import ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.models import ActOutput, EvalOutput, Inputs, Policy, PolicyObservation, PolicySpec


class Small(Policy):
    """A convolution, and a Gaussian action."""

    def __init__(self, config: ModelConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        self.spec = PolicySpec(kind="gaussian", chunk_size=1, action_dim=2, proprio_dim=4)
        self.seen = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.ReLU(), nn.Flatten())
        self.mean, self.value = nn.Linear(64 + 4, 2), nn.Linear(64 + 4, 1)

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        assert observation.images is not None and observation.proprio is not None
        images = observation.images[:, 0].permute(0, 3, 1, 2).float() / 255 + changed("preprocessing")
        return {"images": images, "proprio": observation.proprio}

    def _predict(self, inputs: Inputs) -> tuple[torch.distributions.Normal, torch.Tensor]:
        features = torch.cat([self.seen(inputs["images"]), inputs["proprio"]], 1)
        mean = self.mean(features) + changed("kernels")
        return torch.distributions.Normal(mean, torch.full_like(mean, 0.3)), self.value(features)[:, 0]

    def act(
        self, inputs: Inputs, mode: Literal["train", "eval"], generator: torch.Generator | None = None
    ) -> ActOutput:
        normal, values = self._predict(inputs)
        noise = torch.randn(normal.mean.shape, generator=generator) if mode == "train" else 0.0
        sample = normal.mean + 0.3 * noise
        logprobs = normal.log_prob(sample)
        return ActOutput(
            actions=sample.clamp(-1, 1)[:, None], logprobs=logprobs, values=values, trace={"sample": sample}
        )

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        normal, values = self._predict(inputs)
        return EvalOutput(logprobs=normal.log_prob(trace["sample"]), entropy=normal.entropy(), values=values)
