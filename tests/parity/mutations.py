"""Ways to get OpenVLA or OpenVLA-OFT slightly wrong, each of which a comparison of numbers must notice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Mutation:
    """What is done to a policy of a model."""

    model: str
    apply: Callable[[Any], None]


def rms_epsilon(policy: Any) -> None:
    for module in policy.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5


def one_weight(policy: Any) -> None:
    policy.network.language_model.model.layers[0].self_attn.q_proj.weight.data[0, 0] += 1e-3


def last_block(policy: Any) -> None:
    for tower in policy.network.vision_backbone.towers:
        original = tower.forward_intermediates
        last = [len(tower.blocks) - 1]

        def intermediates(images: torch.Tensor, original: Any = original, last: Any = last, **arguments: Any) -> Any:
            return original(images, **(arguments | {"indices": last}))

        tower.forward_intermediates = intermediates


def _with_mask(policy: Any, change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    model = policy.network.language_model.model
    original = model.forward

    @functools.wraps(original)
    def forward(*, attention_mask: torch.Tensor, **arguments: Any) -> Any:
        changed = change(attention_mask, arguments["inputs_embeds"].shape[1])
        return original(attention_mask=changed, **arguments)

    model.forward = forward


def causal(policy: Any) -> None:
    _with_mask(policy, lambda mask, _: mask[:, 0, 0].long())


def bidirectional(policy: Any) -> None:
    _with_mask(policy, lambda mask, length: mask[:, :, -1:].expand(-1, -1, length, -1))


def no_stop_token(policy: Any) -> None:
    policy.config = dataclasses.replace(policy.config, append_stop_token=False)


def placeholders_not_zeroed(policy: Any) -> None:
    original = policy.sequence

    def sequence(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings, mask = original(inputs)
        filled = embeddings.clone()
        token = policy.network.embed_tokens(torch.tensor([1]))
        filled[:, -policy.entries - 1 : -1] = token
        return filled, mask

    policy.sequence = sequence


MUTATIONS = {
    "openvla-rms-epsilon": Mutation("openvla", rms_epsilon),
    "openvla-one-weight": Mutation("openvla", one_weight),
    "openvla-last-block": Mutation("openvla", last_block),
    "openvla-bidirectional": Mutation("openvla", bidirectional),
    "oft-rms-epsilon": Mutation("openvla_oft", rms_epsilon),
    "oft-last-block": Mutation("openvla_oft", last_block),
    "oft-causal": Mutation("openvla_oft", causal),
    "oft-no-stop-token": Mutation("openvla_oft", no_stop_token),
    "oft-placeholders-not-zeroed": Mutation("openvla_oft", placeholders_not_zeroed),
}
