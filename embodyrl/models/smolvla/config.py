"""Options of SmolVLA, and the architecture in a checkpoint's config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from embodyrl.config.schema import setting
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import FlowConfig
from embodyrl.models.lerobot import VISION, check_type, refuse_unknown, section
from embodyrl.models.vla.config import Frozen, StackSizes, StateInput
from embodyrl.models.vla.folder import check_real, check_whole, damaged


@dataclass(frozen=True, kw_only=True)
class ScratchConfig:
    """Sizes of a model with random weights; a checkpoint has its own."""

    image_size: int = setting(64, low=16)
    """Side of the square input images [pixels]."""
    patch_size: int = setting(16, low=4)
    """Side of a patch [pixels]; the image's side must be a multiple."""
    shuffle: int = setting(1, low=1)
    """Side of the square of patches that become one image token; the image's side in patches must be a multiple."""
    vision_size: int = setting(64, low=8)
    """Width of the vision transformer."""
    vision_layers: int = setting(4, low=1)
    """Layers of the vision transformer."""
    hidden_size: int = setting(64, low=8)
    """Width of the language model."""
    layers: int = setting(4, low=1)
    """Layers of the language model, and of the action expert."""
    heads: int = setting(4, low=1)
    """Attention heads of each."""
    mlp_ratio: float = setting(3.0, above=0.0)
    """Widths of feed-forward layers of vision transformer and language model, in widths of their transformer."""
    expert_width: float = setting(0.75, above=0.0)
    """Width of the action expert, in widths of the language model. Its feed-forward layers have a multiple of 256."""
    self_attention_every: int = setting(2, low=0)
    """Every how many layers actions attend to each other, beginning with the first. 0: never."""


@dataclass(frozen=True, kw_only=True)
class SmolVLAConfig(FlowConfig):
    """A small vision-language model and an action expert that reads its keys and values."""

    statistics: str | None = setting(None)
    """File of statistics that normalise states and actions: a LeRobotDataset's meta/stats.json, or a LeRobot policy's
    ..normalizer_processor.safetensors. null: those in the checkpoint's folder; a model with random weights takes the
    simulator's ranges."""
    vlm: str | None = setting(None)
    """Folder of the vision-language model that the checkpoint was made from, with config.json (its sizes) and
    tokenizer.json; its weights are not read. null: the folder `vlm` of the checkpoint."""
    state: StateInput = setting(StateInput.token)
    """token: the robot's state is a token behind the task description. none: the token is that of the mean state."""
    prompt_length: int | None = setting(None, low=1)
    """Tokens of a task description, with padding, in rollouts and learning alike; longer ones are errors. null: as in
    the checkpoint."""
    cameras: list[str] = setting([])
    """Which of env.cameras each image of the checkpoint shows, in its order; `absent` for an image without a camera.
    []: env.cameras, in their order."""
    horizon: int | None = setting(None, low=1)
    """Actions that are denoised, at least rollout.chunk_size. Actions depend on earlier ones only, so more change no
    action that is executed. null: rollout.chunk_size."""
    frozen: Frozen = setting(Frozen.language)
    """language: vision and language are not trained, as in the published training; rollouts then keep what the vision
    tower makes of images instead of the images, and learning does not run it. vision: the vision tower is not trained.
    A model with random weights has to learn them once: nothing."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    """Shape of the model where `checkpoint` is null."""


# --------------------------------------------------------------------------------------------------------- architecture

VLM_500M: Mapping[str, Any] = {
    "scale_factor": 4,
    "pad_token_id": 2,
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "text_config": {
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 49280,
        "hidden_act": "silu",
    },
}
"""The parts of the config.json of SmolVLM2-500M that are read."""
NAMES_500M = ("SmolVLM2-500M-Video-Instruct", "SmolVLM2-500M-Instruct")
"""Models with these sizes, as `vlm_model_name` ends."""
DEFAULTS: Mapping[str, Any] = {
    "type": "smolvla",
    "vlm_model_name": f"HuggingFaceTB/{NAMES_500M[0]}",
    "num_vlm_layers": 16,
    "num_expert_layers": 0,
    "self_attn_every_n_layers": 2,
    "attention_mode": "cross_attn",
    "expert_width_multiplier": 0.75,
    "chunk_size": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "tokenizer_max_length": 48,
    "pad_language_to": "longest",
    "empty_cameras": 0,
    "add_image_special_tokens": False,
    "min_period": 0.004,
    "max_period": 4.0,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
}
"""What LeRobot takes for entries that a config.json does not have."""
EMPTY = "empty_camera_"
"""Beginning of the names of images that no camera ever shows."""
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n_obs_steps": (1,),
    "adapt_to_pi_aloha": (False,),
    "use_delta_joint_actions_aloha": (False,),
    "attention_mode": ("cross_attn", "self_attn"),
    "pad_language_to": ("max_length", "longest"),
}
"""Entries of config.json with the values that this implementation has."""


@dataclass(frozen=True, kw_only=True)
class VisionSizes:
    """Shape of the vision tower and of the connector."""

    width: int
    layers: int
    heads: int
    mlp: int
    image_size: int
    """[pixels]"""
    patch_size: int
    """[pixels]"""
    shuffle: int
    """Side of the square of patches that become one token."""
    epsilon: float

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return (self.image_size // self.patch_size // self.shuffle) ** 2


@dataclass(frozen=True, kw_only=True)
class LlamaSizes(StackSizes):
    """Shape of the language model or of the action expert."""

    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Everything that determines shapes and connections of the network."""

    vision: VisionSizes
    language: LlamaSizes
    expert: LlamaSizes
    crosses: tuple[bool, ...]
    """For each layer: whether actions attend to the language model only (True), or to each other as well."""
    vocabulary: int
    state_dim: int
    """Size of a state, with padding."""
    action_dim: int
    """`A`"""
    horizon: int
    """`H`"""
    prompt_length: int
    """Most tokens of a task description."""
    pads_to_longest: bool
    """Whether task descriptions are padded to the longest of them; else to `prompt_length`."""
    periods: tuple[float, float]
    """Shortest and longest period of the embedding of times."""
    images: tuple[str, ...]
    """Names of the images that cameras show, in their order."""
    marked_blanks: int
    """Images that no camera shows, whose markers are read all the same; 0 without markers."""
    markers: tuple[int, int] | None
    """Ids of the tokens in front of each image (the first of them also behind it); None: none."""
    pad_token: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], vlm: VLM) -> Architecture:
        """Read LeRobot's config.json, filled up with `DEFAULTS`, and what is known of the vision-language model.

        Raises:
            PolicyError: the file is that of another model, is damaged, or asks for what is not implemented.
        """
        check_type(config, "smolvla")
        refuse_unknown(config, REFUSED)
        if config["add_image_special_tokens"] not in (True, False):
            raise damaged("add_image_special_tokens", config["add_image_special_tokens"], "true or false")
        language, vision = _language(vlm.config), _vision(config, vlm.config)
        layers = _layers(config, vlm.config)
        every = _number(config, "self_attn_every_n_layers", least=None)
        alone = config["attention_mode"] == "self_attn"
        marks = config["add_image_special_tokens"]
        empty = _number(config, "empty_cameras", least=0)
        return cls(
            vision=vision,
            language=language,
            expert=_expert(language, config["expert_width_multiplier"]),
            crosses=tuple(not alone and not (every > 0 and number % every == 0) for number in range(layers)),
            vocabulary=_size(section(vlm.config, "text_config"), "text_config.vocab_size"),
            state_dim=_number(config, "max_state_dim"),
            action_dim=_number(config, "max_action_dim"),
            horizon=_number(config, "chunk_size"),
            prompt_length=_number(config, "tokenizer_max_length"),
            pads_to_longest=config["pad_language_to"] == "longest",
            periods=(_real(config, "min_period"), _real(config, "max_period")),
            images=_images(config),
            marked_blanks=empty if marks else 0,
            markers=vlm.markers if marks else None,
            pad_token=vlm.pad_token,
        )


@dataclass(frozen=True, kw_only=True)
class VLM:
    """What is known of the vision-language model that a checkpoint was made from."""

    config: Mapping[str, Any]
    """Its config.json."""
    markers: tuple[int, int] | None
    """Ids of its tokens `<fake_token_around_image>` and `<global-img>`; None: it has none."""
    pad_token: int
    """Id of the token that fills up task descriptions."""


def _layers(config: Mapping[str, Any], vlm: Mapping[str, Any]) -> int:
    """Return the number of layers of the language model that are kept; the expert has as many."""
    there = _size(section(vlm, "text_config"), "text_config.num_hidden_layers")
    wanted = _number(config, "num_vlm_layers", least=None)
    layers = wanted if wanted > 0 else there
    if layers > there:
        raise PolicyError(
            f"config.json: num_vlm_layers is {layers}, but the vision-language model has {there} layers: name its "
            "folder with model.vlm"
        )
    expert = _number(config, "num_expert_layers", least=None)
    if expert > 0 and expert != layers:
        raise PolicyError(
            f"config.json: num_expert_layers is {expert} and num_vlm_layers {layers}; an expert with another number of "
            "layers than the language model is not implemented (LeRobot's fails in most of these cases, too): take a "
            "checkpoint with num_expert_layers 0"
        )
    return layers


def _language(vlm: Mapping[str, Any]) -> LlamaSizes:
    text = section(vlm, "text_config")
    if text.get("hidden_act", "silu") != "silu":
        raise PolicyError(f"the vision-language model has hidden_act {text['hidden_act']!r}, only silu is implemented")
    width, heads = (_size(text, f"text_config.{key}") for key in ("hidden_size", "num_attention_heads"))
    kv_heads = _number(text, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise damaged("text_config.num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    return LlamaSizes(
        width=width,
        mlp=_size(text, "text_config.intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_number(text, "head_dim", width // heads),
        epsilon=_real(text, "rms_norm_eps", 1e-5),
    )


def _expert(language: LlamaSizes, multiplier: Any) -> LlamaSizes:
    """Return the sizes of the action expert, whose feed-forward layers are two thirds of four widths, rounded up to a
    multiple of 256."""
    width = int(language.width * check_real(multiplier, "expert_width_multiplier", above=0.0, below=1e3))
    if width < 2 or width % 2:
        raise PolicyError(
            f"config.json: expert_width_multiplier {multiplier} makes the action expert {width} wide, an even number "
            "was expected"
        )
    return replace(language, width=width, mlp=256 * -(-int(4 * int(2 * width / 3)) // 256))


def _vision(config: Mapping[str, Any], vlm: Mapping[str, Any]) -> VisionSizes:
    sizes = section(vlm, "vision_config")
    if sizes.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise PolicyError(
            f"the vision tower has hidden_act {sizes['hidden_act']!r}, only gelu_pytorch_tanh is implemented"
        )
    side, patch = _size(sizes, "vision_config.image_size"), _size(sizes, "vision_config.patch_size")
    shuffle = _number(vlm, "scale_factor", 2)
    if side % patch or side // patch % shuffle:
        raise damaged(
            "scale_factor",
            shuffle,
            f"a divisor of {side // patch} patches (an image has {side}, a patch {patch} pixels)",
        )
    resized = config.get("resize_imgs_with_padding", [side, side])
    if resized not in (None, [side, side], (side, side)):
        raise PolicyError(
            f"config.json: resize_imgs_with_padding is {resized!r}, but the vision tower reads images of {side} x "
            f"{side} pixels: name the folder of the right vision-language model with model.vlm"
        )
    return VisionSizes(
        width=_size(sizes, "vision_config.hidden_size"),
        layers=_size(sizes, "vision_config.num_hidden_layers"),
        heads=_size(sizes, "vision_config.num_attention_heads"),
        mlp=_size(sizes, "vision_config.intermediate_size"),
        image_size=side,
        patch_size=patch,
        shuffle=shuffle,
        epsilon=_real(sizes, "layer_norm_eps", 1e-6),
    )


def _images(config: Mapping[str, Any]) -> tuple[str, ...]:
    features = section(config, "input_features")
    names = [name for name in features if section(features, name).get("type") == VISION]
    shown = [name.rpartition(".")[2] for name in names]
    return tuple(name for name in shown if not name.startswith(EMPTY))


LARGEST = 10**6
"""Most below zero that a number may be which means "all" there."""


def _size(section: Mapping[str, Any], path: str) -> int:
    """Return a size that determines shapes, and so has no default."""
    return _number(section, path.rpartition(".")[2], path=path)


def _number(
    config: Mapping[str, Any], key: str, default: int | None = None, *, least: int | None = 1, path: str | None = None
) -> int:
    """Return the whole number under a key; `least` None: negative ones are allowed."""
    return check_whole(config.get(key, default), path or key, least=-LARGEST if least is None else least)


def _real(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return the number above 0 under a key."""
    return check_real(config.get(key, default), key, above=0.0)
