"""Options of pi0 and pi0.5, and the architecture in a checkpoint's config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from embodyrl.config.schema import setting
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import FlowConfig
from embodyrl.models.lerobot import check_type
from embodyrl.models.vla.config import SIGLIP_SO400M, Frozen, StackSizes
from embodyrl.models.vla.folder import check_whole


class Normalization(StrEnum):
    """Statistics of the data set that normalise states and actions, by openpi's formulas."""

    zscore = "zscore"
    quantile = "quantile"


class StateInput(StrEnum):
    """Form in which the model reads the robot's state."""

    token = "token"
    prompt = "prompt"
    none = "none"


class DenoisingTimes(StrEnum):
    """Computation of the times between noise (1) and actions (0)."""

    summed = "summed"
    divided = "divided"


class ValueFrom(StrEnum):
    """Input of the critic."""

    expert = "expert"
    prefix = "prefix"


class ReadsRobot(Protocol):
    """Options that say how states and actions are normalised."""

    @property
    def name(self) -> str:
        """Name of the model."""
        ...

    @property
    def normalization(self) -> Normalization | None:
        """See `PiConfig`."""
        ...

    @property
    def state(self) -> StateInput:
        """See `PiConfig`."""
        ...

    @property
    def relative_action_dims(self) -> int:
        """See `PiConfig`."""
        ...


class NamesStatistics(ReadsRobot, Protocol):
    """Options that also say where the statistics are from."""

    @property
    def statistics(self) -> str | None:
        """See `PiConfig`."""
        ...

    @property
    def unnorm_key(self) -> str | None:
        """See `PiConfig`."""
        ...


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
    """File of statistics: openpi's norm_stats.json, or a LeRobotDataset's meta/stats.json. null: those in the
    checkpoint's folder; a model with random weights takes the simulator's ranges."""
    tokenizer: str | None = setting(None)
    """PaliGemma's tokenizer.json or tokenizer.model. null: the one in the checkpoint's folder."""
    normalization: Normalization | None = setting(None)
    """zscore: by mean and standard deviation. quantile: the 1st and the 99th percentile become -1 and 1. null: as the
    policy was saved, else as LeRobot's files in the checkpoint say (`normalization_mapping`), else as published: zscore
    for pi0, quantile for pi05."""
    state: StateInput = setting(StateInput.token)
    """token: a separate token (pi0 only). prompt: written into the prompt in 256 bins (pi05 only).
    none: not at all, as openpi's pi05_libero; the token of pi0 is zeros then."""
    prompt_length: int | None = setting(None, low=1)
    """Tokens of a prompt, with padding, in rollouts and learning alike; longer ones are errors. null: as in the
    checkpoint."""
    denoising_times: DenoisingTimes | None = setting(None)
    """summed: -1/K is added up in float32, as openpi does. divided: 1 - i/K, as LeRobot does since 0.4.3; actions
    differ by about 1e-4. null: as the policy was saved, else by the layout of the checkpoint's weights."""
    cameras: list[str] = setting([])
    """Which of env.cameras each image of the checkpoint shows, in its order (openpi's: base, left wrist, right
    wrist); `absent` for an image without a camera. []: env.cameras, in their order."""
    relative_action_dims: int = setting(0, low=0)
    """Number of leading action dims that are relative to the state at the beginning of the chunk (openpi's pi0_libero:
    6)."""
    value_from: ValueFrom = setting(ValueFrom.expert)
    """expert: the critic reads the mean output of the action expert at the random step. prefix: the mean output of the
    language model for images and task description (RLinf's mean_token counts the padding of a task
    description as well, which is left out here)."""
    frozen: Frozen = setting(Frozen.nothing)
    """vision: the vision tower is not trained. language: neither is the language model; only the action expert is
    trained."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    """Shape of the model where `checkpoint` is null."""


@dataclass(frozen=True, kw_only=True)
class Pi0Config(PiConfig):
    """pi0: the state is a separate token."""


@dataclass(frozen=True, kw_only=True)
class Pi05Config(PiConfig):
    """pi0.5: the time goes into the norms of the action expert, the state into the task description, if anywhere."""

    state: StateInput = setting(StateInput.prompt)
    """token: a separate token (pi0 only). prompt: written into the prompt in 256 bins (pi05 only).
    none: not at all, as openpi's pi05_libero."""
    padded_state: bool | None = setting(None)
    """Whether a state in the prompt is first padded with zeros to the model's width, as in LeRobot 0.4;
    openpi, and LeRobot since 0.5, write the robot's own numbers. null: as the policy was saved, else by LeRobot's list
    of steps in the checkpoint; without one, false."""


# --------------------------------------------------------------------------------------------------------- architecture


@dataclass(frozen=True, kw_only=True)
class GemmaSizes(StackSizes):
    """Shape of a transformer."""

    layers: int


GEMMA = {
    "gemma_2b": GemmaSizes(width=2048, layers=18, mlp=16384, heads=8, kv_heads=1, head_dim=256),
    "gemma_300m": GemmaSizes(width=1024, layers=18, mlp=4096, heads=8, kv_heads=1, head_dim=256),
}
"""Sizes by their names in public files; a suffix `_lora` changes no shape."""
GEMMA_KEYS = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "mlp": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
"""Their names in config.json."""
VOCABULARY = 257152
OTHERS = {"gr00t_n1_5": "gr00t", "groot": "gr00t"}
"""Names in this package of models that have another name in their config.json."""
PUBLISHED_NORMALIZATION = {"pi0": Normalization.zscore}
"""Normalisation of models whose files do not state it, where it is not quantile as in openpi's later ones."""
PROMPT_LENGTH = {"pi0": 48, "pi05": 200}
"""Tokens of a prompt, with padding."""
IMAGES = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""Images of openpi's models."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Everything that determines the shapes of the weights."""

    adaptive: bool
    """pi0.5: time goes into the norms of the action expert, and there is no state token."""
    vision: Mapping[str, Any]
    """Sizes of SigLIP, as transformers names them."""
    language: GemmaSizes
    expert: GemmaSizes
    vocabulary: int
    expert_vocabulary: int
    """Rows of the action expert's output layer, which some public files contain; 0: not in the files."""
    state_dim: int
    """Size of a state, with padding."""
    action_dim: int
    """`A`"""
    horizon: int
    """`H`"""
    prompt_length: int
    """`L`"""
    images: tuple[str, ...]
    """Names of the images, in their order."""

    @property
    def image_size(self) -> int:
        """Side of an image [pixels]."""
        return int(self.vision["image_size"])

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any], *, expert_head: bool) -> Architecture:
        """Read a config.json by openpi (which names sizes by variant), lerobot, or with explicit sizes.

        Args:
            name: `pi0` or `pi05`.
            config: the file's contents.
            expert_head: whether the weights include the expert's output layer.

        Raises:
            PolicyError: the file is that of another model, or names unknown sizes.
        """
        written = config.get("type", config.get("model_type", name))
        check_type({"type": OTHERS.get(str(written), written)}, name)
        vlm, expert = _part(config, "vlm_config"), _part(config, "dit_config")
        text = None if vlm is None else _needed(vlm, "vlm_config", "text_config")
        vocabulary = _whole(text or {}, "vlm_config.text_config.", "vocab_size", default=VOCABULARY)
        action_dim = _whole(config, "", "max_action_dim", "action_dim", default=32)
        return cls(
            adaptive=name == "pi05",
            vision=vision_sizes(config, vlm) | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
            language=gemma_sizes(config, "paligemma_variant", "gemma_2b", text, "vlm_config.text_config."),
            expert=gemma_sizes(config, "action_expert_variant", "gemma_300m", expert, "dit_config."),
            vocabulary=vocabulary,
            expert_vocabulary=vocabulary if expert_head else 0,
            state_dim=_whole(config, "", "max_state_dim", default=action_dim),
            action_dim=action_dim,
            horizon=_whole(config, "", "chunk_size", "action_horizon", default=50),
            prompt_length=_whole(config, "", "tokenizer_max_length", "max_token_len", default=PROMPT_LENGTH[name]),
            images=image_names(config),
        )


def _part(config: Mapping[str, Any], key: str, where: str = "") -> Mapping[str, Any] | None:
    """Return a section; None if it does not exist."""
    found = config.get(key)
    if found is None or isinstance(found, Mapping):
        return found
    raise _damaged(where + key, found, "a JSON object")


def _needed(config: Mapping[str, Any], where: str, key: str) -> Mapping[str, Any]:
    """Return a section that `where` must have."""
    found = _part(config, key, f"{where}.")
    if found is None:
        raise PolicyError(
            f"config.json: {where} lacks {key} (has: {', '.join(config) or 'nothing'}): download the file again"
        )
    return found


def _whole(config: Mapping[str, Any], where: str, *keys: str, default: int | None = None, least: int = 1) -> int:
    """Return the number under the first of `keys` that exists."""
    for key in keys:
        if (found := config.get(key)) is not None:
            return check_whole(found, where + key, least=least)
    if default is None:
        raise PolicyError(
            f"config.json lacks {where}{keys[0]}, which determines the model's shape: download the file again"
        )
    return default


def _damaged(where: str, found: object, expected: str) -> PolicyError:
    return PolicyError(f"config.json: {where} is {found!r}, {expected} was expected", "download the file again")


def gemma_sizes(
    config: Mapping[str, Any], key: str, default: str, explicit: Mapping[str, Any] | None, where: str
) -> GemmaSizes:
    """Return the sizes of a Gemma.

    Args:
        config: config.json.
        key: its entry with the name of the sizes.
        default: the name where there is no such entry.
        explicit: sizes as transformers names them, which replace the name; None: there are none.
        where: place of these in config.json.

    Raises:
        PolicyError: the name is unknown, or a size is missing or impossible.
    """
    return _variant(config, key, default) if explicit is None else _sizes(explicit, where)


def _variant(config: Mapping[str, Any], key: str, default: str) -> GemmaSizes:
    name = str(config.get(key, default)).removesuffix("_lora")
    if name not in GEMMA:
        raise PolicyError(f"config.json: {key} is {name!r}, known are {', '.join(GEMMA)}")
    return GEMMA[name]


def _sizes(config: Mapping[str, Any], where: str) -> GemmaSizes:
    found = {own: _whole(config, where, public) for own, public in GEMMA_KEYS.items()}
    if found["heads"] % found["kv_heads"]:
        raise _damaged(f"{where}num_key_value_heads", found["kv_heads"], f"a divisor of {found['heads']} heads")
    return GemmaSizes(**found)


def vision_sizes(
    config: Mapping[str, Any], vlm: Mapping[str, Any] | None, where: str = "vlm_config."
) -> dict[str, Any]:
    """Return the sizes of SigLIP; config.json has the image's side separately.

    Args:
        config: config.json.
        vlm: its entry with explicit sizes, as transformers names them; None: the published ones.
        where: place of that entry.

    Raises:
        PolicyError: a size is missing or impossible.
    """
    sizes = SIGLIP_SO400M if vlm is None else _needed(vlm, where.removesuffix("."), "vision_config")
    found = {key: _whole(sizes, f"{where}vision_config.", key) for key in SIGLIP_SO400M if key != "image_size"}
    if found["hidden_size"] % found["num_attention_heads"]:
        heads = found["num_attention_heads"]
        raise _damaged(f"{where}vision_config.hidden_size", found["hidden_size"], f"a multiple of {heads} heads")
    resolution = config.get("image_resolution", [SIGLIP_SO400M["image_size"]])
    if not isinstance(resolution, list) or not resolution:
        raise _damaged("image_resolution", resolution, "a list of two sides in pixels")
    return found | {"image_size": _whole({"image_resolution[0]": resolution[0]}, "", "image_resolution[0]")}


def image_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of images: LeRobot lists them, openpi's models always have the same.

    Raises:
        PolicyError: the list is damaged.
    """
    features = _part(config, "input_features") or {}
    kinds = {name: _needed(features, "input_features", name).get("type") for name in features}
    names = [name.rsplit(".", 1)[-1] for name, kind in kinds.items() if kind == "VISUAL"]
    names += [f"empty_camera_{number}" for number in range(_whole(config, "", "empty_cameras", default=0, least=0))]
    return tuple(dict.fromkeys(names)) or IMAGES
