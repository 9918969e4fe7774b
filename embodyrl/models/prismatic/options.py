"""Options that OpenVLA and OpenVLA-OFT share (part of the config schema; imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from embodyrl.config.schema import ModelConfig, setting
from embodyrl.models.options import ActionUnits, WeightType


class Gripper(StrEnum):
    """What the last entry of an un-normalised action says."""

    auto = "auto"
    one_opens = "one_opens"
    simulator = "simulator"


@dataclass(frozen=True, kw_only=True)
class ScratchConfig:
    """Shape of a model that starts with random weights; a checkpoint brings its own."""

    vision: list[str] = setting(["test_vit"])
    """timm names of one or two vision transformers."""
    image_size: int = setting(64, low=16)
    """Side of the square pictures that they see [pixels]."""
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
    to read the sentence."""


@dataclass(frozen=True, kw_only=True)
class PrismaticConfig(ModelConfig):
    """A vision-language-action model that says its actions in tokens of a language model."""

    unnorm_key: str | None = setting(None)
    """Data set in the checkpoint's statistics whose ranges turn the model's numbers into actions. null: the only one
    there is."""
    adapter: str | None = setting(None)
    """Folder of a LoRA adapter, as peft writes it, to add to the weights of `checkpoint`, with the heads that learned
    beside it (`heads.safetensors`, if there are any). null: none. Checkpoints of a run have it in their weights."""
    temperature: float = setting(1.0, above=0.0)
    """Divides the logits of action tokens, in rollouts and in learning."""
    top_k: int = setting(0, low=0, high=256)
    """Sample among so many of the likeliest action tokens; 0: among all."""
    top_p: float = setting(1.0, above=0.0, high=1.0)
    """Sample among the likeliest action tokens that together have this probability."""
    center_crop: bool = setting(False)
    """Cut off the picture's border (5 % of each side's length), as public evaluations do with models that were
    fine-tuned on random crops."""
    dtype: WeightType = setting(WeightType.float32)
    """Type that weights are held in; bfloat16 halves their memory. `engine.precision` says what is computed in."""
    action_units: ActionUnits = setting(ActionUnits.simulator)
    """simulator: the model was trained on actions of this simulator. metric: its motions are in metres and radians."""
    gripper: Gripper = setting(Gripper.auto)
    """one_opens: 0 closes, 1 opens. simulator: the simulator's own numbers. auto: one_opens where the statistics leave
    the last entry of an action as it is, as those of public checkpoints do, else simulator."""
    binary_gripper: bool = setting(True)
    """Open or close fully, whichever is nearer. Without effect on a gripper in the simulator's own numbers."""
    freeze_vision: bool = setting(False)
    """Leave the vision towers as they are."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    """Shape of the model where `checkpoint` is null."""
