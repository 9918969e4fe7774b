"""Acting for a few observations, largely in numpy: its calls take a third of the time of torch's, which is nearly all
that a small network needs for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.envs.conventions import from_unit_range
from embodyrl.models.mlp.heads import GaussianHead
from embodyrl.models.mlp.network import Network, Tanh
from embodyrl.models.normalizer import RunningNormalizer
from embodyrl.models.policy import ActOutput, Mode

Array = NDArray[np.float32]
MOST_PRODUCTS = 2**21
"""Multiplications in a layer up to which preparing calls is most of the time."""


ACTIVATIONS: dict[type[nn.Module], Callable[[Array], Array]] = {
    Tanh: lambda numbers: np.tanh(numbers, out=numbers),
    nn.ReLU: lambda numbers: np.maximum(numbers, np.float32(0.0), out=numbers),
}
"""What is done to the outputs of hidden layers, in place."""


def most_observations(actor: Network, critic: Network | None, head: object) -> int:
    """Return for how many observations `act` may be used; 0 if the networks or the head are not such."""
    if critic is None or not isinstance(head, GaussianHead):
        return 0
    parts = [*actor, *critic]
    if any(type(part) not in (nn.Linear, *ACTIVATIONS) for part in parts):
        return 0
    return MOST_PRODUCTS // max(part.weight.numel() for part in parts if isinstance(part, nn.Linear))


def suits(proprio: Tensor, most: int) -> bool:
    """Return whether `act` may be used for states `[B, S]`, at most `most_observations`: on the CPU, without gradients
    and in float32."""
    if len(proprio) > most or proprio.device.type != "cpu" or proprio.dtype is not torch.float32:
        return False
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def act(
    proprio: Tensor,
    normalizer: RunningNormalizer | None,
    actor: Network,
    critic: Network,
    head: GaussianHead,
    mode: Mode,
    generator: torch.Generator | None,
) -> ActOutput:
    """Return what `ActorCritic.act` does, bit for bit: learning begins at ratios of exactly 1, so that products,
    exponentials and log-probs, which round otherwise in numpy, are torch's here, too."""
    features = _scaled(proprio, normalizer)
    outputs, values = _compute(actor, features), _compute(critic, features)
    means = sample = outputs.numpy()
    if mode == "train":
        # torch's random numbers: the stream of the run is one of torch.
        noise = torch.randn(means.shape, generator=generator).numpy()
        sample = means + head.log_std.exp().numpy() * noise
    sampled = torch.from_numpy(sample)
    chunks = sample.reshape(len(sample), head.chunk_size, -1)
    return ActOutput(
        actions=torch.from_numpy(from_unit_range(chunks, head.centre.numpy(), head.half_width.numpy())),
        logprobs=head.logprobs(outputs, sampled),
        values=values.squeeze(-1),
        trace={"sample": sampled},
    )


def _scaled(proprio: Tensor, normalizer: RunningNormalizer | None) -> Tensor:
    if normalizer is None:
        return proprio
    scaled = (proprio.numpy() - normalizer.shift.numpy()) * normalizer.scale.numpy()
    limit = np.float32(normalizer.limit)
    np.maximum(scaled, -limit, out=scaled)
    np.minimum(scaled, limit, out=scaled)
    return torch.from_numpy(scaled)


def _compute(network: Network, features: Tensor) -> Tensor:
    """Return a network's outputs `[B, outputs]`."""
    for part in network._modules.values():
        if isinstance(part, nn.Linear):
            own = part._parameters  # attributes of modules are looked up in several places
            features = functional.linear(features, own["weight"], own["bias"])  # type: ignore[arg-type]
        elif (activation := ACTIVATIONS.get(type(part))) is not None:
            activation(features.numpy())
        elif part is not None:  # somebody has put it there since
            features = part(features)
    return features
