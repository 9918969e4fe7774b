"""Options of pi0-FAST, and the architecture in a checkpoint's config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from embodyrl.config.schema import WIDEST_LAYER, ModelConfig, setting
from embodyrl.models.errors import PolicyError
from embodyrl.models.lerobot import check_type, refuse_unknown, section
from embodyrl.models.pi.config import (
    VOCABULARY,
    GemmaSizes,
    Normalization,
    StateInput,
    gemma_sizes,
    image_names,
    vision_sizes,
)
from embodyrl.models.vla.config import ActionUnits, Gripper, WeightType
from embodyrl.models.vla.folder import check_whole

NAME = "pi0_fast"
ABANDONED = "pi0fast"
"""`type` of the layout that LeRobot had before."""
PROMPT_LENGTH, ANSWER_LENGTH, DECODING_STEPS, HORIZON, SKIPPED = 200, 256, 256, 50, 128
"""LeRobot's values where config.json says nothing."""


class Convention(StrEnum):
    """Whose order of tokens the weights were trained with."""

    lerobot = "lerobot"
    openpi = "openpi"


class Decoding(StrEnum):
    """Tokens that an answer may have."""

    codes = "codes"
    all = "all"


class LossMean(StrEnum):
    """Unit of the mean of the supervised loss."""

    tokens = "tokens"
    samples = "samples"


class ValueFrom(StrEnum):
    """Input of the critic."""

    last = "last"
    mean = "mean"


@dataclass(frozen=True, kw_only=True)
class ScratchConfig:
    """Sizes of a model with random weights; a checkpoint has its own."""

    image_size: int = setting(64, low=16)
    """Side of the square input images [pixels]."""
    patch_size: int = setting(16, low=4)
    """Side of an image token [pixels]; the image's side must be a multiple."""
    vision_size: int = setting(64, low=8)
    """Width of the vision transformer."""
    hidden_size: int = setting(64, low=8)
    """Width of the language model."""
    layers: int = setting(4, low=1)
    """Layers of each of both."""
    heads: int = setting(4, low=1)
    """Attention heads of each."""
    mlp_ratio: float = setting(3.0, above=0.0)
    """Widths of feed-forward layers, in widths of their transformer."""
    scale: float = setting(10.0, above=0.0)
    """Multiplies the coefficients of a chunk before they are rounded: larger ones keep more, and need more tokens."""


@dataclass(frozen=True, kw_only=True)
class Pi0FastConfig(ModelConfig):
    """pi0-FAST: images, robot state and a task description; a chunk of actions in compressed tokens, one by one."""

    unnorm_key: str | None = setting(None)
    """Data set whose statistics normalise states and actions. null: the only one there is."""
    statistics: str | None = setting(None)
    """File of statistics: openpi's norm_stats.json, or a LeRobotDataset's meta/stats.json. null: those in the
    checkpoint's folder; a model with random weights takes the simulator's ranges."""
    tokenizer: str | None = setting(None)
    """PaliGemma's tokenizer.json or tokenizer.model. null: the one in the checkpoint's folder."""
    action_tokenizer: str | None = setting(None)
    """Folder of the FAST tokenizer: tokenizer.json and processor_config.json. null: the one in the checkpoint's
    folder."""
    normalization: Normalization | None = setting(None)
    """zscore: by mean and standard deviation. quantile: the 1st and the 99th percentile become -1 and 1. null: as the
    policy was saved, else as LeRobot's files in the checkpoint say (`normalization_mapping`), else quantile, as
    openpi."""
    convention: Convention | None = setting(None)
    """Order of the tokens that the weights were trained with. lerobot: a second `<bos>` begins the answer, absent
    images are masked. openpi: the prompt is in lower case and its last token predicts the first of the answer, absent
    images are black. null: as the policy was saved, else by the layout of the checkpoint's weights."""
    loss_mean: LossMean | None = setting(None)
    """Mean of the supervised loss. tokens: over all tokens of a minibatch, so that long answers count for more.
    samples: of each sample over its tokens, then over samples. null: tokens for lerobot's convention, samples for
    openpi's."""
    state: StateInput = setting(StateInput.prompt)
    """prompt: written into the prompt in 256 bins, as published. none: not at all."""
    prompt_length: int | None = setting(None, low=1)
    """Tokens of a prompt, with padding, in rollouts and learning alike; longer ones are errors. null: as in the
    checkpoint."""
    answer_length: int | None = setting(None, low=1)
    """Tokens that are chosen for a chunk at most, with the one that ends it. null: `max_decoding_steps` of the
    checkpoint, but no more than a chunk has numbers, and one. An answer that does not end counts as invalid."""
    decoding: Decoding = setting(Decoding.codes)
    """codes: `Action: ` is given, and only codes and the end of the answer are chosen among. all: among the whole
    vocabulary from the first token on, as public code does; what is no code is left out of the chunk, which counts as
    invalid."""
    temperature: float = setting(1.0, above=0.0)
    """Divides the logits of tokens, in rollouts and in learning."""
    top_k: int = setting(0, low=0)
    """Sample among this many of the most likely tokens; 0: among all."""
    top_p: float = setting(1.0, above=0.0, high=1.0)
    """Sample among the most likely tokens that together have this probability."""
    cameras: list[str] = setting([])
    """Which of env.cameras each image of the checkpoint shows, in its order (openpi's: base, left wrist, right
    wrist); `absent` for an image without a camera. []: env.cameras, in their order."""
    relative_action_dims: int = setting(0, low=0)
    """Number of leading action dims that are relative to the state at the beginning of the chunk (openpi's
    pi0_fast_libero: 6)."""
    value_from: ValueFrom = setting(ValueFrom.last)
    """last: the critic reads the language model's output for the last token of the prompt. mean: the mean of those for
    images and prompt."""
    detach_critic: bool = setting(True)
    """Train only the critic with the value loss, not the network that it reads."""
    value_sizes: list[int] = setting([512, 256, 128], low=1, high=WIDEST_LAYER)
    """Widths of the critic's hidden layers."""
    action_units: ActionUnits = setting(ActionUnits.simulator)
    """simulator: the model was trained on actions of this simulator. metric: its motions are in metres and radians."""
    gripper: Gripper = setting(Gripper.simulator)
    """simulator: the simulator's own numbers. one_opens: 1 opens and 0 closes, as in data converted from LIBERO."""
    binary_gripper: bool = setting(True)
    """Open or close fully, whichever is nearer. Without effect on a gripper in the simulator's own numbers."""
    freeze_vision: bool = setting(False)
    """Do not train the vision tower."""
    dtype: WeightType = setting(WeightType.auto)
    """Type that weights are held in; bfloat16 halves their memory. auto: bfloat16 on a GPU that computes with it; on
    the CPU as in the checkpoint's files, but float32 for less than 100 million weights. float32 without a checkpoint,
    and where `engine.precision`, the type of computations, is float32."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    """Shape of the model where `checkpoint` is null."""


# --------------------------------------------------------------------------------------------------------- architecture

EXPLICIT = "vlm_config"
"""Entry of config.json with the sizes of a model that is not of the published size, as pi0's has them."""
IMPLEMENTED: Mapping[str, tuple[float | str, ...]] = {
    "rms_norm_eps": (1e-6,),
    "rope_theta": (10_000, 10_000.0),
    "layer_norm_eps": (1e-6,),
    "hidden_act": ("gelu_pytorch_tanh",),
}
"""Entries of explicit sizes, and the only values of each."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Everything that determines the shapes of the weights and the order of tokens."""

    vision: Mapping[str, Any]
    """Sizes of SigLIP, as transformers names them."""
    language: GemmaSizes
    vocabulary: int
    horizon: int
    """`H`"""
    prompt_length: int
    """`L`"""
    answer_length: int
    """Tokens of a demonstrated answer; longer ones are cut."""
    decoding_steps: int
    """Tokens that are chosen at most."""
    skipped: int
    """Token ids at the end of the vocabulary that no code has."""
    images: tuple[str, ...]
    """Names of the images, in their order."""

    @property
    def image_size(self) -> int:
        """Side of an image [pixels]."""
        return int(self.vision["image_size"])

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read a config.json of LeRobot, whose sizes are the published ones, or with explicit sizes.

        Raises:
            PolicyError: the file is that of another model, or names unknown sizes.
        """
        written = config.get("type", config.get("model_type", NAME))
        if written == ABANDONED:
            raise PolicyError(
                f"config.json: type is {ABANDONED!r}, a layout that LeRobot has abandoned: its weights have other "
                "names and its prompts another form",
                f"take a checkpoint of type {NAME!r}, such as lerobot/pi0fast-base or lerobot/pi0fast-libero",
            )
        check_type({"type": written}, NAME)
        explicit, where = _explicit(config)
        text = None if explicit is None else section(explicit, "text_config")
        for part in ("text_config", "vision_config") if explicit is not None else ():
            refuse_unknown(section(explicit or {}, part), IMPLEMENTED)
        return cls(
            vision=vision_sizes(config, explicit, where) | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
            language=gemma_sizes(config, "paligemma_variant", "gemma_2b", text, f"{where}text_config."),
            vocabulary=VOCABULARY if text is None else _whole(text, "vocab_size", VOCABULARY, f"{where}text_config."),
            horizon=_whole(config, "chunk_size", HORIZON),
            prompt_length=_whole(config, "tokenizer_max_length", PROMPT_LENGTH),
            answer_length=_whole(config, "max_action_tokens", ANSWER_LENGTH),
            decoding_steps=_whole(config, "max_decoding_steps", DECODING_STEPS),
            skipped=_whole(config, "fast_skip_tokens", SKIPPED, least=0),
            images=image_names(config),
        )


def _explicit(config: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """Return the explicit sizes of language model and vision tower, None for the published ones, and their place."""
    if "sizes" in config:
        return section(section(config, "sizes"), "paligemma"), "sizes.paligemma."
    return (section(config, EXPLICIT), f"{EXPLICIT}.") if EXPLICIT in config else (None, "")


def _whole(config: Mapping[str, Any], key: str, usual: int, where: str = "", *, least: int = 1) -> int:
    found = config.get(key)
    return usual if found is None else check_whole(found, where + key, least=least)
