"""Options of GR00T N1.5, and the architecture in the files of a checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from embodyrl.config.schema import WIDEST_LAYER, setting
from embodyrl.errors import did_you_mean
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import FlowConfig
from embodyrl.models.vla.config import SIGLIP_SO400M
from embodyrl.models.vla.folder import check_whole


class Normalization(StrEnum):
    """Statistics that normalise a state or an action."""

    min_max = "min_max"
    mean_std = "mean_std"


class Padding(StrEnum):
    """Side on which prompts are padded to their common length."""

    left = "left"
    right = "right"


class Interpolation(StrEnum):
    """Method of resizing images."""

    bilinear = "bilinear"
    bicubic = "bicubic"


class ValueInput(StrEnum):
    """Input of the critic."""

    vl = "vl"
    vl_and_state = "vl_and_state"


@dataclass(frozen=True, kw_only=True)
class ScratchConfig:
    """Sizes of a model with random weights; a checkpoint has its own."""

    image_size: int = setting(64, low=8)
    """Side of the square input images [pixels]."""
    patch_size: int = setting(16, low=4)
    """Side of the squares that become tokens [pixels]."""
    vision_size: int = setting(64, low=8)
    """Width of the vision transformer."""
    vision_layers: int = setting(3, low=1)
    """Its layers."""
    hidden_size: int = setting(64, low=8)
    """Width of the language model, and of the self-attention after it."""
    layers: int = setting(2, low=1)
    """Layers of the language model."""
    self_attention_layers: int = setting(1, low=1)
    """Layers of the self-attention after the language model."""
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
    value_sizes: list[int] = setting([1024, 512, 256], low=1, high=WIDEST_LAYER)
    """Widths of the critic's hidden layers."""
    value_input: ValueInput = setting(ValueInput.vl_and_state)
    """vl: the critic reads images and task description (the mean of their tokens). vl_and_state: the state as well."""
    embodiment_tag: str | None = setting(None)
    """The robot, by the name that it has in the checkpoint's statistics. null: the only one there."""
    embodiment_id: int | None = setting(None, low=0)
    """Index of the robot's networks in the checkpoint. null: the usual one for the robot's name."""
    statistics: str | None = setting(None)
    """File with the ranges of states and actions: metadata.json of Isaac-GR00T, or meta/stats.json of a LeRobotDataset,
    for a new robot. null: those of the checkpoint; without one, the simulator's range of actions."""
    video_keys: list[str] | None = setting(None)
    """The images that the checkpoint was trained with, by their names in its statistics, in the order of
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
    """Folder of the tokenizer (tokenizer.json, or vocab.json and merges.txt), which NVIDIA publishes separately from
    the weights, in Isaac-GR00T's eagle2_hg_model. null: it is in the checkpoint's folder."""
    prompt_length: int | None = setting(None, low=1)
    """Tokens that every prompt is padded to, images included. The model attends to padding, so this changes its
    actions. null: what a saved policy had, else the longest prompt of the simulator's tasks."""
    listed_task: bool = setting(False)
    """Write the task description as LeRobot does, ['pick up the bowl'], with brackets and quotation marks."""
    padding: Padding = setting(Padding.left)
    """left: pad before the prompt with the tokenizer's padding token, as Isaac-GR00T does. right: pad after it with
    token 0. RLinf pads on the left to the longest prompt of a batch, and then on the right to 570 tokens: that is
    right with `prompt_length: 570` where all prompts in the batch are equally long."""
    center_crop: bool = setting(False)
    """Cut off the image's border (2.5 % at each side), as Isaac-GR00T and RLinf do."""
    interpolation: Interpolation = setting(Interpolation.bilinear)
    """How images are resized. bilinear: as in Isaac-GR00T and RLinf, which truncate to whole grey levels. bicubic:
    as in LeRobot, which rounds."""
    freeze_vision: bool = setting(False)
    """Do not train the vision tower and the projection after it."""
    freeze_language: bool = setting(False)
    """Do not train the language model, as in NVIDIA's training."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    """Shape of the model where `checkpoint` is null."""


# --------------------------------------------------------------------------------------------------------- architecture

MODEL_TYPE = "gr00t_n1_5"
LEROBOT_TYPE, LEROBOT_PREFIX = "groot", "_groot_model."
"""`type` in LeRobot's config.json, which has no sizes, and the beginning of names of weights in its files."""
SUPPORTED: dict[str, dict[str, Any]] = {
    "backbone_cfg": {"project_to_dim": None, "reproject_vision": False},
    "action_head_cfg": {"add_pos_embed": True, "use_vlln": True, "noise_beta_alpha": 1.5, "noise_beta_beta": 1.0},
    "diffusion_model_cfg": {"norm_type": "ada_norm", "interleave_self_attention": True, "positional_embeddings": None},
    "vl_self_attention_cfg": {"positional_embeddings": None},
}
"""The only supported values of these entries of config.json."""


def _published_vision() -> dict[str, Any]:
    return {**SIGLIP_SO400M, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}


def _published_text() -> dict[str, Any]:
    return {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151680,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }


TEXT_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
"""Whole numbers among the sizes of the language model."""


@dataclass(frozen=True)
class Transformer:
    """Sizes of a stack of attention blocks."""

    layers: int
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Entries of a token."""
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Sizes and connections of the action head, which N1.5, N1.6 and N1.7 share."""

    width: int
    """Entries of a token of images and task description."""
    vl_self_attention: Transformer | None
    """Self-attention over the tokens of images and task description, before actions attend to them; None: there is
    none."""
    dit: Transformer
    """The diffusion transformer that denoises actions."""
    dit_outputs: int
    """Entries of one of its output tokens."""
    text_every: int | None
    """Every how many cross-attentions one attends to the task description, the first one being such; all others attend
    to images, and none to padding. None: each attends to all tokens, padding included."""
    hidden: int
    """Hidden width of the small networks of each robot."""
    max_state_dim: int
    """Numbers in a state, padding included."""
    max_action_dim: int
    """Numbers in an action, padding included."""
    future_tokens: int
    """Learned tokens between state and actions."""
    embodiments: int
    """Robots that have networks of their own."""
    max_positions: int
    """Rows of the table of action positions."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of every part; the defaults are those of the published GR00T-N1.5-3B."""

    vision: Mapping[str, Any] = field(default_factory=_published_vision)
    """Arguments of transformers' SiglipVisionConfig."""
    text: Mapping[str, Any] = field(default_factory=_published_text)
    """Arguments of transformers' Qwen3Config, for the language model before it is cut."""
    text_layers: int = 12
    """Layers of the language model that are kept."""
    image_token: int = 151669
    """Id of the image token."""
    vl_self_attention: Transformer = Transformer(layers=4, heads=32, head_dim=64)
    """Self-attention over the tokens of images and task description, before actions attend to them."""
    dit: Transformer = Transformer(layers=16, heads=32, head_dim=48)
    """The diffusion transformer that denoises actions."""
    dit_outputs: int = 1024
    """Entries of one of its output tokens."""
    hidden: int = 1024
    """Hidden width of the small networks of each robot."""
    max_state_dim: int = 64
    """Numbers in a state, padding included."""
    max_action_dim: int = 32
    """Numbers in an action, padding included."""
    action_horizon: int = 16
    """Actions that are denoised together."""
    future_tokens: int = 32
    """Learned tokens between state and actions."""
    embodiments: int = 32
    """Robots that have networks of their own."""
    max_positions: int = 1024
    """Rows of the table of action positions."""
    steps: int = 4
    """Denoising steps of public inference."""
    buckets: int = 1000
    """Number of distinct times of the network."""
    noise_scale: float = 0.999
    """Times in training are (noise_scale - draw) / noise_scale, of draws from Beta(1.5, 1)."""

    def __post_init__(self) -> None:
        for name, found in vars(self).items():
            if name in ("vision", "text", "vl_self_attention", "dit", "noise_scale"):
                continue
            check_whole(found, name, least=int(name != "image_token"))
        for part, sizes, keys in (
            ("vision_config", self.vision, SIGLIP_SO400M),
            ("text_config", self.text, TEXT_SIZES),
        ):
            for key in keys:
                check_whole(sizes[key], f"{part}.{key}", file="eagle2_hg_model/config.json")
        if isinstance(self.noise_scale, bool) or not isinstance(self.noise_scale, int | float):
            raise PolicyError(f"config.json: noise_s is {self.noise_scale!r:.60}, a number was expected")

    @property
    def width(self) -> int:
        """Entries of a token of images and task description."""
        size: int = self.text["hidden_size"]
        return size

    @property
    def head(self) -> HeadSizes:
        """Sizes of the action head."""
        return HeadSizes(
            width=self.width,
            vl_self_attention=self.vl_self_attention,
            dit=self.dit,
            dit_outputs=self.dit_outputs,
            text_every=None,
            hidden=self.hidden,
            max_state_dim=self.max_state_dim,
            max_action_dim=self.max_action_dim,
            future_tokens=self.future_tokens,
            embodiments=self.embodiments,
            max_positions=self.max_positions,
        )

    @property
    def image_tokens(self) -> int:
        """Tokens of one image."""
        count: int = (self.vision["image_size"] // self.vision["patch_size"]) ** 2
        return count

    @classmethod
    def from_config(cls, config: Mapping[str, Any], eagle: Mapping[str, Any] | None) -> Architecture:
        """Read the contents of config.json and, where the checkpoint has it, of the vision-language model's own.

        Raises:
            PolicyError: an entry is missing, or has an unsupported value.
        """
        check_model(config)
        try:
            backbone, head = config["backbone_cfg"], config["action_head_cfg"]
            dit, self_attention = head["diffusion_model_cfg"], head["vl_self_attention_cfg"]
            sections = {"diffusion_model_cfg": dit, "vl_self_attention_cfg": self_attention} | dict(config)
            _check_supported(sections)
            return cls(
                **({} if eagle is None else _eagle_sizes(eagle)),
                text_layers=backbone["select_layer"],
                vl_self_attention=_transformer(self_attention),
                dit=_transformer(dit),
                dit_outputs=dit["output_dim"],
                hidden=head["hidden_size"],
                max_state_dim=head["max_state_dim"],
                max_action_dim=head["max_action_dim"],
                action_horizon=head["action_horizon"],
                future_tokens=head["num_target_vision_tokens"],
                embodiments=head.get("max_num_embodiments", cls.embodiments),
                max_positions=head.get("max_seq_len", cls.max_positions),
                steps=head["num_inference_timesteps"],
                buckets=head["num_timestep_buckets"],
                noise_scale=head["noise_s"],
            )
        except KeyError as error:
            raise PolicyError(f"config.json has no {error.args[0]!r}: it is not that of GR00T N1.5") from error
        except TypeError as error:
            raise PolicyError(f"config.json is damaged ({error})", "download it again") from error

    def to_config(self) -> dict[str, Any]:
        """Return the contents of config.json; with `to_eagle_config`, the inverse of `from_config`."""
        dit: dict[str, Any] = {"dropout": 0.2, "final_dropout": True, **SUPPORTED["diffusion_model_cfg"]}
        self_attention: dict[str, Any] = {"dropout": 0.2, "final_dropout": True, **SUPPORTED["vl_self_attention_cfg"]}
        head = {
            **SUPPORTED["action_head_cfg"],
            "action_dim": self.max_action_dim,
            "action_horizon": self.action_horizon,
            "backbone_embedding_dim": self.width,
            "diffusion_model_cfg": dit
            | {"cross_attention_dim": self.width, "output_dim": self.dit_outputs, **_sizes(self.dit)},
            "hidden_size": self.hidden,
            "input_embedding_dim": self.dit.width,
            "max_action_dim": self.max_action_dim,
            "max_num_embodiments": self.embodiments,
            "max_seq_len": self.max_positions,
            "max_state_dim": self.max_state_dim,
            "noise_s": self.noise_scale,
            "num_inference_timesteps": self.steps,
            "num_target_vision_tokens": self.future_tokens,
            "num_timestep_buckets": self.buckets,
            "vl_self_attention_cfg": self_attention | _sizes(self.vl_self_attention),
        }
        return {
            "model_type": MODEL_TYPE,
            "architectures": ["GR00T_N1_5"],
            "action_dim": self.max_action_dim,
            "action_horizon": self.action_horizon,
            "hidden_size": self.width,
            "backbone_cfg": {**SUPPORTED["backbone_cfg"], "select_layer": self.text_layers},
            "action_head_cfg": head,
        }

    def to_eagle_config(self) -> dict[str, Any]:
        """Return the contents of the vision-language model's config.json."""
        return {
            "model_type": "eagle_2_5_vl",
            "image_token_index": self.image_token,
            "use_pixel_shuffle": False,
            "text_config": {"model_type": "qwen3", **self.text},
            "vision_config": {"model_type": "siglip_vision_model", **self.vision},
        }


VERSIONS: Mapping[str, tuple[str, str, str]] = {
    MODEL_TYPE: ("N1.5", "gr00t", "backbone.eagle_model."),
    "Gr00tN1d6": ("N1.6", "gr00t_n16", "backbone.model.vision_model."),
    "Gr00tN1d7": ("N1.7", "gr00t_n17", "backbone.model.model.visual."),
}
"""Versions of GR00T by `model_type` in config.json: name, model that reads it, beginning of names of weights."""


def refuse_version(written: object, mine: str) -> None:
    """Raise a `PolicyError` if `model_type` in a config.json is that of another version of GR00T than `mine`."""
    if isinstance(written, str) and written in VERSIONS and written != mine:
        name, model, _ = VERSIONS[written]
        raise PolicyError(
            f"config.json is that of GR00T {name} (model_type {written!r}), expected {VERSIONS[mine][0]}",
            f"set model.name to {model}",
        )


def refuse_weights(names: Iterable[str], mine: str, prefix: str = "") -> None:
    """Raise a `PolicyError` if a checkpoint's weights are those of another version of GR00T.

    Args:
        names: of its weights.
        mine: `model_type` of the expected version.
        prefix: that names may begin with.
    """
    found = {each for each in VERSIONS for name in names if name.removeprefix(prefix).startswith(VERSIONS[each][2])}
    if found and mine not in found:
        name, model, start = VERSIONS[min(found)]
        raise PolicyError(
            f"the weights are those of GR00T {name} ({start}..), expected {VERSIONS[mine][0]}",
            f"set model.name to {model}",
        )


def check_model(config: Mapping[str, Any]) -> None:
    """Raise `PolicyError` for the config.json of another model."""
    written = config.get("model_type", config.get("type"))
    refuse_version(written, MODEL_TYPE)
    if written != MODEL_TYPE:
        raise PolicyError(
            f"config.json is that of a {written!r} model, expected {MODEL_TYPE!r}: give the folder of a GR00T N1.5 "
            "checkpoint, or set model.name to that model"
        )


def _check_supported(config: Mapping[str, Any]) -> None:
    for section, wanted in SUPPORTED.items():
        for key, value in wanted.items():
            if not isinstance(config[section], Mapping):
                raise PolicyError(f"config.json: {section} is no JSON object", "download it again")
            found = config[section].get(key, value)
            if found != value:
                raise PolicyError(f"config.json: {section}.{key} is {found!r}, only {value!r} is supported")


def _eagle_sizes(eagle: Mapping[str, Any]) -> dict[str, Any]:
    if eagle.get("use_pixel_shuffle"):
        raise PolicyError("eagle2_hg_model/config.json: use_pixel_shuffle is true, only false is supported")
    published = {"vision": _published_vision(), "text": _published_text()}
    for needed in ("vision_config", "text_config", "image_token_index"):
        if needed not in eagle:
            raise PolicyError(f"eagle2_hg_model/config.json has no {needed!r}", "download it again")
    for section in ("vision_config", "text_config"):
        if not isinstance(eagle[section], Mapping):
            raise PolicyError(f"eagle2_hg_model/config.json: {section} is no JSON object", "download it again")
    sizes = {
        part: {key: eagle[f"{part}_config"].get(key, old) for key, old in published[part].items()} for part in published
    }
    return {"image_token": eagle["image_token_index"], **sizes}


def _transformer(config: Mapping[str, Any]) -> Transformer:
    keys = ("num_layers", "num_attention_heads", "attention_head_dim")
    return Transformer(*(check_whole(config[key], key) for key in keys))


def _sizes(transformer: Transformer) -> dict[str, int]:
    return {
        "num_layers": transformer.layers,
        "num_attention_heads": transformer.heads,
        "attention_head_dim": transformer.head_dim,
    }


# --------------------------------------------------------------------------------------------------------------- robots

EMBODIMENTS = {
    "new_embodiment": 31,
    "gr1": 24,
    "oxe_droid": 17,
    "agibot_genie1": 26,
    "genie1_gripper": 26,
    "libero_franka": 31,
    "isaaclab_franka": 31,
    "maniskill_widowx": 30,
}
"""Index of each robot's networks in a checkpoint: the first five as in Isaac-GR00T and LeRobot, the others as in
RLinf."""


def embodiment_number(tag: str, number: int | None, count: int, embodiments: Mapping[str, int] = EMBODIMENTS) -> int:
    """Return the robot's index in the checkpoint.

    Args:
        tag: the robot's name.
        number: index in the config; None: the index of the name, or the only one.
        count: number of robots that the checkpoint has networks for.
        embodiments: indices by name.

    Raises:
        PolicyError: the name is unknown and no index is given, or the index is out of range.
    """
    if number is None:
        number = 0 if count == 1 else embodiments.get(tag)
    if number is None:
        known = ", ".join(f"{name} {value}" for name, value in embodiments.items())
        hint = did_you_mean(tag, embodiments, lead=" - ")
        raise PolicyError(
            f"the number of embodiment {tag!r} is not known{hint} (known: {known}): set embodiment_id as well"
        )
    if not 0 <= number < count:
        raise PolicyError(
            f"embodiment_id = {number} ({tag}), but the checkpoint has networks for 0 .. {count - 1} only"
        )
    return number
