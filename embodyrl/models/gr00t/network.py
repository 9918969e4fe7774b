"""GR00T N1.5: a vision-language model (SigLIP, one linear layer, the first layers of Qwen3), and an action head that
looks at its tokens.

Parameter names are those of the public checkpoints, but for what `NAMING` says. Shapes: `B` samples, `V` images, `P`
tokens of an image, `L` tokens of the prompt, images included, `E` width of the language model.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.models.gr00t.config import Architecture
from embodyrl.models.gr00t.head import ActionHead
from embodyrl.models.libraries import (
    AttentionInterface,
    Qwen3Config,
    Qwen3Model,
    Qwen3RotaryEmbedding,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from embodyrl.models.weights import Naming

# ------------------------------------------------------------------------------------------------------------ attention


def causal_mask(valid: Tensor) -> Tensor:
    """Return which token `[B, 1, L, L]` looks at which: at those before it that are no padding, where `valid [B, L]`
    says so.

    Padding looks at nothing, and attention to nothing is zero. Public code runs with FlashAttention, which leaves zeros
    in the place of padding; since the action head looks at padding as well, these zeros reach the actions.
    """
    length = valid.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
    return before & valid[:, None, :, None] & valid[:, None, None, :]


def padded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Return what every token sees, `[B, L, h, E/h]` of queries `[B, h, L, E/h]`; zeros where it may look at nothing.

    No kernel is asked about such a token, for they do not agree on it, and the gradients of some would be NaN (cuDNN's
    in bfloat16 at lengths of 64, 192, ..: github.com/pytorch/pytorch/issues/196678): it looks at everything, and that
    is thrown away.
    """
    looks = attention_mask.any(dim=-1, keepdim=True)
    interface: Any = AttentionInterface  # untyped
    attend = interface()["sdpa"]
    seen, _ = attend(module, query, key, value, attention_mask | ~looks, **options)
    return seen.masked_fill(~looks.transpose(1, 2), 0.0), None


ATTENTION = "padded_sdpa"
"""Its name for transformers."""
AttentionInterface.register(ATTENTION, padded_attention)


# -------------------------------------------------------------------------------------------- the vision-language model


class EagleModel(nn.Module):
    """Images and a task description, as tokens that have seen what stands before them."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        vision = SiglipVisionModel(SiglipVisionConfig(**sizes.vision, vision_use_head=False))
        self.vision_model = getattr(vision, "vision_model", vision)
        self.mlp1 = nn.Sequential(nn.Linear(sizes.vision["hidden_size"], sizes.width))
        text = {**sizes.text, "num_hidden_layers": sizes.text_layers, "attn_implementation": ATTENTION}
        self.language_model = Qwen3Model(Qwen3Config(**text))
        self.image_token = sizes.image_token

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Tokens `[B*V, P, E]` of images `[B*V, 3, h, h]`."""
        tokens: Tensor = self.mlp1(self.vision_model(pixel_values).last_hidden_state)
        return tokens

    def forward(self, pixel_values: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Tokens `[B, L, E]` of the language model.

        Args:
            pixel_values: `[B*V, 3, h, h]`.
            input_ids: `[B, L]`, with V*P times the token that stands for a piece of an image.
            mask: `[B, 1, L, L]`, see `causal_mask`.
        """
        embedded = self.language_model.embed_tokens(input_ids)
        images = self.embed_images(pixel_values).to(embedded.dtype)
        place = (input_ids == self.image_token).unsqueeze(-1)
        output = self.language_model(
            inputs_embeds=embedded.masked_scatter(place, images), attention_mask=mask, use_cache=False
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


# ------------------------------------------------------------------------------------------------------------ the whole

LEROBOT_PREFIX = "_groot_model."
VISION, TEXT = "backbone.eagle_model.vision_model.", "backbone.eagle_model.language_model."
POOLING = VISION + "vision_model.head."
"""A head of SigLIP that nothing uses; some files hold it."""


def checkpoint_name(name: str) -> str:
    """The name that a parameter has in public checkpoints."""
    return re.sub(rf"^({VISION})", r"\1vision_model.", re.sub(rf"^({TEXT})", r"\1model.", name))


def parameter_name(name: str) -> str | None:
    """The inverse of `checkpoint_name`, also for LeRobot's files.

    The output layer of the language model is the table of its tokens; a file may hold it under either name.
    """
    name = name.removeprefix(LEROBOT_PREFIX)
    if name.startswith(POOLING):
        return None
    if name == TEXT + "lm_head.weight":
        return TEXT + "embed_tokens.weight"
    return re.sub(rf"^({VISION}|{TEXT})(vision_model|model)\.", r"\1", name)


NAMING = Naming(public=checkpoint_name, own=parameter_name)


class EagleBackbone(nn.Module):
    """Holds the vision-language model under the name that checkpoints have."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.eagle_model = EagleModel(sizes)

    def forward(self, pixel_values: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
        """See `EagleModel`."""
        tokens: Tensor = self.eagle_model(pixel_values, input_ids, mask)
        return tokens


class Gr00tNetwork(nn.Module):
    """All parts; see `EagleModel` and `ActionHead`."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.sizes = sizes
        self.backbone = EagleBackbone(sizes)
        self.action_head = ActionHead(sizes)

    @classmethod
    def on_meta(cls, sizes: Architecture) -> Gr00tNetwork:
        """The network without memory for its parameters, which are to be assigned."""
        with torch.device("meta"):
            network = cls(sizes)
        network.backbone.eagle_model.give_memory_to_tables()
        return network
