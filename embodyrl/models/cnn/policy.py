"""The CNN policy: encoders of images and state, and the small networks and distributions of the MLP policy behind them.

Shapes: `B` samples, `V` cameras, `F` frames, `C` actions in a chunk, `D` action dims, `N` log-probs per chunk, `S`
proprio dims.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodyrl.envs import SimulatorSpec
from embodyrl.models.cnn.network import Encoder
from embodyrl.models.cnn.options import CNNConfig, Encoders
from embodyrl.models.errors import PolicyError
from embodyrl.models.mlp.flow import FlowActorCritic
from embodyrl.models.mlp.heads import build_head
from embodyrl.models.mlp.policy import ActorCritic
from embodyrl.models.normalizer import SMALLEST_DEVIATION, RunningNormalizer
from embodyrl.models.policy import Inputs, PolicyObservation, PolicySpec
from embodyrl.models.vla.cameras import check_names
from embodyrl.models.vla.processor import check_images, read_state


class Features(nn.Module):
    """What a policy or a value network reads: the features of all images, and those of the state."""

    def __init__(self, config: CNNConfig, simulator: SimulatorSpec, cameras: int) -> None:
        super().__init__()
        count = cameras if config.encoders is Encoders.each else 1
        self.encoders = nn.ModuleList(Encoder(config, simulator.image_size, simulator.frames) for _ in range(count))
        self.size = cameras * config.image_features
        self.state = None
        if config.state:
            self.state = nn.Sequential(nn.Linear(simulator.proprio_dim, config.state_features), nn.Tanh())
            self.size += config.state_features

    def forward(self, images: Tensor, state: Tensor | None) -> Tensor:
        """Map `images [B, V, 3 * F, h, w]` and `state [B, S]` to `[B, size]`."""
        if len(self.encoders) == 1:
            seen = self.encoders[0](images.flatten(0, 1)).unflatten(0, images.shape[:2]).flatten(1)
        else:
            views = zip(self.encoders, images.unbind(1), strict=True)
            seen = torch.cat([encoder(view) for encoder, view in views], dim=1)
        return seen if self.state is None or state is None else torch.cat([seen, self.state(state)], dim=1)


class CNNPolicy(ActorCritic):
    """A CNN with Gaussian outputs for continuous actions or categorical outputs for discrete ones, and a value network
    (with a squashed head: none)."""

    def __init__(self, config: CNNConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        self.config = config
        check_names(config.cameras, simulator.cameras)
        chosen = config.cameras or simulator.cameras
        if not chosen:
            raise PolicyError("the model needs images", "set env.cameras")
        if config.state and simulator.proprio_dim == 0:
            raise PolicyError(
                "the model reads the robot's state, but this simulator has none (proprio_dim 0): set model.state=false"
            )
        self.frames, self.there = simulator.frames, simulator.num_images
        self.order = [simulator.cameras.index(name) for name in chosen]
        self.head = build_head(config, simulator, chunk_size)
        self.spec = PolicySpec(
            kind=self.head.kind,
            chunk_size=chunk_size,
            action_dim=simulator.action_dim,
            proprio_dim=simulator.proprio_dim if config.state else 0,
        )
        scales = config.state and config.normalize_observations
        smallest = SMALLEST_DEVIATION if self.learns_from_replay else 0.0
        self.normalizer = RunningNormalizer(simulator.proprio_dim, smallest) if scales else None
        self.features = Features(config, simulator, len(self.order))
        self.feature_dim = self.features.size
        self.critic_features = None if config.shared else Features(config, simulator, len(self.order))
        self.build_actor(config, config.hidden_sizes)

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """Return `images [B, V, 3 * F, h, w]` in [-1, 1], and `proprio [B, S]` if the state is read.

        Raises:
            PolicyError: images or states are missing, or have another shape than the model takes.
        """
        device = next(self.actor.parameters()).device
        images = check_images(observation.images, self.there).unflatten(1, (self.frames, -1))[:, :, self.order]
        # Frames become channels, because motion is what differs at the same place.
        scaled = images.to(device).float().div_(127.5).sub_(1.0)
        pixels = scaled.permute(0, 2, 1, 5, 3, 4).flatten(2, 3)
        if not self.config.state:
            return {"images": pixels}
        return {"images": pixels, "proprio": read_state(observation.proprio, self.spec.proprio_dim, device)}

    def update_statistics(self, inputs: Inputs) -> None:
        """Update the running normalisation of states."""
        if self.normalizer is not None:
            self.normalizer.update(inputs["proprio"])

    def critic_parameters(self) -> list[nn.Parameter]:
        """See `Policy.critic_parameters`; also those of encoders that the policy does not read."""
        parts = [part for part in (self.critic, self.critic_features) if part is not None]
        return [parameter for part in parts for parameter in part.parameters()]

    def encode(self, inputs: Inputs) -> Tensor:
        """See `SoftPolicy`."""
        return self._features(inputs).float()

    def encoder_parameters(self) -> list[nn.Parameter]:
        """See `SoftPolicy`: all that `encode` reads images and states with."""
        return list(self.features.parameters())

    def _look(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        features = self._features(inputs)
        if self.critic is None:
            return self.actor(features).float(), None
        if self.critic_features is not None:
            judged = self.critic_features(inputs["images"], self._state(inputs))
        else:
            judged = features if self.config.critic_gradient else features.detach()
        return self.actor(features).float(), self.critic(judged).squeeze(-1).float()

    def _features(self, inputs: Inputs) -> Tensor:
        features: Tensor = self.features(inputs["images"], self._state(inputs))
        return features

    def _state(self, inputs: Inputs) -> Tensor | None:
        state = inputs.get("proprio")
        return state if state is None or self.normalizer is None else self.normalizer(state)


class FlowCNNPolicy(FlowActorCritic, CNNPolicy):
    """A small flow policy on images and states."""


def cnn_policy(config: CNNConfig, simulator: SimulatorSpec, chunk_size: int) -> CNNPolicy:
    """Build the CNN policy that a config names."""
    return (FlowCNNPolicy if config.is_flow else CNNPolicy)(config, simulator, chunk_size)
