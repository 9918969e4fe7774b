"""The vision-language model: SigLIP, one linear layer, and the first layers of Qwen3.

Shapes: `B` samples, `V` pictures, `P` tokens of a picture, `L` tokens of the prompt, pictures included, `E` width of
the language model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.models.gr00t.architecture import Architecture
from embodyrl.models.libraries import (
    AttentionInterface,
    Qwen3Config,
    Qwen3Model,
    Qwen3RotaryEmbedding,
    SiglipVisionConfig,
    SiglipVisionModel,
)


def causal_mask(valid: Tensor) -> Tensor:
    """Which token `[B, 1, L, L]` looks at which: at those before it that are no padding, where `valid [B, L]` says so.

    Padding looks at nothing, and attention to nothing is zero. Public code runs with FlashAttention, which leaves zeros
    in the place of padding; since the action head looks at padding as well, these zeros reach the actions.
    """
    length = valid.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
    return before & valid[:, None, :, None] & valid[:, None, None, :]


def padded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """What every token sees, `[B, L, h, E/h]` of queries `[B, h, L, E/h]`; zeros where it may look at nothing.

    No kernel is asked about such a token, for they do not agree on it, and the gradients of some would be NaN (cuDNN's
    in bfloat16 at lengths of 64, 192, ..: github.com/pytorch/pytorch/issues/196678): it looks at everything, and that
    is thrown away.
    """
    looks = attention_mask.any(dim=-1, keepdim=True)
    attend = AttentionInterface()["sdpa"]
    seen, _ = attend(module, query, key, value, attention_mask | ~looks, **options)
    return seen.masked_fill(~looks.transpose(1, 2), 0.0), None


ATTENTION = "padded_sdpa"
"""Its name for transformers."""
AttentionInterface.register(ATTENTION, padded_attention)


class EagleModel(nn.Module):
    """Pictures and a sentence, as tokens that have seen what stands before them."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        vision = SiglipVisionModel(SiglipVisionConfig(**sizes.vision, vision_use_head=False))
        self.vision_model = getattr(vision, "vision_model", vision)
        self.mlp1 = nn.Sequential(nn.Linear(sizes.vision["hidden_size"], sizes.width))
        text = {**sizes.text, "num_hidden_layers": sizes.text_layers, "attn_implementation": ATTENTION}
        self.language_model = Qwen3Model(Qwen3Config(**text))
        self.image_token = sizes.image_token

    def embed_pictures(self, pixel_values: Tensor) -> Tensor:
        """Tokens `[B*V, P, E]` of pictures `[B*V, 3, h, h]`."""
        tokens: Tensor = self.mlp1(self.vision_model(pixel_values).last_hidden_state)
        return tokens

    def forward(self, pixel_values: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Tokens `[B, L, E]` of the language model.

        Args:
            pixel_values: `[B*V, 3, h, h]`.
            input_ids: `[B, L]`, with V*P times the token that stands for a piece of a picture.
            mask: `[B, 1, L, L]`, see `causal_mask`.
        """
        embedded = self.language_model.embed_tokens(input_ids)
        pictures = self.embed_pictures(pixel_values).to(embedded.dtype)
        place = (input_ids == self.image_token).unsqueeze(-1)
        output = self.language_model(
            inputs_embeds=embedded.masked_scatter(place, pictures), attention_mask=mask, use_cache=False
        )
        states: Tensor = output.last_hidden_state
        return states

    def freeze(self, *, vision: bool, language: bool) -> None:
        """Learn no weights of the vision tower and the layer behind it, or none of the language model."""
        for frozen, part in ((vision, self.vision_model), (vision, self.mlp1), (language, self.language_model)):
            part.requires_grad_(not frozen)

    def give_memory_to_tables(self) -> None:
        """Compute what no checkpoint brings, for a model that was built without memory."""
        self.language_model.rotary_emb = Qwen3RotaryEmbedding(self.language_model.config)
        embeddings = self.vision_model.embeddings
        embeddings.position_ids = torch.arange(embeddings.num_positions).expand(1, -1)
