"""The networks of pi0 (Black et al., 2024) and pi0.5: a vision-language model reads pictures and sentence once; a
smaller transformer, layer by layer beside it, then turns noise into actions.

Shapes: `B` samples, `V` pictures, `P` tokens of a picture, `L` tokens of the sentence, `N = V*P + L` tokens of the
prefix, `H` actions of the horizon, `A` entries of an action, `E` width of the language model, `W` width of the action
expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.libraries import SiglipVisionConfig, SiglipVisionModel
from embodyrl.models.pi.architecture import Architecture
from embodyrl.models.pi.gemma import Gemma, KeysValues

LONGEST_PERIOD, SHORTEST_PERIOD = 4.0, 0.004


@dataclass(frozen=True)
class Prefix:
    """What the language model made of pictures and sentence."""

    memory: list[KeysValues]
    """Keys and values of every layer."""
    mask: Tensor
    """`[B, N]` bool: what is there."""
    hidden: Tensor
    """`[B, N, E]`; meaningless where nothing is there."""


class Pi(nn.Module):
    """SigLIP, Gemma, and a Gemma of actions, which sees the keys and values of the other."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        language, width = architecture.language.width, architecture.expert.width
        vision = SiglipVisionModel(SiglipVisionConfig(**architecture.vision, vision_use_head=False))
        self.vision = getattr(vision, "vision_model", vision)
        self.projector = nn.Linear(architecture.vision["hidden_size"], language)
        self.embed_tokens = nn.Embedding(architecture.vocabulary, language)
        self.language = Gemma(architecture.language)
        self.expert = Gemma(architecture.expert, adaptive=architecture.adaptive)
        self.action_in_proj = nn.Linear(architecture.action_dim, width)
        self.action_out_proj = nn.Linear(width, architecture.action_dim)
        if architecture.adaptive:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(architecture.state_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)
        if architecture.expert_vocabulary:  # in public files, and used by nothing
            self.expert_lm_head = nn.Linear(width, architecture.expert_vocabulary, bias=False).requires_grad_(False)

    # -------------------------------------------------------------------------------------------- pictures and sentence

    def embed_prefix(self, pictures: Tensor, tokens: Tensor) -> Tensor:
        """Embeddings `[B, N, E]` of `pictures [B, V, 3, h, h]` in [-1, 1] and token ids `[B, L]`.

        Picture tokens are not scaled; Gemma scales those of words.
        """
        features = self.vision(pixel_values=pictures.flatten(0, 1)).last_hidden_state
        seen = self.projector(features).unflatten(0, pictures.shape[:2]).flatten(1, 2)
        words = self.embed_tokens(tokens) * math.sqrt(self.architecture.language.width)
        return torch.cat([seen, words.to(seen.dtype)], dim=1)

    def read(self, pictures: Tensor, picture_mask: Tensor, tokens: Tensor, token_mask: Tensor) -> Prefix:
        """Pictures and sentence, each token of which looks at all that are there.

        Args:
            pictures: `[B, V, 3, h, h]` in [-1, 1].
            picture_mask: `[B, V]` bool: which pictures there are.
            tokens: `[B, L]` ids.
            token_mask: `[B, L]` bool: which of them are no padding.
        """
        embedded = self.embed_prefix(pictures, tokens)
        each = (embedded.shape[1] - tokens.shape[1]) // pictures.shape[1]
        mask = torch.cat([picture_mask.repeat_interleave(each, dim=1), token_mask], dim=1)
        hidden, memory = self.language(embedded, mask[:, None, None, :], mask.long().cumsum(1) - 1)
        return Prefix(memory, mask, hidden)

    # -------------------------------------------------------------------------------------------------------- actions

    def embed_suffix(self, x: Tensor, time: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Embeddings of noisy actions, and what norms depend on.

        pi0: state token and actions `[B, 1+H, W]`, which carry the time. pi0.5: actions `[B, H, W]`; the time, through
        a small network `[B, W]`, conditions the norms instead.

        Args:
            x: noisy actions `[B, H, A]`.
            time: `[B]`, 1 is noise, 0 is data.
            state: `[B, S]`; pi0.5 does not look at it here.
        """
        actions, moment = self.action_in_proj(x), time_embedding(time, self.architecture.expert.width).to(x.dtype)
        if self.architecture.adaptive:
            return actions, functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(moment))))
        timed = torch.cat([actions, moment[:, None, :].expand_as(actions).to(actions.dtype)], dim=-1)
        actions = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(timed)))
        return torch.cat([self.state_proj(state).unsqueeze(1), actions], dim=1), None

    def forward(self, prefix: Prefix, x: Tensor, time: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity `[B, H, A]` from data to noise at `x [B, H, A]`, and the hidden states `[B, H, W]` it is read from;
        other arguments as in `embed_suffix`."""
        embedded, condition = self.embed_suffix(x, time, state)
        length, horizon = embedded.shape[1], x.shape[1]
        own = torch.ones(length, length, dtype=torch.bool, device=x.device)
        own[: length - horizon, length - horizon :] = False  # the state does not look at actions
        seen = prefix.mask[:, None, None, :].expand(-1, 1, length, -1)
        mask = torch.cat([seen, own.expand(len(x), 1, -1, -1)], dim=-1)
        positions = prefix.mask.sum(1, keepdim=True) + torch.arange(length, device=x.device)
        hidden, _ = self.expert(embedded, mask, positions, prefix.memory, condition)
        hidden = hidden[:, -horizon:]
        return self.action_out_proj(hidden), hidden


def time_embedding(time: Tensor, width: int) -> Tensor:
    """Sines and cosines `[B, width]` of times `[B]` with periods between 0.004 and 4.

    In float64 inside: the angle of the shortest period is 1571 * time, of which float32 leaves four digits.
    """
    shares = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    periods = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** shares
    angles = (2.0 * math.pi / periods) * time.double().unsqueeze(1)
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(time.dtype)
