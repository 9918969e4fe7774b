"""Options of GR00T N1.5 (part of the config schema; imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from embodyrl.config.schema import setting
from embodyrl.models.flow.options import FlowConfig


class Normalization(StrEnum):
    """Which numbers of the statistics scale a state or an action."""

    min_max = "min_max"
    mean_std = "mean_std"


class Padding(StrEnum):
    """Where prompts are filled up to their common length."""

    left = "left"
    right = "right"


class Interpolation(StrEnum):
    """How pictures are resized."""

    bilinear = "bilinear"
    bicubic = "bicubic"


class ValueInput(StrEnum):
    """What the critic looks at."""

    vl = "vl"
    vl_and_state = "vl_and_state"


@dataclass(frozen=True, kw_only=True)
class ScratchConfig:
    """Shape of a model that starts with random weights; a checkpoint brings its own."""

    image_size: int = setting(64, low=8)
    """Side of the square pictures that it sees [pixels]."""
    patch_size: int = setting(16, low=4)
    """Side of the squares that become tokens [pixels]."""
    vision_size: int = setting(64, low=8)
    """Width of the vision transformer."""
    vision_layers: int = setting(3, low=1)
    """Its layers."""
    hidden_size: int = setting(64, low=8)
    """Width of the language model, and of the self-attention behind it."""
    layers: int = setting(2, low=1)
    """Layers of the language model."""
    self_attention_layers: int = setting(1, low=1)
    """Layers of the self-attention behind it."""
    action_size: int = setting(64, low=8)
    """Width of the diffusion transformer, of its output and of the networks around it."""
    action_layers: int = setting(4, low=1)
    """Layers of the diffusion transformer."""
    heads: int = setting(4, low=1)
    """Attention heads of every part."""
    action_horizon: int | None = setting(None, low=1)
    """Actions that are denoised together. null: as many as are executed (`rollout.chunk_size`)."""
    initializer_range: float = setting(0.1, above=0.0)
    """Standard deviation of the first weights of the language model. Small models need more than the usual 0.02."""


@dataclass(frozen=True, kw_only=True)
class Gr00tConfig(FlowConfig):
    """GR00T N1.5: a vision-language model, and a diffusion transformer that denoises a chunk of actions."""

    denoising_steps: int = setting(4, low=1, high=100)
    """Steps from noise to actions, in rollouts, evaluation and learning alike."""
    value_sizes: list[int] = setting([1024, 512, 256], low=1)
    """Widths of the critic's hidden layers."""
    value_input: ValueInput = setting(ValueInput.vl_and_state)
    """vl: the critic looks at pictures and sentence (the mean of their tokens). vl_and_state: at the state as well."""
    embodiment_tag: str | None = setting(None)
    """The robot, by the name that it has in the checkpoint's statistics. null: the only one there."""
    embodiment_id: int | None = setting(None, low=0)
    """Which of the networks in the checkpoint, one per robot, to use. null: the usual one for the robot's name."""
    statistics: str | None = setting(None)
    """File with the ranges of states and actions: metadata.json of Isaac-GR00T, or meta/stats.json of a LeRobotDataset,
    for a new robot. null: what the checkpoint brings; without one, the simulator's range of actions."""
    video_keys: list[str] | None = setting(None)
    """The pictures that the checkpoint was trained with, by their names in its statistics, in the order of
    `env.cameras`. null: all."""
    state_keys: list[str] | None = setting(None)
    """The parts of the simulator's state, by their names in the statistics, in the simulator's order. null: all."""
    action_keys: list[str] | None = setting(None)
    """The parts of the simulator's action, by their names in the statistics, in the simulator's order. null: all."""
    state_normalization: Normalization = setting(Normalization.min_max)
    """How states are scaled. min_max: -1 and 1 are the ends of the range. mean_std: mean 0, standard deviation 1."""
    action_normalization: Normalization = setting(Normalization.min_max)
    """How actions are scaled."""
    tokenizer: str | None = setting(None)
    """Folder of the tokenizer (tokenizer.json, or vocab.json and merges.txt), which NVIDIA publishes apart from the
    weights, in Isaac-GR00T's eagle2_hg_model. null: it is in the checkpoint's folder."""
    prompt_length: int | None = setting(None, low=1)
    """Tokens that every prompt is filled up to, pictures included. The model looks at padding, too, so this changes
    what it does. null: what a saved policy had, else the longest prompt of the simulator's tasks."""
    listed_task: bool = setting(False)
    """Write the task as LeRobot does, ['pick up the bowl'], with brackets and quotation marks."""
    padding: Padding = setting(Padding.left)
    """left: fill up before the prompt with the tokenizer's own token for it, as Isaac-GR00T does. right: behind it with
    token 0. RLinf fills up on the left to the longest prompt of a batch, and then on the right to 570 tokens: that is
    right with `prompt_length: 570` where all prompts in the batch are equally long."""
    center_crop: bool = setting(False)
    """Cut off the picture's border (2.5 % at each side), as Isaac-GR00T and RLinf do."""
    interpolation: Interpolation = setting(Interpolation.bilinear)
    """How pictures are resized. bilinear: as Isaac-GR00T and RLinf do, who cut off to whole grey levels. bicubic: as
    LeRobot does, which rounds."""
    freeze_vision: bool = setting(False)
    """Leave the vision tower and the layer behind it as they are."""
    freeze_language: bool = setting(False)
    """Leave the language model as it is, as NVIDIA's training does."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    """Shape of the model where `checkpoint` is null."""
