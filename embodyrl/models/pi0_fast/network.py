"""The network of pi0-FAST: PaliGemma with an output layer of its own. It reads images and prompt, which see one
another, and then an answer, which sees them and, causally, itself.

Shapes: `B` samples, `V` images, `L` tokens of the prompt, `N` embeddings of images and prompt, `M` tokens of the
answer, `E` width of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.pi.network import PaliGemma, prefix_mask
from embodyrl.models.pi0_fast.config import Architecture
from embodyrl.models.vla.transformer import KeyValueCache, positions_of


def visible(prefix: Tensor, answer: int) -> Tensor:
    """Return what each token attends to, bool `[B, 1, N+M, N+M]`: images and prompt one another, the answer these and
    itself causally.

    Args:
        prefix: bool `[B, N]`, False for padding and absent images.
        answer: `M`.
    """
    batch, length = prefix.shape
    above = functional.pad(prefix[:, None, :].expand(-1, length, -1), (0, answer))
    own = prefix.new_ones(answer, answer).tril().expand(batch, -1, -1)
    below = torch.cat([prefix[:, None, :].expand(-1, answer, -1), own], dim=2)
    return torch.cat([above, below], dim=1).unsqueeze(1)


@dataclass(frozen=True)
class Read:
    """Outputs of the language model."""

    prefix: Tensor
    """For images and prompt, `[B, N, E]`; meaningless for padding."""
    answer: Tensor
    """For the answer, `[B, M, E]`."""
    there: Tensor
    """Bool `[B, N]`: False for padding and absent images."""
    last: Tensor
    """For the last token of the prompt, `[B, E]`."""


class PiFast(PaliGemma):
    """SigLIP, Gemma and an output layer; LeRobot learns the latter apart from the word embeddings."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture.vision, architecture.language, architecture.vocabulary)
        self.lm_head = nn.Linear(architecture.language.width, architecture.vocabulary, bias=False)

    def read(
        self,
        images: Tensor,
        image_mask: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        answer: Tensor,
        cache: KeyValueCache | None = None,
    ) -> Read:
        """Encode images, prompt and the beginning of an answer.

        Args:
            images: `[B, V, 3, h, h]` in [-1, 1].
            image_mask: `[B, V]` bool: False for absent images.
            tokens: `[B, L]` ids of the prompt.
            token_mask: `[B, L]` bool: False for padding.
            answer: `[B, M]` ids; `M` may be 0.
            cache: keeps keys and values, for `next`.
        """
        embedded = self.embed_prefix(images, tokens)
        length = embedded.shape[1]
        there = prefix_mask(image_mask, token_mask, length)
        embedded = torch.cat([embedded, self.embed_words(answer).to(embedded.dtype)], dim=1)
        everything = functional.pad(there, (0, answer.shape[1]), value=True)
        hidden, _ = self.language(embedded, visible(there, answer.shape[1]), positions_of(everything), cache)
        place = length - tokens.shape[1] + token_mask.long().sum(1) - 1
        last = hidden.gather(1, place[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)
        return Read(hidden[:, :length], hidden[:, length:], there, last)

    def next(self, tokens: Tensor, there: Tensor, cache: KeyValueCache, dtype: torch.dtype) -> Tensor:
        """Encode the next token of an answer; returns the hidden state `[B, E]` that predicts the one behind it.

        Args:
            tokens: `[B]` ids.
            there: bool `[B, N+M]`, what the cache holds and this token, False for padding and absent images.
            cache: of all tokens before.
            dtype: of their hidden states.
        """
        embedded = self.embed_words(tokens.unsqueeze(1)).to(dtype)
        position = there.long().sum(1, keepdim=True) - 1
        hidden, _ = self.language(embedded, there[:, None, None, :], position, cache)
        state: Tensor = hidden[:, 0]
        return state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[..., vocabulary]` of hidden states `[..., E]`."""
        logits: Tensor = self.lm_head(hidden)
        return logits.float()

    def logits_of(self, hidden: Tensor, first: int, last: int, other: int) -> Tensor:
        """Return float32 logits `[..., last - first + 2]` of the ids from `first` to `last`, and of another one."""
        weight = self.lm_head.weight
        parts = (weight[first : last + 1], weight[other : other + 1])
        return torch.cat([functional.linear(hidden, part) for part in parts], dim=-1).float()


def initialize(network: PiFast) -> None:
    """Draw random weights for a small model: word embeddings as long as image tokens."""
    nn.init.normal_(network.embed_tokens.weight, std=network.language.sizes.width**-0.5)
    nn.init.normal_(network.vision.embeddings.position_embedding.weight, std=0.1)
