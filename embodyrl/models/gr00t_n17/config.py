"""Options of GR00T N1.7 and N1.6, and the architecture in the files of a checkpoint. Imports no torch."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from embodyrl.config.schema import WIDEST_LAYER, setting
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import FlowConfig
from embodyrl.models.gr00t.config import HeadSizes, Transformer, ValueInput, refuse_version
from embodyrl.models.vla.config import StateInput
from embodyrl.models.vla.folder import CONFIG, check_real, check_whole, damaged, wrong

# -------------------------------------------------------------------------------------------------------------- options


QWEN_DEVIATION = 0.02
"""Standard deviation of the first weights of Qwen3."""


class Continuation(StrEnum):
    """How real-time chunking makes a chunk go on from the one before."""

    guided = "guided"
    blended = "blended"


@dataclass(frozen=True, kw_only=True)
class ScratchConfig:
    """Sizes of a model with random weights; a checkpoint has its own."""

    image_size: int = setting(64, low=8)
    """Shorter side of the images that the model sees [pixels]; a multiple of 2 * patch_size."""
    patch_size: int = setting(8, low=2)
    """Side of a patch [pixels]; a square of four patches becomes one token."""
    vision_size: int = setting(64, low=8)
    """Width of the vision transformer."""
    vision_layers: int = setting(3, low=1)
    """Its layers."""
    hidden_size: int = setting(64, low=8)
    """Width of the language model, and of the self-attention after it."""
    layers: int = setting(2, low=1)
    """Layers of the language model."""
    self_attention_layers: int = setting(1, low=0)
    """Layers of the self-attention after the language model; 0: there is none, as in N1.6."""
    action_size: int = setting(64, low=8)
    """Width of the diffusion transformer, of its output and of the networks around it."""
    action_layers: int = setting(6, low=1)
    """Layers of the diffusion transformer. Of the first, third, fifth ... each attends to the task description and
    special tokens, or to images; the others to actions."""
    text_every: int = setting(2, low=1)
    """Of these first, third, fifth ... layers one in so many attends to the task description, beginning with the first;
    the others to images."""
    heads: int = setting(4, low=1)
    """Attention heads of every part."""
    action_horizon: int | None = setting(None, low=1)
    """Actions that are denoised together. null: as many as are executed (`rollout.chunk_size`)."""
    initializer_range: float = setting(QWEN_DEVIATION, above=0.0, high=1.0)
    """Standard deviation of the first weights of the language model."""


@dataclass(frozen=True, kw_only=True)
class Gr00tN17Config(FlowConfig):
    """GR00T N1.7 and N1.6: a vision-language model, and a diffusion transformer that denoises a chunk of actions, in
    turn attending to the task description and to images."""

    denoising_steps: int = setting(4, low=1, high=100)
    """Steps from noise to actions, in rollouts, evaluation and learning alike."""
    value_sizes: list[int] = setting([1024, 512, 256], low=1, high=WIDEST_LAYER)
    """Widths of the critic's hidden layers."""
    value_input: ValueInput = setting(ValueInput.vl_and_state)
    """vl: the critic reads images and task description (the mean of their tokens, without padding). vl_and_state: the
    state as well."""
    count_clipped: bool = setting(False)
    """Whether log-probabilities count numbers of actions that decoding clips. Whatever lies beyond the range of the
    statistics acts as its end does, so that noise there explores nothing. True: they count, as in RLinf."""
    rtc_method: Continuation = setting(Continuation.guided)
    """With `rtc`: guided, as all flow policies are here; blended, as in GR00T's public code: denoising begins with what
    was planned, and moves it the less the more it is held to. `rtc` is no weight then."""
    state: StateInput = setting(StateInput.token)
    """token: the network reads the robot's state. none: it gets zeros instead, so that it must see the robot; relative
    actions are added to the state all the same."""
    embodiment_tag: str | None = setting(None)
    """The robot, by the name that it has in the checkpoint's statistics. null: the only one there."""
    embodiment_id: int | None = setting(None, low=0)
    """Index of the robot's networks in the checkpoint. null: the checkpoint's own for the robot's name, else the usual
    one."""
    statistics: str | None = setting(None)
    """File with the ranges of states and actions of another robot: meta/stats.json of a LeRobotDataset, or
    statistics.json of a checkpoint. null: those of the checkpoint; without one, the simulator's range of actions."""
    vlm: str | None = setting(None)
    """Folder of the vision-language model, with config.json (its sizes), preprocessor_config.json and tokenizer.json;
    its weights are not read. NVIDIA publishes none of them with the weights. N1.7: Qwen/Qwen3-VL-2B-Instruct, or
    nvidia/Cosmos-Reason2-2B. N1.6: nvidia/Eagle-Block2A-2B-v2. null: the folder `vlm` of the checkpoint."""
    prompt_length: int | None = setting(None, low=1)
    """Tokens that every prompt is padded to, images included. Padding changes actions, so it is the same in rollouts
    and learning. null: what a saved policy had, else the longest prompt of the simulator's tasks."""
    freeze_vision: bool = setting(False)
    """Do not train the vision tower and the projections after it, as in NVIDIA's training."""
    freeze_language: bool = setting(False)
    """Do not train the language model, as in NVIDIA's training."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    """Shape of the model where `checkpoint` is null."""


@dataclass(frozen=True, kw_only=True)
class Gr00tN16Config(Gr00tN17Config):
    """GR00T N1.6: as N1.7, with another vision-language model."""


# ---------------------------------------------------------------------------------------- the vision-language models

QWEN: Mapping[str, Any] = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "depth": 24,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
}
"""The parts of the config.json of Cosmos-Reason2-2B, and of Qwen3-VL-2B, that are read."""
EAGLE: Mapping[str, Any] = {
    "model_type": "eagle_3_vl",
    "image_token_index": 151669,
    "downsample_ratio": 0.5,
    "use_pixel_shuffle": True,
    "mlp_connector_layers": 2,
    "select_layer": -1,
    "vision_config": {
        "model_type": "siglip2_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 14,
        "num_patches": 256,
        "layer_norm_eps": 1e-6,
        "use_rope": False,
        "use_windows_attn": False,
    },
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151680,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
    },
}
"""The parts of the config.json of Eagle-Block2A-2B-v2 that are read."""
VLM = "vlm"
"""Folder of the vision-language model's files in a checkpoint's."""
VLM_CONFIG = f"{VLM}/{CONFIG}"
TEXT_COUNTS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
"""Whole numbers among the sizes of a language model."""


def _section(config: Mapping[str, Any], key: str, file: str = VLM_CONFIG) -> Mapping[str, Any]:
    found = config[key]
    if not isinstance(found, Mapping):
        raise wrong(f"{file}: {key}", found, "a JSON object")
    return found


def _count(config: Mapping[str, Any], key: str, *, least: int = 1) -> int:
    return check_whole(config[key], key, least=least, file=VLM_CONFIG)


def _only(config: Mapping[str, Any], wanted: Mapping[str, Any], file: str, where: str = "") -> None:
    """Raise a `PolicyError` if an entry of a file has another value than the only one that is implemented."""
    for key, value in wanted.items():
        found = config.get(key, value)
        if found != value:
            raise PolicyError(
                f"{file}: {where}{key} is {found!r:.60}, only {value!r} is implemented", "take another checkpoint"
            )


def _text_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of transformers' Qwen3Config."""
    text = _section(config, "text_config")
    _only(text, {"attention_bias": False, "hidden_act": "silu"}, VLM_CONFIG, "text_config.")
    rope: Any = text.get("rope_parameters") or {}
    theta = rope.get("rope_theta", text.get("rope_theta")) if isinstance(rope, Mapping) else rope
    sizes: dict[str, Any] = {key: _count(text, key) for key in TEXT_COUNTS}
    sizes["rms_norm_eps"] = check_real(text["rms_norm_eps"], "rms_norm_eps", above=0.0, below=1.0, file=VLM_CONFIG)
    sizes["rope_theta"] = check_real(theta, "rope_theta", above=1.0, below=1e12, file=VLM_CONFIG)
    deviation = text.get("initializer_range", QWEN_DEVIATION)  # of no effect on weights that are read
    sizes["initializer_range"] = check_real(deviation, "initializer_range", above=0.0, below=10.0, file=VLM_CONFIG)
    return sizes


@dataclass(frozen=True, kw_only=True)
class VisionLanguage:
    """Sizes of a vision-language model."""

    text: Mapping[str, Any]
    """Arguments of transformers' Qwen3Config, for the language model before it is cut."""
    image_token: int
    """Id of the image token."""
    width: int
    """Entries of a token of the vision transformer."""
    mlp: int
    """Hidden width of its feed-forward layers."""
    layers: int
    heads: int
    patch: int
    """Side of a patch [pixels]."""
    merge: int
    """Side of the square of patches that becomes a token [patches]."""
    positions: int
    """Side of the square of learned positions [patches]."""

    @property
    def unit(self) -> int:
        """Side of the square of pixels that becomes a token."""
        return self.patch * self.merge

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the contents of the model's config.json.

        Raises:
            PolicyError: it is that of another model, or asks for what is not implemented.
            KeyError: an entry is missing.
        """


@dataclass(frozen=True, kw_only=True)
class Qwen(VisionLanguage):
    """Sizes of Qwen3-VL."""

    frames: int
    """Images that a patch spans in time; each image is repeated as often."""
    deepstack: Sequence[int]
    """Indices of the vision layers whose outputs are added to the first layers of the language model."""
    sections: Sequence[int]
    """Rotary frequencies of time, row and column."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Qwen:
        """See `VisionLanguage.from_config`."""
        _only(config, {"model_type": "qwen3_vl"}, VLM_CONFIG)
        vision, text = _section(config, "vision_config"), _text_sizes(config)
        _only(vision, {"hidden_act": "gelu_pytorch_tanh", "in_channels": 3}, VLM_CONFIG, "vision_config.")
        rope: Any = config["text_config"].get("rope_parameters") or config["text_config"].get("rope_scaling")
        if not isinstance(rope, Mapping):
            raise wrong(f"{VLM_CONFIG}: rope_scaling", rope, "a JSON object")
        _only(rope, {"mrope_interleaved": True, "rope_type": "default"}, VLM_CONFIG, "rope_scaling.")
        sections = rope.get("mrope_section", [24, 20, 20])
        if not isinstance(sections, list) or len(sections) != 3 or sum(_wholes(sections)) * 2 != text["head_dim"]:
            raise wrong(f"{VLM_CONFIG}: mrope_section", sections, "three numbers that add up to half of head_dim")
        depth, marks = _count(vision, "depth"), vision["deepstack_visual_indexes"]
        if not isinstance(marks, list) or any(mark >= depth for mark in _wholes(marks)):
            raise wrong(f"{VLM_CONFIG}: deepstack_visual_indexes", marks, f"indices of {depth} layers")
        if _count(vision, "out_hidden_size") != text["hidden_size"]:
            raise wrong(f"{VLM_CONFIG}: out_hidden_size", vision["out_hidden_size"], f"{text['hidden_size']}")
        return cls(
            text=text,
            image_token=_count(config, "image_token_id", least=0),
            width=_count(vision, "hidden_size"),
            mlp=_count(vision, "intermediate_size"),
            layers=depth,
            heads=_heads(vision, "num_heads"),
            patch=_count(vision, "patch_size"),
            merge=_count(vision, "spatial_merge_size"),
            positions=_side(_count(vision, "num_position_embeddings"), "num_position_embeddings"),
            frames=_count(vision, "temporal_patch_size"),
            deepstack=tuple(marks),
            sections=tuple(sections),
        )


@dataclass(frozen=True, kw_only=True)
class Eagle(VisionLanguage):
    """Sizes of Eagle 3."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Eagle:
        """See `VisionLanguage.from_config`."""
        same = ("model_type", "use_pixel_shuffle", "mlp_connector_layers", "select_layer")
        _only(config, {key: EAGLE[key] for key in same}, VLM_CONFIG)
        vision = _section(config, "vision_config")
        only = {key: EAGLE["vision_config"][key] for key in ("model_type", "use_rope", "use_windows_attn")}
        only |= {"hidden_act": "gelu_pytorch_tanh", "num_channels": 3, "layer_norm_eps": 1e-6}
        _only(vision, only, VLM_CONFIG, "vision_config.")
        ratio = check_real(config["downsample_ratio"], "downsample_ratio", above=0.0, below=1.0001, file=VLM_CONFIG)
        if round(1 / ratio) * ratio != 1.0:
            raise wrong(f"{VLM_CONFIG}: downsample_ratio", ratio, "one divided by a whole number")
        return cls(
            text=_text_sizes(config),
            image_token=_count(config, "image_token_index", least=0),
            width=_count(vision, "hidden_size"),
            mlp=_count(vision, "intermediate_size"),
            layers=_count(vision, "num_hidden_layers"),
            heads=_heads(vision, "num_attention_heads"),
            patch=_count(vision, "patch_size"),
            merge=round(1 / ratio),
            positions=_side(_count(vision, "num_patches"), "num_patches"),
        )


def _wholes(found: Sequence[Any]) -> list[int]:
    return [check_whole(number, "entry", least=0, file=VLM_CONFIG) for number in found]


def _heads(vision: Mapping[str, Any], key: str) -> int:
    heads, width = _count(vision, key), _count(vision, "hidden_size")
    if width % (4 * heads):
        raise wrong(f"{VLM_CONFIG}: vision_config.{key}", heads, f"a number that splits {width} into multiples of four")
    return heads


def _side(count: int, key: str) -> int:
    side = math.isqrt(count)
    if side * side != count:
        raise wrong(f"{VLM_CONFIG}: vision_config.{key}", count, "the square of a whole number")
    return side


# --------------------------------------------------------------------------------------------------------- architecture


@dataclass(frozen=True, kw_only=True)
class Version:
    """What distinguishes the versions of GR00T that this package reads."""

    name: str
    """As people call it."""
    model_type: str
    """`model_type` in NVIDIA's config.json."""
    vlm: type[VisionLanguage]
    """Its vision-language model."""
    published: Mapping[str, Any]
    """config.json of the published vision-language model."""
    home: str
    """Where that model's tokenizer is published."""
    final_norm: bool
    """Whether the language model's last norm is applied."""
    config: Mapping[str, Any]
    """Entries of the published config.json that differ between versions."""

    @property
    def remedy(self) -> str:
        """What to do where the vision-language model's files are missing, or those of another model."""
        files = (
            "config.json and tokenizer.json"
            if self is N16
            else "config.json, preprocessor_config.json and tokenizer.json"
        )
        return f"set model.vlm to the folder of {self.home}, with {files}"


N17 = Version(
    name="GR00T N1.7",
    model_type="Gr00tN1d7",
    vlm=Qwen,
    published=QWEN,
    home="Qwen/Qwen3-VL-2B-Instruct",
    final_norm=False,
    config={
        "model_name": "nvidia/Cosmos-Reason2-2B",
        "backbone_model_type": "qwen",
        "max_state_dim": 132,
        "max_action_dim": 132,
        "action_horizon": 40,
        "vl_self_attention_cfg": {
            "num_layers": 4,
            "num_attention_heads": 32,
            "attention_head_dim": 64,
            "dropout": 0.2,
            "final_dropout": True,
            "positional_embeddings": None,
        },
    },
)
N16 = Version(
    name="GR00T N1.6",
    model_type="Gr00tN1d6",
    vlm=Eagle,
    published=EAGLE,
    home="nvidia/Eagle-Block2A-2B-v2",
    final_norm=True,
    config={
        "model_name": "nvidia/Eagle-Block2A-2B-v2",
        "max_state_dim": 128,
        "max_action_dim": 128,
        "action_horizon": 50,
    },
)
VERSIONS = {"gr00t_n17": N17, "gr00t_n16": N16}
"""By the name of the model."""
DIT: Mapping[str, Any] = {"norm_type": "ada_norm", "interleave_self_attention": True, "positional_embeddings": None}
"""Connections of the diffusion transformer that are implemented."""
PUBLISHED_CONFIG: Mapping[str, Any] = {
    "backbone_embedding_dim": 2048,
    "select_layer": 16,
    "hidden_size": 1024,
    "input_embedding_dim": 1536,
    "add_pos_embed": True,
    "use_vlln": True,
    "max_seq_len": 1024,
    "use_alternate_vl_dit": True,
    "attend_text_every_n_blocks": 2,
    "diffusion_model_cfg": {
        **DIT,
        "num_layers": 32,
        "num_attention_heads": 32,
        "attention_head_dim": 48,
        "output_dim": 1024,
        "dropout": 0.2,
        "final_dropout": True,
    },
    "num_inference_timesteps": 4,
    "noise_beta_alpha": 1.5,
    "noise_beta_beta": 1.0,
    "noise_s": 0.999,
    "num_timestep_buckets": 1000,
    "max_num_embodiments": 32,
}
"""config.json of the published models, with `Version.config`."""
ONLY: Mapping[str, Any] = {
    "add_pos_embed": True,
    "use_vlln": True,
    "noise_beta_alpha": 1.5,
    "noise_beta_beta": 1.0,
    "reproject_vision": False,
    "exclude_state": False,
    "state_history_length": 1,
    "use_mean_std": False,
}
"""Entries of config.json with the only values that are implemented."""


def published_config(version: Version) -> dict[str, Any]:
    """Return the config.json of the published model."""
    return {
        "model_type": version.model_type,
        "architectures": [version.model_type],
        **PUBLISHED_CONFIG,
        **version.config,
    }


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and connections of every part."""

    vlm: VisionLanguage
    text_layers: int
    """Layers of the language model that are kept."""
    final_norm: bool
    """Whether the language model's last norm is applied."""
    head: HeadSizes
    action_horizon: int
    """Actions that are denoised together."""
    steps: int
    """Denoising steps of public inference."""
    buckets: int
    """Number of distinct times of the network."""
    noise_scale: float
    """Times in training are (1 - draw) * noise_scale, of draws from Beta(1.5, 1)."""

    @property
    def width(self) -> int:
        """Entries of a token of images and task description."""
        return self.head.width

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], vlm: Mapping[str, Any], version: Version, vlm_file: str = VLM_CONFIG
    ) -> Architecture:
        """Read the contents of config.json and of the vision-language model's own.

        Args:
            config: contents of config.json.
            vlm: contents of the vision-language model's.
            version: of GR00T.
            vlm_file: where `vlm` is from, for messages.

        Raises:
            PolicyError: an entry is missing, or asks for what is not implemented.
        """
        check_model(config, version)
        file = CONFIG
        try:
            _only(config, ONLY, CONFIG)
            head = _head_sizes(config)
            horizon = _size(config, "action_horizon")
            if horizon > head.max_positions:
                raise damaged("action_horizon", horizon, f"at most max_seq_len, {head.max_positions}")
            layers = _size(config, "select_layer")
            file = vlm_file
            try:
                backbone = version.vlm.from_config(vlm)
            except PolicyError as error:
                raise PolicyError(error.message, version.remedy) from error
            if backbone.text["hidden_size"] != head.width:
                raise PolicyError(
                    f"{CONFIG} is made for a vision-language model of width {head.width} (backbone_embedding_dim), "
                    f"that of {vlm_file} has width {backbone.text['hidden_size']}",
                    version.remedy,
                )
            file = CONFIG
            if layers > backbone.text["num_hidden_layers"]:
                raise damaged("select_layer", layers, f"at most {backbone.text['num_hidden_layers']}, those there are")
            return cls(
                vlm=backbone,
                text_layers=layers,
                final_norm=version.final_norm,
                head=head,
                action_horizon=horizon,
                steps=_size(config, "num_inference_timesteps"),
                buckets=_size(config, "num_timestep_buckets"),
                noise_scale=check_real(config["noise_s"], "noise_s", above=0.0, below=1.0001),
            )
        except KeyError as error:
            raise PolicyError(f"{file} has no {error.args[0]!r}: it is not that of {version.name}") from error


def _size(config: Mapping[str, Any], key: str, *, least: int = 1) -> int:
    return check_whole(config[key], key, least=least)


def _head_sizes(config: Mapping[str, Any]) -> HeadSizes:
    dit = _section(config, "diffusion_model_cfg", CONFIG)
    _only(dit, DIT, CONFIG, "diffusion_model_cfg.")
    sizes, width = _transformer(dit), _size(config, "backbone_embedding_dim")
    for key, value, wanted in (
        ("input_embedding_dim", config["input_embedding_dim"], sizes.width),
        ("diffusion_model_cfg.cross_attention_dim", dit.get("cross_attention_dim", width), width),
    ):
        if value != wanted:
            raise damaged(key, value, f"{wanted}, as the other widths there say,")
    attention = config.get("vl_self_attention_cfg")
    own = None
    if attention is not None and attention != {}:
        attention = _section(config, "vl_self_attention_cfg", CONFIG)
        _only(attention, {"positional_embeddings": None}, CONFIG, "vl_self_attention_cfg.")
        own = _transformer(attention) if attention["num_layers"] != 0 else None
        if own is not None and own.width != width:
            raise damaged("vl_self_attention_cfg", dict(attention), f"heads with {width} entries together")
    alternates = config["use_alternate_vl_dit"]
    if not isinstance(alternates, bool):
        raise damaged("use_alternate_vl_dit", alternates, "true or false")
    return HeadSizes(
        width=width,
        vl_self_attention=own,
        dit=sizes,
        dit_outputs=check_whole(dit["output_dim"], "diffusion_model_cfg.output_dim"),
        text_every=_size(config, "attend_text_every_n_blocks") if alternates else None,
        hidden=_size(config, "hidden_size"),
        max_state_dim=_size(config, "max_state_dim"),
        max_action_dim=_size(config, "max_action_dim"),
        future_tokens=0,
        embodiments=_size(config, "max_num_embodiments"),
        max_positions=_size(config, "max_seq_len"),
    )


def _transformer(config: Mapping[str, Any]) -> Transformer:
    keys = ("num_layers", "num_attention_heads", "attention_head_dim")
    return Transformer(*(check_whole(config[key], key) for key in keys))


def check_model(config: Mapping[str, Any], version: Version) -> None:
    """Raise a `PolicyError` for the config.json of another model."""
    written = config.get("model_type", config.get("type"))
    if written == version.model_type:
        return
    refuse_version(written, version.model_type)
    raise PolicyError(
        f"{CONFIG} is that of a {written!r:.60} model, expected {version.model_type!r}: give the folder of a "
        f"{version.name} checkpoint, or set model.name to that model"
    )
