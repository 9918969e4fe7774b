"""Options that OpenVLA and OpenVLA-OFT share, and the architecture in a checkpoint's config.json. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from embodyrl.config.schema import ModelConfig, setting
from embodyrl.models.errors import PolicyError
from embodyrl.models.vla.config import ActionUnits, WeightType
from embodyrl.models.vla.folder import CONFIG, check_whole, wrong


class Gripper(StrEnum):
    """Meaning of the last number of an unnormalized action, the gripper."""

    auto = "auto"
    one_opens = "one_opens"
    simulator = "simulator"


class Interpolation(StrEnum):
    """Method of resizing images."""

    checkpoint = "checkpoint"
    lanczos3 = "lanczos3"


@dataclass(frozen=True, kw_only=True)
class ScratchConfig:
    """Sizes of a model with random weights; a checkpoint has its own."""

    vision: list[str] = setting(["test_vit"])
    """timm names of one or two vision transformers."""
    image_size: int = setting(64, low=16)
    """Side of their square input images [pixels]."""
    hidden_size: int = setting(64, low=8)
    """Width of the language model."""
    layers: int = setting(4, low=1)
    """Its layers."""
    heads: int = setting(4, low=1)
    """Its attention heads."""
    mlp_size: int = setting(176, low=8)
    """Width of its feed-forward layers."""
    initializer_range: float = setting(0.1, above=0.0)
    """Standard deviation of its first weights. Small models need more than the usual 0.02, with which they do not learn
    to read the task description."""


@dataclass(frozen=True, kw_only=True)
class PrismaticConfig(ModelConfig):
    """A vision-language-action model whose actions are tokens of a language model."""

    unnorm_key: str | None = setting(None)
    """Data set in the checkpoint's statistics whose ranges turn the model's numbers into actions. null: the only one
    there is."""
    adapter: str | None = setting(None)
    """Folder of a LoRA adapter, as peft writes it, to add to the weights of `checkpoint`, with the heads that learned
    beside it (`heads.safetensors`, if there are any). null: none. Checkpoints of a run have it in their weights."""
    temperature: float = setting(1.0, above=0.0)
    """Divides the logits of action tokens, in rollouts and in learning."""
    top_k: int = setting(0, low=0, high=256)
    """Sample among this many of the most likely action tokens; 0: among all."""
    top_p: float = setting(1.0, above=0.0, high=1.0)
    """Sample among the most likely action tokens that together have this probability."""
    center_crop: bool = setting(False)
    """Crop the image's border (5 % of each side's length), as public evaluations do with models that were
    fine-tuned on random crops."""
    interpolation: Interpolation = setting(Interpolation.checkpoint)
    """How images are resized. checkpoint: as its preprocessor_config.json says, which is bicubic in public ones, as PIL
    does it; RLinf does so. lanczos3: as TensorFlow does it, which is how public data was prepared and public
    evaluations prepare images; with up to ten grey levels of difference."""
    dtype: WeightType = setting(WeightType.auto)
    """Type that weights are held in; bfloat16 halves their memory. auto: bfloat16 on a GPU that computes with it; on
    the CPU as in the checkpoint's files, but float32 for less than 100 million weights. float32 without a checkpoint,
    and where `engine.precision`, the type of computations, is float32."""
    action_units: ActionUnits = setting(ActionUnits.simulator)
    """simulator: the model was trained on actions of this simulator. metric: its motions are in metres and radians."""
    gripper: Gripper = setting(Gripper.auto)
    """one_opens: 0 closes, 1 opens. simulator: the simulator's own numbers. auto: one_opens if the statistics do not
    normalise the last number of an action, as in public checkpoints, else simulator."""
    binary_gripper: bool = setting(True)
    """Open or close fully, whichever is nearer. Without effect on a gripper in the simulator's own numbers."""
    freeze_vision: bool = setting(False)
    """Do not train the vision towers."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    """Shape of the model where `checkpoint` is null."""


# --------------------------------------------------------------------------------------------------------- architecture

THREE_LAYERS = "fused-gelu-mlp"
"""In `arch_specifier`: the projector has three layers instead of two."""


NEEDED = ("timm_model_ids", "text_config", "image_sizes", "arch_specifier", "pad_to_multiple_of", "n_action_bins")
_TOWER = re.compile(r"[\w.]+", re.ASCII)
"""Name of a vision transformer that comes with timm; with other signs it would be a place to download from."""
TEXT_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": None,
}
"""Whole numbers in `text_config`, with transformers' values where it does not say; None: it need not."""
TEXT_OTHERS = (
    *("hidden_act", "initializer_range", "rms_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "attention_dropout"),
    "tie_word_embeddings",
)
"""Further entries that are passed on; others could name code or other places."""


def _text_config(found: Any) -> dict[str, Any]:
    """Return the entries of `text_config` that are read."""
    if not isinstance(found, Mapping):
        raise _damaged("text_config", found, "a JSON object")
    if found.get("model_type", "llama") != "llama":
        raise PolicyError(f"config.json: the language model is {found['model_type']!r:.60}, only llama is supported")
    text = {key: value for key, value in found.items() if key in TEXT_SIZES or key in TEXT_OTHERS}
    sizes = {key: text.get(key, usual) for key, usual in TEXT_SIZES.items()}
    sizes = {key: check_whole(size, f"text_config.{key}") for key, size in sizes.items() if size is not None}
    width, heads = sizes.get("hidden_size", 0), sizes.get("num_attention_heads", 0)
    if not width or not heads:
        raise _damaged("text_config", found, "hidden_size and num_attention_heads")
    grouped = sizes.get("num_key_value_heads", heads)
    if width % heads or heads % grouped:
        raise _damaged("text_config.num_attention_heads", heads, f"a divisor of {width} and a multiple of {grouped}")
    return text


def _damaged(where: str, found: object, expected: str) -> PolicyError:
    return wrong(f"{CONFIG}: {where}", found, expected)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Vision towers, projector and language model of a Prismatic network (OpenVLA, OpenVLA-OFT)."""

    towers: tuple[str, ...]
    """timm names of one or two vision transformers; their features are concatenated."""
    image_sizes: tuple[int, ...]
    """Side of the square image that each tower takes [pixels]."""
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
            PolicyError: an entry is missing, or has an unsupported value.
        """
        missing = [key for key in NEEDED if key not in config]
        if missing:
            raise PolicyError(f"config.json has no {missing[0]!r}: it is not that of an OpenVLA model")
        text = _text_config(config["text_config"])
        towers = config["timm_model_ids"]
        if not isinstance(towers, list) or not all(isinstance(name, str) and _TOWER.fullmatch(name) for name in towers):
            raise _damaged("timm_model_ids", towers, "a list of names of timm")
        sides = config["image_sizes"]
        sides = [check_whole(side, "image_sizes") for side in (sides if isinstance(sides, list) else [None])]
        if len(set(sides)) != 1 or len(towers) not in (1, 2):
            raise PolicyError("config.json: expected one or two vision towers that take images of the same size")
        activations = config.get("timm_override_act_layers") or [None] * len(towers)
        known = isinstance(activations, list) and all(each is None or isinstance(each, str) for each in activations)
        if not known or not len(activations) == len(sides) == len(towers):
            raise _damaged("timm_override_act_layers", activations, "null or a name for each vision tower")
        architecture = cls(
            towers=tuple(towers),
            image_sizes=tuple(sides),
            activations=tuple(activations),
            deep_projector=THREE_LAYERS in str(config["arch_specifier"]),
            text=text,
            padding=check_whole(config["pad_to_multiple_of"], "pad_to_multiple_of", least=0),
            bins=check_whole(config["n_action_bins"], "n_action_bins", least=2),
        )
        if architecture.first_action_token < 0:
            raise _damaged("n_action_bins", architecture.bins, f"less than the {architecture.vocabulary} tokens")
        return architecture

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary without padding; the last `bins` tokens stand for actions."""
        size: int = self.text.get("vocab_size", TEXT_SIZES["vocab_size"])
        return size - self.padding

    @property
    def first_action_token(self) -> int:
        """Id of the first action token."""
        return self.vocabulary - self.bins

    @property
    def channels(self) -> int:
        """Channels of `pixel_values` per image: three per tower, each normalised in its own way."""
        return 3 * len(self.towers)
