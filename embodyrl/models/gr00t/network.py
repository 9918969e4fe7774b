"""GR00T N1.5: a vision-language model (SigLIP, one linear layer, the first layers of Qwen3), and an action head that
attends to its tokens.

Parameter names are those of the public checkpoints, except as in `NAMING`. Shapes: `B` samples, `V` images, `P`
tokens of an image, `L` tokens of the prompt, images included, `E` width of the language model.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from embodyrl.models.gr00t.config import LEROBOT_PREFIX, Architecture
from embodyrl.models.gr00t.head import ActionHead
from embodyrl.models.libraries import (
    Qwen3Config,
    Qwen3Model,
    Qwen3RotaryEmbedding,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from embodyrl.models.vla.folder import CONFIG, described_by
from embodyrl.models.vla.padding import ATTENTION
from embodyrl.models.weights import Naming

# -------------------------------------------------------------------------------------------- the vision-language model


class EagleModel(nn.Module):
    """The vision-language model: causal tokens of images and a task description."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        vision = SiglipVisionModel(SiglipVisionConfig(**sizes.vision, vision_use_head=False))
        self.vision_model = getattr(vision, "vision_model", vision)
        self.mlp1 = nn.Sequential(nn.Linear(sizes.vision["hidden_size"], sizes.width))
        text = {**sizes.text, "num_hidden_layers": sizes.text_layers, "attn_implementation": ATTENTION}
        self.language_model = Qwen3Model(Qwen3Config(**text))
        self.image_token = sizes.image_token

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Return tokens `[B*V, P, E]` of images `[B*V, 3, h, h]`."""
        tokens: Tensor = self.mlp1(self.vision_model(pixel_values).last_hidden_state)
        return tokens

    def forward(self, pixel_values: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Return output tokens `[B, L, E]` of the language model.

        Args:
            pixel_values: `[B*V, 3, h, h]`.
            input_ids: `[B, L]`, with V*P image tokens.
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
        """Freeze the vision tower and the projection after it, or the language model."""
        for frozen, part in ((vision, self.vision_model), (vision, self.mlp1), (language, self.language_model)):
            part.requires_grad_(not frozen)

    def give_memory_to_tables(self) -> None:
        """Compute buffers that no checkpoint contains, for a model that was built on the meta device."""
        self.language_model.rotary_emb = Qwen3RotaryEmbedding(self.language_model.config)
        embeddings = self.vision_model.embeddings
        embeddings.position_ids = torch.arange(embeddings.num_positions).expand(1, -1)


# ------------------------------------------------------------------------------------------------------------ the whole

VISION, TEXT = "backbone.eagle_model.vision_model.", "backbone.eagle_model.language_model."
POOLING = VISION + "vision_model.head."
"""SigLIP's pooling head, which is not used; some files contain it."""


def checkpoint_name(name: str) -> str:
    """Return the name of a parameter in public checkpoints."""
    return re.sub(rf"^({VISION})", r"\1vision_model.", re.sub(rf"^({TEXT})", r"\1model.", name))


def parameter_name(name: str) -> str | None:
    """Return the inverse of `checkpoint_name`, also for LeRobot's files; None for weights that are not used.

    The output layer of the language model is tied to its embedding; a file may contain it under either name.
    """
    name = name.removeprefix(LEROBOT_PREFIX)
    if name.startswith(POOLING):
        return None
    if name == TEXT + "lm_head.weight":
        return TEXT + "embed_tokens.weight"
    return re.sub(rf"^({VISION}|{TEXT})(vision_model|model)\.", r"\1", name)


NAMING = Naming(public=checkpoint_name, own=parameter_name)


class EagleBackbone(nn.Module):
    """Wraps the vision-language model, for the parameter names of checkpoints."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.eagle_model = EagleModel(sizes)

    def forward(self, pixel_values: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
        """See `EagleModel`."""
        tokens: Tensor = self.eagle_model(pixel_values, input_ids, mask)
        return tokens


class Gr00tNetwork(nn.Module):
    """The whole network; see `EagleModel` and `ActionHead`."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.sizes = sizes
        self.backbone = EagleBackbone(sizes)
        self.action_head = ActionHead(sizes.head)

    @classmethod
    def on_meta(cls, sizes: Architecture) -> Gr00tNetwork:
        """Build the network with parameters on the meta device."""
        with torch.device("meta"), described_by(CONFIG):
            network = cls(sizes)
        network.backbone.eagle_model.give_memory_to_tables()
        return network
