"""The network of GR00T N1.7 and N1.6: a vision-language model, and an action head that attends to its tokens.

Shapes: `B` samples, `V` images, `Q` tokens of an image, `L` tokens of the prompt, images included, `E` width of the
language model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from embodyrl.models.gr00t.head import ActionHead, Condition, Embodiment
from embodyrl.models.gr00t_n17 import eagle, qwen
from embodyrl.models.gr00t_n17.config import Architecture, Eagle, Qwen
from embodyrl.models.gr00t_n17.language import LanguageModel
from embodyrl.models.vla.folder import CONFIG, described_by
from embodyrl.models.vla.padding import causal_mask
from embodyrl.models.weights import Naming

INPUTS = ("pixel_values", "input_ids", "attention_mask", "places")
"""What the vision-language model reads; `places` only that of N1.7."""


class QwenBackbone(nn.Module):
    """Qwen3-VL; see `qwen`."""

    def __init__(self, vlm: Qwen, layers: int, *, final_norm: bool) -> None:
        super().__init__()
        self.vlm = vlm
        self.visual = qwen.VisionModel(vlm)
        self.language_model = LanguageModel(vlm.text, layers, final_norm=final_norm)

    def forward(self, images: Tensor, ids: Tensor, valid: Tensor, places: Tensor) -> Tensor:
        """Return output tokens `[B, L, E]` of the language model.

        Args:
            images: `[B, V, 3, h, w]`.
            ids: token ids `[B, L]`, with V*Q image tokens.
            valid: `[B, L]`, False for padding.
            places: time, row and column of each token, `[B, 3, L]`.
        """
        seen, inner = self.visual(images.flatten(0, 1))
        embedded = self.language_model.embed_tokens(ids)
        place = (ids == self.vlm.image_token).unsqueeze(-1)
        embedded = embedded.masked_scatter(place, seen.to(embedded.dtype))
        added = [torch.zeros_like(embedded).masked_scatter(place, each.to(embedded.dtype)) for each in inner]
        rotation = qwen.text_rotation(places, self.vlm.sections, self.vlm.text["rope_theta"])
        tokens: Tensor = self.language_model(embedded, causal_mask(valid), rotation, added)
        return tokens

    def vision_parts(self) -> tuple[nn.Module, ...]:
        """Return the vision transformer and the projections after it."""
        return (self.visual,)


class EagleBackbone(nn.Module):
    """Eagle 3; see `eagle`."""

    def __init__(self, vlm: Eagle, layers: int, *, final_norm: bool) -> None:
        super().__init__()
        self.vlm = vlm
        self.vision_model = eagle.VisionTower(vlm)
        self.mlp1 = eagle.projection(vlm)
        self.language_model = LanguageModel(vlm.text, layers, final_norm=final_norm)

    def see(self, images: Tensor) -> Tensor:
        """Return tokens `[M, Q, E]` of images `[M, 3, h, w]`."""
        grid = images.shape[2] // self.vlm.patch, images.shape[3] // self.vlm.patch
        tokens: Tensor = self.mlp1(eagle.join_patches(self.vision_model(images), grid, self.vlm.merge))
        return tokens

    def read(self, seen: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
        """Return output tokens `[B, L, E]` of the language model, for tokens `seen [.., E]` of all images."""
        embedded = self.language_model.embed_tokens(ids)
        place = (ids == self.vlm.image_token).unsqueeze(-1)
        embedded = embedded.masked_scatter(place, seen.to(embedded.dtype))
        text = self.vlm.text
        rotation = eagle.text_rotation(ids.shape[1], text["head_dim"], text["rope_theta"], ids.device)
        tokens: Tensor = self.language_model(embedded, causal_mask(valid), rotation)
        return tokens

    def forward(self, images: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
        """Return output tokens `[B, L, E]`; see `QwenBackbone.forward`."""
        return self.read(self.see(images.flatten(0, 1)), ids, valid)

    def vision_parts(self) -> tuple[nn.Module, ...]:
        """Return the vision transformer and the projection after it."""
        return (self.vision_model, self.mlp1)


class Gr00tNetwork(nn.Module):
    """The whole network."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.sizes = sizes
        vlm, layers = sizes.vlm, sizes.text_layers
        self.backbone: QwenBackbone | EagleBackbone
        if isinstance(vlm, Qwen):
            self.backbone = QwenBackbone(vlm, layers, final_norm=sizes.final_norm)
        else:
            assert isinstance(vlm, Eagle)
            self.backbone = EagleBackbone(vlm, layers, final_norm=sizes.final_norm)
        self.action_head = ActionHead(sizes.head)

    @classmethod
    def on_meta(cls, sizes: Architecture) -> Gr00tNetwork:
        """Build the network with parameters on the meta device."""
        with torch.device("meta"), described_by(CONFIG):
            return cls(sizes)

    def freeze(self, *, vision: bool, language: bool) -> None:
        """Freeze the vision transformer and the projections after it, or the language model; and a norm of it that
        nothing uses."""
        model = self.backbone.language_model
        for part in self.backbone.vision_parts():
            part.requires_grad_(not vision)
        model.requires_grad_(not language)
        model.norm.requires_grad_(model.applies_norm and not language)

    def condition(self, inputs: Mapping[str, Tensor], embodiment: Embodiment) -> Condition:
        """Encode images, task description and state.

        Args:
            inputs: `INPUTS`, as their backbone's `forward` takes them, and `state [B, 1, S]`, all of the weights' type.
            embodiment: index of the robot.
        """
        given = [inputs[name] for name in INPUTS if name in inputs]
        return self.attend(self.backbone(*given), inputs, embodiment)

    def attend(self, features: Tensor, inputs: Mapping[str, Tensor], embodiment: Embodiment) -> Condition:
        """Return what the action head reads of the language model's output `[B, L, E]`; see `condition`."""
        images, valid = inputs["input_ids"] == self.sizes.vlm.image_token, inputs["attention_mask"]
        masks = {"text": ~images & valid, "images": images & valid} if self.sizes.head.text_every is not None else {}
        return self.action_head.condition(features, inputs["state"], embodiment, valid=valid, **masks)


# -------------------------------------------------------------------------------------------------------------- weights

RENAMED = (
    ("backbone.visual.", "backbone.model.model.visual."),
    ("backbone.vision_model.", "backbone.model.vision_model.vision_model."),
    ("backbone.mlp1.", "backbone.model.mlp1."),
)
"""Beginnings of names in the network, and in public checkpoints."""
LANGUAGE = "backbone.language_model."
"""Beginning of the names of the language model in the network."""
TABLE = f"{LANGUAGE}embed_tokens.weight"


class Names:
    """Names of weights in public files.

    Args:
        vlm: sizes of the vision-language model.
        prefix: that names begin with, as in LeRobot's files.
    """

    def __init__(self, vlm: object, prefix: str = "") -> None:
        is_qwen = isinstance(vlm, Qwen)
        language = "backbone.model.model.language_model." if is_qwen else "backbone.model.language_model.model."
        self._renamed = (*RENAMED, (LANGUAGE, language))
        self.prefix = prefix
        self.table = prefix + language + "embed_tokens.weight"
        """Table of token embeddings."""
        output = "backbone.model.lm_head.weight" if is_qwen else "backbone.model.language_model.lm_head.weight"
        self.output = prefix + output
        """Output layer of the language model, which nothing uses; it is tied to the table, and a file may contain
        either or both."""

    def public(self, name: str) -> str:
        """Return the name in a file of a name in the network."""
        for own, there in self._renamed:
            if name.startswith(own):
                return self.prefix + there + name.removeprefix(own)
        return self.prefix + name

    def own(self, public: str) -> str | None:
        """Return the inverse of `public`; None for weights that nothing uses."""
        if public == self.output:
            return TABLE
        name = public.removeprefix(self.prefix)
        if name.startswith(UNUSED):
            return None
        for own, there in self._renamed:
            if name.startswith(there):
                return own + name.removeprefix(there)
        return name

    @property
    def naming(self) -> Naming:
        """Both directions."""
        return Naming(public=self.public, own=self.own)


UNUSED = ("backbone.model.vision_model.vision_model.head.", "action_head.mask_token")
"""Beginnings of names of weights that some files contain and nothing uses: SigLIP's pooling head, and what replaces a
state that is dropped in training."""
