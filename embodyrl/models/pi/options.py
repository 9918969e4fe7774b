"""Options of pi0 and pi0.5 (part of the config schema; imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from embodyrl.config.schema import setting
from embodyrl.models.flow.options import FlowConfig


class Normalization(StrEnum):
    """What of the data set's statistics states and actions are normalised by."""

    zscore = "zscore"
    quantile = "quantile"


class Frozen(StrEnum):
    """Which part of the network learns nothing."""

    nothing = "nothing"
    vision = "vision"
    language = "language"


class StateInput(StrEnum):
    """How the model sees the robot's state."""

    token = "token"
    prompt = "prompt"
    none = "none"


class DenoisingTimes(StrEnum):
    """How the times between noise (1) and actions (0) are computed."""

    summed = "summed"
    divided = "divided"


class ValueFrom(StrEnum):
    """What the critic looks at."""

    expert = "expert"
    prefix = "prefix"


@dataclass(frozen=True, kw_only=True)
class ScratchConfig:
    """Shape of a model that starts with random weights; a checkpoint brings its own."""

    image_size: int = setting(64, low=16)
    """Side of the square pictures that it sees [pixels]."""
    patch_size: int = setting(16, low=4)
    """Side of a picture token [pixels]; the picture's side must be a multiple."""
    vision_size: int = setting(64, low=8)
    """Width of the vision transformer."""
    hidden_size: int = setting(64, low=8)
    """Width of the language model."""
    expert_size: int = setting(64, low=8)
    """Width of the action expert."""
    layers: int = setting(4, low=1)
    """Layers of each of the three."""
    heads: int = setting(4, low=1)
    """Attention heads of each."""
    mlp_ratio: float = setting(3.0, above=0.0)
    """Widths of feed-forward layers, in widths of their transformer."""


@dataclass(frozen=True, kw_only=True)
class PiConfig(FlowConfig):
    """A vision-language model and an action expert."""

    unnorm_key: str | None = setting(None)
    """Data set whose statistics normalise states and actions. null: the only one there is."""
    statistics: str | None = setting(None)
    """File of statistics: openpi's norm_stats.json, or a LeRobotDataset's meta/stats.json. null: those that lie in the
    checkpoint's folder; a model that starts with random weights takes the simulator's ranges."""
    tokenizer: str | None = setting(None)
    """PaliGemma's tokenizer.json or tokenizer.model. null: the one that lies in the checkpoint's folder."""
    normalization: Normalization = setting(Normalization.zscore)
    """zscore: by mean and standard deviation. quantile: the 1st and the 99th percentile become -1 and 1."""
    state: StateInput = setting(StateInput.token)
    """token: pi0 alone, in a token of its own. prompt: pi05 alone, written into the sentence in 256 steps. none: not at
    all, as openpi's pi05_libero; a token is zeros then."""
    prompt_length: int | None = setting(None, low=1)
    """Tokens of a sentence, with padding, in rollouts and learning alike; a longer one is refused. null: as many as
    the checkpoint says."""
    denoising_times: DenoisingTimes | None = setting(None)
    """summed: -1/K is added up in float32, as openpi does. divided: 1 - i/K, as LeRobot does since 0.4.3; actions
    differ by about 1e-4. null: as the policy was saved, else by the layout of the checkpoint's weights."""
    cameras: list[str] = setting([])
    """Which of env.cameras each picture of the checkpoint shows, in its order (openpi's: base, left wrist, right
    wrist); `absent` for a picture that there is none for. []: env.cameras as they are."""
    relative_entries: int = setting(0, low=0)
    """So many first entries of an action are relative to the state at the beginning of its chunk (openpi's pi0_libero:
    6)."""
    value_from: ValueFrom = setting(ValueFrom.expert)
    """expert: the critic looks at what the action expert makes of the actions, at the random step. prefix: at what the
    language model makes of pictures and sentence, on average (RLinf's mean_token counts the padding of a sentence as
    well, which is left out here)."""
    frozen: Frozen = setting(Frozen.nothing)
    """vision: the vision tower stays as it is. language: so does the language model, and only the action expert
    learns."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    """Shape of the model where `checkpoint` is null."""


@dataclass(frozen=True, kw_only=True)
class Pi0Config(PiConfig):
    """pi0: the state is a token of its own."""


@dataclass(frozen=True, kw_only=True)
class Pi05Config(PiConfig):
    """pi0.5: the time goes into the norms of the action expert, the state into the sentence, if anywhere."""

    normalization: Normalization = setting(Normalization.quantile)
    """zscore: by mean and standard deviation. quantile: the 1st and the 99th percentile become -1 and 1."""
    state: StateInput = setting(StateInput.prompt)
    """token: pi0 alone, in a token of its own. prompt: pi05 alone, written into the sentence in 256 steps. none: not at
    all, as openpi's pi05_libero."""
    padded_state: bool | None = setting(None)
    """Whether a state in the sentence is first filled up with zeros to the model's width, as in LeRobot 0.4; openpi,
    and LeRobot since 0.5, write the robot's own numbers. null: as the policy was saved, else as LeRobot's list of steps
    in the checkpoint says; without one, false."""
