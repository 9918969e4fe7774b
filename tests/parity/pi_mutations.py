"""Ways to get pi0 or pi0.5 slightly wrong, each of which a comparison of numbers must notice."""

from __future__ import annotations

import math
from typing import Any

import torch

from embodyrl.models.pi import network as networks
from tests.parity.mutations import Mutation


def one_weight(policy: Any) -> None:
    policy.network.language.layers[0].self_attn.k_proj.weight.data[0, 0] += 1e-3


def expert_weight(policy: Any) -> None:
    policy.network.expert.layers[-1].mlp.down_proj.weight.data[0] += 1e-3


def normalized(x: torch.Tensor) -> torch.Tensor:
    """With another epsilon."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def other_epsilon(transformer: Any) -> None:
    for module in transformer.modules():
        if isinstance(module, networks.RMSNorm):
            module.forward = lambda x, _, norm=module: (normalized(x) * (1 + norm.weight), 1.0)
        elif isinstance(module, networks.AdaptiveRMSNorm):
            module.forward = lambda x, condition, norm=module: adapted(x, *norm.dense(condition)[:, None].chunk(3, -1))


def adapted(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, gate: torch.Tensor) -> Any:
    return normalized(x) * (1 + scale) + shift, gate


def rms_epsilon(policy: Any) -> None:
    other_epsilon(policy.network.expert)


def language_rms_epsilon(policy: Any) -> None:
    other_epsilon(policy.network.language)


def vision_epsilon(policy: Any) -> None:
    for module in policy.network.vision.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-5


def words_not_scaled(policy: Any) -> None:
    policy.network.embed_tokens.weight.data /= math.sqrt(policy.architecture.language.width)


def images_scaled(policy: Any) -> None:
    for parameter in policy.network.projector.parameters():
        parameter.data /= math.sqrt(policy.architecture.language.width)


def time_in_float32(policy: Any) -> None:
    forward = policy.network.embed_suffix

    def embed_suffix(x: torch.Tensor, time: torch.Tensor, state: torch.Tensor) -> Any:
        exact = networks.time_embedding
        networks.time_embedding = rough_time_embedding
        try:
            return forward(x, time, state)
        finally:
            networks.time_embedding = exact

    policy.network.embed_suffix = embed_suffix


def rough_time_embedding(time: torch.Tensor, width: int) -> torch.Tensor:
    periods = 0.004 * (4.0 / 0.004) ** torch.linspace(0, 1, width // 2)
    angles = (2 * math.pi / periods) * time[:, None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def state_sees_actions(policy: Any) -> None:
    forward = policy.network.expert.forward
    policy.network.expert.forward = lambda x, mask, *rest: forward(x, mask[:, :, -1:], *rest)


def padding_counted(policy: Any) -> None:
    forward = policy.network.expert.forward
    policy.network.expert.forward = lambda x, mask, positions, *rest: forward(x, mask, positions + 1, *rest)


def scale_and_shift_swapped(policy: Any) -> None:
    for module in policy.network.expert.modules():
        if isinstance(module, networks.AdaptiveRMSNorm):
            for parameter in module.dense.parameters():
                scale, shift, gate = parameter.data.chunk(3)
                parameter.data = torch.cat([shift, scale, gate])


EPSILONS = (rms_epsilon, language_rms_epsilon, vision_epsilon)
BOTH = (one_weight, expert_weight, *EPSILONS, words_not_scaled, time_in_float32, padding_counted)
PI0 = (*BOTH, images_scaled, state_sees_actions)
PI05 = (*BOTH, scale_and_shift_swapped)
MUTATIONS = {
    f"{model}-{apply.__name__.replace('_', '-')}": Mutation(model, apply)
    for model, changes in {"pi0": PI0, "pi05": PI05}.items()
    for apply in changes
}
