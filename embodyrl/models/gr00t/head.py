"""The action head: a diffusion transformer that says where noisy actions should move, given pictures, sentence and
state.

Parameter names are those of the public checkpoints. Shapes: `B` samples, `L` tokens of pictures and sentence, `H`
actions that are denoised together (horizon), `D` numbers in an action (padded), `E` entries of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.gr00t.architecture import Architecture, Transformer
from embodyrl.models.gr00t.layers import (
    ActionEncoder,
    DiTBlock,
    Embodiment,
    EmbodimentMLP,
    KeysValues,
    SelfAttentionBlock,
    TimestepEmbedder,
)


@dataclass(frozen=True)
class Condition:
    """What actions are denoised given; computed once per observation."""

    context: Tensor
    """Pictures and sentence `[B, L, E]`."""
    state: Tensor
    """The robot's state `[B, 1, E]`."""
    embodiment: Embodiment
    """Which robot it is."""
    memory: dict[int, KeysValues] = field(default_factory=dict)
    """Keys and values of the context by the number of the block that looks at it, once a denoising step has computed
    them."""


class SelfAttentionTransformer(nn.Module):
    """Pictures and sentence once more, trained together with the actions. Padding is not masked."""

    def __init__(self, size: Transformer) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(SelfAttentionBlock(size.width, size.heads) for _ in range(size.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """`[B, L, E]` of `[B, L, E]`."""
        for block in self.transformer_blocks:
            tokens = block(tokens)
        return tokens


class TimestepEncoder(nn.Module):
    """Holds the embedder under the name that checkpoints have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(width)

    def forward(self, bucket: Tensor) -> Tensor:
        """`[B, E]` of times `[B]`."""
        embedded: Tensor = self.timestep_embedder(bucket)
        return embedded


class DiT(nn.Module):
    """The diffusion transformer: blocks look at pictures and sentence and at their own tokens by turns."""

    def __init__(self, size: Transformer, context: int, outputs: int) -> None:
        super().__init__()
        self.timestep_encoder = TimestepEncoder(size.width)
        self.transformer_blocks = nn.ModuleList(
            DiTBlock(size.width, size.heads, None if index % 2 else context) for index in range(size.layers)
        )
        self.proj_out_1 = nn.Linear(size.width, 2 * size.width)
        self.proj_out_2 = nn.Linear(size.width, outputs)

    def forward(self, tokens: Tensor, context: Tensor, bucket: Tensor, memory: dict[int, KeysValues]) -> Tensor:
        """`[B, L, outputs]` of `[B, L, E]` at times `bucket [B]`; leaves keys and values of the context in `memory`,
        and uses those that are there."""
        time = self.timestep_encoder(bucket)
        for index, block in enumerate(self.transformer_blocks):
            looks_away = index % 2 == 0
            tokens, keys_values = block(tokens, time, context if looks_away else None, memory.get(index))
            if looks_away:
                memory[index] = keys_values
        # The other way round than in the blocks: the shift comes first.
        shift, scale = self.proj_out_1(functional.silu(time)).unsqueeze(1).chunk(2, dim=-1)
        normed = functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-6) * (1 + scale) + shift
        result: Tensor = self.proj_out_2(normed)
        return result


class ActionHead(nn.Module):
    """From the tokens of the vision-language model to the velocity of noisy actions."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        width, robots = sizes.dit.width, sizes.embodiments
        self.vlln = nn.LayerNorm(sizes.width, eps=1e-5)
        self.vl_self_attention = SelfAttentionTransformer(sizes.vl_self_attention)
        self.state_encoder = EmbodimentMLP(robots, sizes.max_state_dim, sizes.hidden, width)
        self.action_encoder = ActionEncoder(robots, sizes.max_action_dim, width)
        self.position_embedding = nn.Embedding(sizes.max_positions, width)
        self.future_tokens = nn.Embedding(sizes.future_tokens, width)
        self.model = DiT(sizes.dit, sizes.width, sizes.dit_outputs)
        self.action_decoder = EmbodimentMLP(robots, sizes.dit_outputs, sizes.hidden, sizes.max_action_dim)
        for table in (self.position_embedding, self.future_tokens):
            nn.init.normal_(table.weight, std=0.02)

    def condition(self, features: Tensor, state: Tensor, embodiment: Embodiment) -> Condition:
        """What actions are denoised given: tokens `[B, L, E]` of pictures and sentence, and the state `[B, 1, S]`."""
        context = self.vl_self_attention(self.vlln(features))
        return Condition(context, self.state_encoder(state, embodiment), embodiment)

    def hidden(self, actions: Tensor, bucket: Tensor, given: Condition) -> Tensor:
        """The transformer's output `[B, H, outputs]` in the places of actions `[B, H, D]`, at times `bucket [B]`."""
        horizon = actions.shape[1]
        encoded = self.action_encoder(actions, bucket, given.embodiment)
        encoded = encoded + self.position_embedding.weight[:horizon]
        future = self.future_tokens.weight.expand(len(actions), -1, -1)
        tokens = torch.cat([given.state, future, encoded], dim=1)
        result: Tensor = self.model(tokens, given.context, bucket, given.memory)[:, -horizon:]
        return result

    def velocity(self, hidden: Tensor, given: Condition) -> Tensor:
        """Where the actions should move, `[B, H, D]` per unit of time, from noise (0) to data (1)."""
        result: Tensor = self.action_decoder(hidden, given.embodiment)
        return result
