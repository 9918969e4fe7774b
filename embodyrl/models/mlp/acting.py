"""Acting for a few observations in numpy: its calls take a third of the time of torch's, which is nearly all that a
small network needs for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embodyrl.envs.conventions import from_unit_range
from embodyrl.models.mlp.heads import GaussianHead
from embodyrl.models.mlp.network import Network, Tanh
from embodyrl.models.normalizer import RunningNormalizer
from embodyrl.models.policy import ActOutput, Mode
from embodyrl.models.sampling import LOG_SQRT_2PI

Array = NDArray[np.float32]
MOST_PRODUCTS = 2**18
"""Multiplications in a layer up to which numpy computes a product on one thread, however many the machine has."""


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
    """Return what `ActorCritic.act` does, but for rounding."""
    features = _scaled(proprio.numpy(), normalizer)
    means, values = _compute(actor, features), _compute(critic, features)
    log_std = _array(head.log_std)
    sample, deviation = means, np.zeros_like(means)
    if mode == "train":
        # torch's random numbers: the stream of the run is one of torch.
        noise = torch.randn(means.shape, generator=generator).numpy()
        deviation = np.exp(log_std)
        sample = means + deviation * noise
        # As the log-probs of a stored sample are computed (`Gaussian.logprobs`).
        deviation = (sample - means) / deviation
    logprobs = -np.float32(LOG_SQRT_2PI) - log_std - np.float32(0.5) * deviation * deviation
    chunks = sample.reshape(len(sample), head.chunk_size, -1)
    return ActOutput(
        actions=torch.from_numpy(from_unit_range(chunks, _array(head.centre), _array(head.half_width))),
        logprobs=torch.from_numpy(logprobs),
        values=torch.from_numpy(values[:, 0]),
        trace={"sample": torch.from_numpy(sample)},
    )


def _scaled(proprio: Array, normalizer: RunningNormalizer | None) -> Array:
    if normalizer is None:
        return proprio
    scaled = (proprio - _array(normalizer.shift)) * _array(normalizer.scale)
    limit = np.float32(normalizer.limit)
    np.maximum(scaled, -limit, out=scaled)
    np.minimum(scaled, limit, out=scaled)
    return scaled


def _compute(network: Network, features: Array) -> Array:
    """Return a network's outputs `[B, outputs]`."""
    for part in network._modules.values():
        if isinstance(part, nn.Linear):
            features = features @ _array(part._parameters["weight"]).T
            features += _array(part._parameters["bias"])
        elif (activation := ACTIVATIONS.get(type(part))) is not None:
            activation(features)
        else:  # somebody has put it there since
            features = part(torch.from_numpy(features)).numpy()
    return features


def _array(tensor: Tensor | None) -> Array:
    """Return the numbers of a tensor, which shares its memory."""
    assert tensor is not None, "these layers have weights and biases"
    return tensor.detach().numpy()
