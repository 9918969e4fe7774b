"""Ways to get SmolVLA slightly wrong, each of which a comparison of numbers must notice. They take the network."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from embodyrl.models.smolvla import network as networks
from embodyrl.models.smolvla.network import CrossLayer, RMSNorm, SelfLayer


def rms_epsilon(network: Any) -> None:
    for module in network.modules():
        if isinstance(module, RMSNorm):
            module.epsilon = 1e-6


def vision_epsilon(network: Any) -> None:
    for module in network.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-5


def one_weight(network: Any) -> None:
    network.expert.layers[0].mlp.down_proj.weight.data[0, 0] += 1e-3


def weight_of_the_language_model(network: Any) -> None:
    network.text.layers[0].self_attn.v_proj.weight.data[0, 0] += 1e-3


def norms_as_in_gemma(network: Any) -> None:
    for module in network.text.modules():
        if isinstance(module, RMSNorm):
            module.weight.data += 1.0


def exact_gelu(network: Any) -> None:
    for layer in network.vision.encoder.layers:
        layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.fc2(functional.gelu(mlp.fc1(x)))


def images_not_scaled(network: Any) -> None:
    network.connector.weight.data /= math.sqrt(network.architecture.language.width)


def words_not_scaled(network: Any) -> None:
    network.text.embed_tokens.weight.data /= math.sqrt(network.architecture.language.width)


def state_scaled(network: Any) -> None:
    for parameter in network.state_proj.parameters():
        parameter.data *= math.sqrt(network.architecture.language.width)


def shuffle_transposed(network: Any) -> None:
    """Channels before rows and columns."""
    side, width = network.architecture.vision.shuffle, network.architecture.vision.width
    weight = network.connector.weight.data.unflatten(1, (side, side, width))
    network.connector.weight.data = weight.transpose(1, 2).flatten(1)


def time_in_float32(network: Any) -> None:
    def rough(time: torch.Tensor, width: int, shortest: float, longest: float) -> torch.Tensor:
        periods = shortest * (longest / shortest) ** torch.linspace(0, 1, width // 2)
        angles = (2 * math.pi / periods) * time[:, None]
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    _with_embedding(network, rough)


def cosines_before_sines(network: Any) -> None:
    exact = networks.time_embedding

    def swapped(*arguments: Any) -> torch.Tensor:
        return torch.cat(exact(*arguments).chunk(2, dim=1)[::-1], dim=1)

    _with_embedding(network, swapped)


def _with_embedding(network: Any, other: Callable[..., torch.Tensor]) -> None:
    forward, exact = network.embed_suffix, networks.time_embedding

    def embed_suffix(*arguments: Any) -> Any:
        networks.time_embedding = other
        try:
            return forward(*arguments)
        finally:
            networks.time_embedding = exact

    network.embed_suffix = embed_suffix


def other_base(network: Any) -> None:
    """The language model's own, 100,000, in place of 10,000."""

    class Slower(networks.Rotation):
        def __init__(self, positions: torch.Tensor, head_dim: int) -> None:
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            angles = (positions.float().unsqueeze(-1) / 100_000.0**exponents).unsqueeze(1)
            self.cos, self.sin = angles.cos(), angles.sin()

    _in_every_call(network, lambda: setattr(networks, "Rotation", Slower))


def _in_every_call(network: Any, change: Callable[[], None]) -> None:
    for name in ("read", "add_state", "expert"):
        part = getattr(network, name)
        place, method = (part, "forward") if isinstance(part, torch.nn.Module) else (network, name)
        before = getattr(place, method)

        def changed(*arguments: Any, before: Any = before) -> Any:
            exact = networks.Rotation
            change()
            try:
                return before(*arguments)
            finally:
                networks.Rotation = exact  # type: ignore[misc]

        setattr(place, method, changed)


def state_seen_by_the_prefix(network: Any) -> None:
    read = network.read

    def together(memory: Any, mask: torch.Tensor, state: torch.Tensor) -> Any:
        whole = functional.pad(mask, (0, 1), value=True)
        both = torch.cat([memory, network.state_proj(state).unsqueeze(1)], dim=1)
        return networks.Prefix(network.expert.look(read(both, whole), whole), whole)

    network.read, network.add_state = (lambda embedded, mask: embedded), together


def actions_see_later_ones(network: Any) -> None:
    for layer in network.expert.layers:
        if isinstance(layer, SelfLayer):
            layer.forward = lambda x, mask, *rest, before=layer.forward: before(x, mask[:, :, -1:], *rest)


def cross_queries_behind_the_prefix(network: Any) -> None:
    forward = network.expert.forward

    def shifted(x: torch.Tensor, prefix: Any) -> torch.Tensor:
        behind = prefix.mask.sum(1, keepdim=True) + torch.arange(x.shape[1])
        rotation = networks.Rotation(behind, network.architecture.expert.head_dim)
        for layer in network.expert.layers:
            if isinstance(layer, CrossLayer):
                layer.forward = lambda x, mask, _, memory, own=layer: CrossLayer.forward(own, x, mask, rotation, memory)
        out: torch.Tensor = forward(x, prefix)
        return out

    network.expert.forward = shifted


def cross_keys_rotated_again(network: Any) -> None:
    look = network.expert.look

    def turned(memory: Any, mask: torch.Tensor) -> Any:
        rotation = networks.Rotation(mask.long().cumsum(1) - 1, network.architecture.expert.head_dim)
        return [
            (rotation(keys), values) if isinstance(layer, CrossLayer) else (keys, values)
            for layer, (keys, values) in zip(network.expert.layers, look(memory, mask), strict=True)
        ]

    network.expert.look = turned


def padding_counted(network: Any) -> None:
    """Positions of actions go on from the number of all tokens, padding included."""
    forward = network.expert.forward

    def shifted(x: torch.Tensor, prefix: Any) -> torch.Tensor:
        exact = networks.Rotation

        def further(positions: torch.Tensor, head_dim: int) -> Any:
            behind = positions[:, :1] > 0
            return exact(positions + behind * (~prefix.mask).sum(1, keepdim=True), head_dim)

        networks.Rotation = further  # type: ignore[misc, assignment]
        try:
            out: torch.Tensor = forward(x, prefix)
            return out
        finally:
            networks.Rotation = exact  # type: ignore[misc]

    network.expert.forward = shifted


MUTATIONS = {
    apply.__name__.replace("_", "-"): apply
    for apply in (
        rms_epsilon,
        vision_epsilon,
        one_weight,
        weight_of_the_language_model,
        norms_as_in_gemma,
        exact_gelu,
        images_not_scaled,
        words_not_scaled,
        state_scaled,
        shuffle_transposed,
        time_in_float32,
        cosines_before_sines,
        other_base,
        state_seen_by_the_prefix,
        actions_see_later_ones,
        cross_queries_behind_the_prefix,
        cross_keys_rotated_again,
        padding_counted,
    )
}
