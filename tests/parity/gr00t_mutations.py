"""Ways to get GR00T slightly wrong, each of which a comparison of numbers must notice. They take the network."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import embodyrl.models.gr00t.head as layers


def _nudge(path: str) -> Callable[[Any], None]:
    def mutate(network: Any) -> None:
        tensor = network.get_parameter(path).data
        tensor.view(-1)[0 if tensor.dim() < 3 else slice(None)] += 1e-3

    return mutate


def _epsilon(path: str, value: float) -> Callable[[Any], None]:
    def mutate(network: Any) -> None:
        module = network.get_submodule(path)
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, value)

    return mutate


def text_epsilon(network: Any) -> None:
    for module in network.backbone.eagle_model.language_model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5


def no_final_norm(network: Any) -> None:
    network.backbone.eagle_model.language_model.norm = torch.nn.Identity()


def no_positions(network: Any) -> None:
    network.action_head.position_embedding.weight.data.zero_()


def swapped_scale_and_shift(network: Any) -> None:
    for module in network.modules():
        if isinstance(module, layers.AdaptiveLayerNorm):
            for parameter in module.linear.parameters():
                parameter.data = parameter.data.roll(len(parameter) // 2, dims=0)


def swapped_waves(network: Any) -> None:
    weight = network.action_head.model.timestep_encoder.timestep_embedder.linear_1.weight
    weight.data = weight.data.roll(weight.shape[1] // 2, dims=1)


def exact_gelu(network: Any) -> None:
    for module in network.action_head.modules():
        if isinstance(module, layers._GELUProjection):
            module.forward = lambda tokens, module=module: functional.gelu(module.proj(tokens))


def other_frequencies(network: Any) -> None:
    """Those of the other sinusoid, which divides by their number."""
    embedder = network.action_head.model.timestep_encoder.timestep_embedder

    def forward(bucket: torch.Tensor) -> torch.Tensor:
        exponents = -math.log(layers.MAX_PERIOD) * torch.arange(embedder.FREQUENCIES) / embedder.FREQUENCIES
        angles = bucket.float().unsqueeze(-1) * exponents.exp()
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return embedder.linear_2(functional.silu(embedder.linear_1(waves)))

    embedder.forward = forward


DIT, SELF = "action_head.model.transformer_blocks.0.", "action_head.vl_self_attention.transformer_blocks.0."
EAGLE = "backbone.eagle_model."
MUTATIONS: dict[str, Callable[[Any], None]] = {
    "one weight of the DiT": _nudge(DIT + "attn1.to_k.weight"),
    "one weight of the self-attention": _nudge(SELF + "ff.net.0.proj.weight"),
    "the action encoder": _nudge("action_head.action_encoder.W2.W"),
    "one weight behind the vision tower": _nudge(EAGLE + "mlp1.0.weight"),
    "one weight of a query norm": _nudge(EAGLE + "language_model.layers.0.self_attn.q_norm.weight"),
    "one weight of the vision tower": _nudge(EAGLE + "vision_model.encoder.layers.0.mlp.fc1.weight"),
    "sine before cosine": swapped_waves,
    "frequencies of the other sinusoid": other_frequencies,
    "exact GELU": exact_gelu,
    "scale and shift swapped": swapped_scale_and_shift,
    "no final norm of the language model": no_final_norm,
    "no positions of actions": no_positions,
    "epsilon of the norm before the self-attention": _epsilon("action_head.vlln", 1e-6),
    "epsilon of the language model": text_epsilon,
}
