"""The shape of a pi0 or pi0.5 model, as its config.json says it. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodyrl.models.errors import PolicyError
from embodyrl.models.pi.sizes import GemmaSizes

GEMMA = {
    "gemma_2b": GemmaSizes(width=2048, layers=18, mlp=16384, heads=8, kv_heads=1, head_dim=256),
    "gemma_300m": GemmaSizes(width=1024, layers=18, mlp=4096, heads=8, kv_heads=1, head_dim=256),
}
"""Sizes by the names that public files give them; a suffix `_lora` changes no shape."""
SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 224,
}
VOCABULARY = 257152
PROMPT_LENGTH = {"pi0": 48, "pi05": 200}
"""Tokens of a sentence, with padding."""
PICTURES = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""What openpi's models see."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Everything that decides which weights there are."""

    adaptive: bool
    """pi0.5: time goes into the norms of the action expert, and there is no state token."""
    vision: Mapping[str, Any]
    """Sizes of SigLIP, as transformers names them."""
    language: GemmaSizes
    expert: GemmaSizes
    vocabulary: int
    expert_vocabulary: int
    """Rows of the output layer of the action expert, which public files carry along; 0: they do not."""
    state_dim: int
    """Most numbers of a state."""
    action_dim: int
    """`A`"""
    horizon: int
    """`H`"""
    prompt_length: int
    """`L`"""
    pictures: tuple[str, ...]
    """What the pictures show, in their order."""

    @property
    def image_size(self) -> int:
        """Side of a picture [pixels]."""
        return int(self.vision["image_size"])

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any], *, expert_head: bool) -> Architecture:
        """Read a config.json by openpi (which names sizes by variant), lerobot, or with explicit sizes.

        Args:
            name: `pi0` or `pi05`.
            config: the file's contents.
            expert_head: the weights include the expert's output layer.

        Raises:
            PolicyError: it is that of another model, or names sizes that are not known.
        """
        written = _either(config, "type", "model_type", name)
        if written != name:
            raise PolicyError(
                f"config.json is that of a {written!r} model: set model.name to that one, or give another folder"
            )
        vlm, expert = config.get("vlm_config"), config.get("dit_config")
        text = {} if vlm is None else vlm["text_config"]
        resolution = config.get("image_resolution", (SO400M["image_size"],) * 2)
        vision = (SO400M if vlm is None else dict(vlm["vision_config"])) | {"image_size": resolution[0]}
        vocabulary = int(text.get("vocab_size", VOCABULARY))
        action_dim = int(_either(config, "max_action_dim", "action_dim", 32))
        return cls(
            adaptive=name == "pi05",
            vision=vision | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
            language=_variant(config, "paligemma_variant", "gemma_2b") if vlm is None else _sizes(text),
            expert=_variant(config, "action_expert_variant", "gemma_300m") if expert is None else _sizes(expert),
            vocabulary=vocabulary,
            expert_vocabulary=vocabulary if expert_head else 0,
            state_dim=int(config.get("max_state_dim", action_dim)),
            action_dim=action_dim,
            horizon=int(_either(config, "chunk_size", "action_horizon", 50)),
            prompt_length=int(_either(config, "tokenizer_max_length", "max_token_len", PROMPT_LENGTH[name])),
            pictures=_pictures(config),
        )


def _either(config: Mapping[str, Any], first: str, second: str, default: object) -> Any:
    return config.get(first, config.get(second, default))


def _variant(config: Mapping[str, Any], key: str, default: str) -> GemmaSizes:
    name = str(config.get(key, default)).removesuffix("_lora")
    if name not in GEMMA:
        raise PolicyError(f"config.json: {key} is {name!r}, known are {', '.join(GEMMA)}")
    return GEMMA[name]


def _sizes(config: Mapping[str, Any]) -> GemmaSizes:
    return GemmaSizes(
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        mlp=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
    )


def _pictures(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Lerobot lists its inputs; openpi's models always see the same."""
    features = config.get("input_features") or {}
    names = [name.rsplit(".", 1)[-1] for name, feature in features.items() if feature.get("type") == "VISUAL"]
    names += [f"empty_camera_{number}" for number in range(int(config.get("empty_cameras", 0)))]
    return tuple(dict.fromkeys(names)) or PICTURES
