"""Options that OpenVLA and OpenVLA-OFT share, and the architecture in a checkpoint's config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from embodyrl.config.schema import ModelConfig, setting
from embodyrl.models.errors import PolicyError
from embodyrl.models.vla.config import ActionUnits, WeightType


class Gripper(StrEnum):
    """Meaning of the last number of an un-normalised action, the gripper."""

    auto = "auto"
    one_opens = "one_opens"
    simulator = "simulator"


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
            raise PolicyError("config.json: expected one or two vision towers that take images of the same size")
        return architecture

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary without padding; the last `bins` tokens stand for actions."""
        size: int = self.text["vocab_size"]
        return size - self.padding

    @property
    def first_action_token(self) -> int:
        """Id of the first action token."""
        return self.vocabulary - self.bins

    @property
    def channels(self) -> int:
        """Channels of `pixel_values` per image: three per tower, each normalised in its own way."""
        return 3 * len(self.towers)
