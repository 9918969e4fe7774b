"""What a checkpoint's config.json says about the shape of its network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodyrl.models.errors import PolicyError

THREE_LAYERS = "fused-gelu-mlp"
"""In `arch_specifier`: the projector has three layers instead of two."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Vision towers, projector and language model of a Prismatic network (OpenVLA, OpenVLA-OFT)."""

    towers: tuple[str, ...]
    """timm names of one or two vision transformers; their features are concatenated."""
    image_sizes: tuple[int, ...]
    """Side of the square picture that each tower takes [pixels]."""
    activations: tuple[str | None, ...]
    """Activation that replaces each tower's own, or None."""
    deep_projector: bool
    """Three projector layers instead of two."""
    text: Mapping[str, Any]
    """Arguments of transformers' LlamaConfig; what is missing has its defaults."""
    padding: int
    """Rows at the end of the vocabulary that no token uses; action tokens are the ones before them."""
    bins: int
    """Action tokens."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read the contents of config.json.

        Raises:
            PolicyError: an entry is missing, or asks for something that does not exist here.
        """
        try:
            towers = tuple(config["timm_model_ids"])
            text = dict(config["text_config"])
            architecture = cls(
                towers=towers,
                image_sizes=tuple(config["image_sizes"]),
                activations=tuple(config.get("timm_override_act_layers") or [None] * len(towers)),
                deep_projector=THREE_LAYERS in config["arch_specifier"],
                text={key: value for key, value in text.items() if key not in ("torch_dtype", "dtype", "model_type")},
                padding=config["pad_to_multiple_of"],
                bins=config["n_action_bins"],
            )
        except KeyError as error:
            raise PolicyError(f"config.json has no {error.args[0]!r}: it is not that of an OpenVLA model") from error
        if text.get("model_type", "llama") != "llama":
            raise PolicyError(f"config.json: the language model is {text['model_type']!r}, only llama is supported")
        if len(set(architecture.image_sizes)) != 1 or len(towers) not in (1, 2):
            raise PolicyError("config.json: expected one or two vision towers that take pictures of the same size")
        return architecture

    @property
    def vocabulary(self) -> int:
        """Tokens, without padding; the last `bins` of them stand for actions."""
        size: int = self.text["vocab_size"]
        return size - self.padding

    @property
    def first_action_token(self) -> int:
        """Id of the first action token."""
        return self.vocabulary - self.bins

    @property
    def channels(self) -> int:
        """Channels of `pixel_values` per picture: three per tower, each normalised in its own way."""
        return 3 * len(self.towers)
