"""Ways to get pi0-FAST slightly wrong, each of which a comparison of numbers must notice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodyrl.models.pi import network as pi
from tests.parity.pi_mutations import images_scaled, one_weight, other_epsilon, vision_epsilon


def vision_weight(policy: Any) -> None:
    policy.network.vision.encoder.layers[0].self_attn.q_proj.weight.data[0, 0] += 1e-3


def rms_epsilon(policy: Any) -> None:
    other_epsilon(policy.network.language)


def exact_gelu(policy: Any) -> None:
    for layer in policy.network.language.layers:
        layer.mlp.activation = functional.gelu


def norm_weight_around_1(policy: Any) -> None:
    for module in policy.network.language.modules():
        if isinstance(module, pi.RMSNorm):
            module.weight.data -= 1.0


def words_not_scaled(policy: Any) -> None:
    policy.network.embed_tokens.weight.data /= math.sqrt(policy.architecture.language.width)


def _with_mask(policy: Any, change: Callable[[Tensor, int], Tensor]) -> None:
    """Change what tokens attend to, given the mask `[B, 1, N+M, N+M]` and `N`."""
    network, language = policy.network, policy.network.language
    answers: list[int] = []

    def read(images: Tensor, there: Tensor, tokens: Tensor, mask: Tensor, answer: Tensor, cache: Any = None) -> Any:
        answers.append(answer.shape[1])
        return type(network).read(network, images, there, tokens, mask, answer, cache)

    def forward(x: Tensor, mask: Tensor, positions: Tensor, memory: Any = None) -> Any:
        return type(language).forward(language, x, change(mask, mask.shape[-1] - answers[-1]), positions, memory)

    network.read, language.forward = read, forward


def actions_bidirectional(policy: Any) -> None:
    def change(mask: Tensor, prefix: int) -> Tensor:
        changed = mask.clone()
        changed[:, :, prefix:, prefix:] = True
        return changed

    _with_mask(policy, change)


def prompt_sees_actions(policy: Any) -> None:
    def change(mask: Tensor, prefix: int) -> Tensor:
        changed = mask.clone()
        changed[:, :, :prefix, prefix:] = True
        return changed

    _with_mask(policy, change)


def everything_causal(policy: Any) -> None:
    def change(mask: Tensor, prefix: int) -> Tensor:
        length = mask.shape[-1]
        return mask & torch.ones(length, length, dtype=torch.bool).tril() | torch.eye(length, dtype=torch.bool)

    _with_mask(policy, change)


def bos_seen_by_the_prompt(policy: Any) -> None:
    def change(mask: Tensor, prefix: int) -> Tensor:
        changed = mask.clone()
        changed[:, :, :prefix, prefix] = True
        return changed

    _with_mask(policy, change)


def positions_count_padding(policy: Any) -> None:
    language = policy.network.language

    def forward(x: Tensor, mask: Tensor, positions: Tensor, memory: Any = None) -> Any:
        counted = torch.arange(x.shape[1]).expand_as(positions)
        return type(language).forward(language, x, mask, counted, memory)

    language.forward = forward


class OtherBase(pi.Rotation):
    """Rotary positions with base 100,000."""

    def __init__(self, positions: Tensor, head_dim: int, dtype: torch.dtype) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = positions.float().unsqueeze(-1) * (1.0 / 100_000.0**exponents)
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)


def rope_base(policy: Any) -> None:
    language = policy.network.language

    def forward(*arguments: Any) -> Any:
        original, pi.Rotation = pi.Rotation, OtherBase  # type: ignore[misc]
        try:
            return type(language).forward(language, *arguments)
        finally:
            pi.Rotation = original  # type: ignore[misc]

    language.forward = forward


MUTATIONS: dict[str, Callable[[Any], None]] = {
    change.__name__.replace("_", "-"): change
    for change in (
        one_weight,
        vision_weight,
        rms_epsilon,
        vision_epsilon,
        exact_gelu,
        norm_weight_around_1,
        images_scaled,
        words_not_scaled,
        rope_base,
        actions_bidirectional,
        prompt_sees_actions,
        everything_causal,
        positions_count_padding,
        bos_seen_by_the_prompt,
    )
}
