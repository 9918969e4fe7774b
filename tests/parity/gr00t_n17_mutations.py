"""Ways to get GR00T N1.7 slightly wrong, each of which a comparison of numbers must notice.

They take the policy and its inputs, and return the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import embodyrl.models.gr00t.head as layers

Inputs = dict[str, Tensor]
Mutation = Callable[[Any, Inputs], Inputs]
BLOCK = "action_head.model.transformer_blocks.0."
VISION, TEXT = "backbone.visual.", "backbone.language_model."


def _nudge(path: str, amount: float = 1e-3) -> Mutation:
    def mutate(policy: Any, inputs: Inputs) -> Inputs:
        policy.network.get_parameter(path).data.view(-1)[0] += amount
        return inputs

    return mutate


def _of_network(change: Callable[[Any], None]) -> Mutation:
    def mutate(policy: Any, inputs: Inputs) -> Inputs:
        change(policy.network)
        return inputs

    return mutate


def exact_gelu(network: Any) -> None:
    for module in network.modules():
        if isinstance(module, layers._GELUProjection):
            module.forward = lambda tokens, module=module: functional.gelu(module.proj(tokens))


def text_epsilon(network: Any) -> None:
    for module in network.backbone.language_model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5


def final_norm(network: Any) -> None:
    network.backbone.language_model.applies_norm = True


def one_layer_fewer(network: Any) -> None:
    del network.backbone.language_model.layers[-1]


def no_deepstack(network: Any) -> None:
    visual = network.backbone.visual
    whole = visual.forward
    visual.forward = lambda images: (whole(images)[0], [])


def images_before_text(network: Any) -> None:
    whole = network.attend

    def attend(features: Tensor, inputs: Any, embodiment: Any) -> Any:
        given = whole(features, inputs, embodiment)
        return type(given)(
            given.context, given.state, given.embodiment, text=given.images, images=given.text, valid=given.valid
        )

    network.attend = attend


def padding_seen(network: Any) -> None:
    whole = network.attend

    def attend(features: Tensor, inputs: Any, embodiment: Any) -> Any:
        given = whole(features, inputs, embodiment)
        return type(given)(
            given.context,
            given.state,
            given.embodiment,
            text=~given.images,
            images=given.images,
            valid=given.valid,
        )

    network.attend = attend


def masked_self_attention(policy: Any, inputs: Inputs) -> Inputs:
    mask = inputs["attention_mask"][:, None, None]
    for block in policy.network.action_head.vl_self_attention.transformer_blocks:
        whole = block.attn1.forward
        block.attn1.forward = lambda tokens, whole=whole: whole(tokens, None, None, mask)
    return inputs


def places_in_chunks(policy: Any, inputs: Inputs) -> Inputs:
    """Frequencies of time, row and column one behind the other."""
    vlm = policy.network.backbone.vlm
    axes = torch.repeat_interleave(torch.arange(3), torch.tensor(vlm.sections))
    language = policy.network.backbone.language_model
    forward = language.forward

    def with_other(tokens: Tensor, mask: Tensor, rotation: Any, added: Any = ()) -> Tensor:
        half = len(axes)
        steps = torch.arange(0, 2 * half, 2, dtype=torch.float32)
        own = inputs["places"].index_select(1, axes).transpose(1, 2).float()
        angles = own / vlm.text["rope_theta"] ** (steps / (2 * half))
        angles = torch.cat([angles, angles], dim=-1)
        return forward(tokens, mask, (angles.cos(), angles.sin()), added)

    language.forward = with_other
    return inputs


def advanced_by_tokens(policy: Any, inputs: Inputs) -> Inputs:
    """Text behind an image continues after its number of tokens."""
    prompts = next(iter(policy._prompts.values()))
    height, width = prompts.grid
    image = inputs["input_ids"] == policy.network.sizes.vlm.image_token
    passed = image.cumsum(1) // (height * width)
    extra = passed * (height * width - max(height, width))
    return inputs | {"places": inputs["places"] + extra.unsqueeze(1)}


def uniform_padding(policy: Any, inputs: Inputs) -> Inputs:
    """Padding attends to everything, as eager attention makes it."""
    for layer in policy.network.backbone.language_model.layers:
        whole = layer.forward
        valid = inputs["attention_mask"]
        mask = torch.ones(valid.shape[1], valid.shape[1], dtype=torch.bool).tril() & valid[:, None, None]
        mask = mask | ~mask.any(-1, keepdim=True)
        layer.forward = lambda tokens, attention_mask, position_embeddings, whole=whole, mask=mask: whole(
            tokens, attention_mask=mask, position_embeddings=position_embeddings
        )
    return inputs


def swapped_scale_and_shift(network: Any) -> None:
    for module in network.modules():
        if isinstance(module, layers.AdaptiveLayerNorm):
            for parameter in module.linear.parameters():
                parameter.data = parameter.data.roll(len(parameter) // 2, dims=0)


def swapped_waves(network: Any) -> None:
    weight = network.action_head.model.timestep_encoder.timestep_embedder.linear_1.weight
    weight.data = weight.data.roll(weight.shape[1] // 2, dims=1)


def next_bucket(policy: Any, inputs: Inputs) -> Inputs:
    whole = policy.network.action_head.hidden
    policy.network.action_head.hidden = lambda actions, bucket, given: whole(actions, bucket + 1, given)
    return inputs


MUTATIONS: dict[str, Mutation] = {
    "one weight of the DiT": _nudge(BLOCK + "attn1.to_k.weight"),
    "one weight of the vision transformer": _nudge(VISION + "patch_embed.proj.weight"),
    "exact GELU": _of_network(exact_gelu),
    "epsilon of the language model": _of_network(text_epsilon),
    "frequencies of places in chunks": places_in_chunks,
    "places advanced by the tokens of images": advanced_by_tokens,
    "no deepstack": _of_network(no_deepstack),
    "final norm applied": _of_network(final_norm),
    "one layer fewer": _of_network(one_layer_fewer),
    "images before text": _of_network(images_before_text),
    "padding seen by the DiT": _of_network(padding_seen),
    "self-attention masked": masked_self_attention,
    "padding attends to everything": uniform_padding,
    "sine before cosine": _of_network(swapped_waves),
    "scale and shift swapped": _of_network(swapped_scale_and_shift),
    "bucket rounded up": next_bucket,
}


def _plain(tokens: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(tokens, tokens.shape[-1:], eps=eps)


def _adaptive(network: Any, tokens: Tensor) -> Tensor:
    """The norm of a DiT block before its feed-forward layer, which has no weights: its block's, seen from outside."""
    block = network.action_head.model.transformer_blocks[0]
    seen: list[Tensor] = []
    hook = block.ff.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    whole = block.attn1.forward
    block.attn1.forward = lambda inner, context, known=None, mask=None: (torch.zeros_like(inner), (inner, inner))
    block(tokens.unsqueeze(0), torch.zeros(1, tokens.shape[-1]), None)
    block.attn1.forward = whole
    hook.remove()
    return seen[0][0]


def _last(network: Any, tokens: Tensor) -> Tensor:
    """The norm before the DiT's last layer, with no scale and no shift."""
    model = network.action_head.model
    seen: list[Tensor] = []
    hook = model.proj_out_2.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    blocks, projection = model.transformer_blocks, model.proj_out_1
    model.transformer_blocks, model.proj_out_1 = nn.ModuleList(), nn.Linear(tokens.shape[-1], 2 * tokens.shape[-1])
    for parameter in model.proj_out_1.parameters():
        parameter.data.zero_()
    given = layers.Condition(tokens.new_zeros(1, 1, 1), tokens.new_zeros(1, 1, 1), 0)
    model(tokens.unsqueeze(0), given, torch.zeros(1, dtype=torch.int64))
    model.transformer_blocks, model.proj_out_1 = blocks, projection
    hook.remove()
    return seen[0][0]


EPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "vlln": lambda network, tokens: network.action_head.vlln(tokens),
    "rms": lambda network, tokens: network.backbone.language_model.layers[0].input_layernorm(tokens),
    "vision": lambda network, tokens: network.backbone.visual.blocks[0].norm1(tokens),
    "vl_self_attention": lambda network, tokens: network.action_head.vl_self_attention.transformer_blocks[0].norm3(
        tokens
    ),
    "dit_block": _adaptive,
    "dit_out": _last,
    "deepstack": lambda network, tokens: network.backbone.visual.deepstack_merger_list[0].norm(tokens),
}
"""Norms alone, by name of their case."""
