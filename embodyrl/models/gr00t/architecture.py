"""The shape of a GR00T N1.5 network, as the files of a checkpoint say it (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from embodyrl.models.errors import PolicyError

MODEL_TYPE = "gr00t_n1_5"
SUPPORTED: dict[str, dict[str, Any]] = {
    "backbone_cfg": {"project_to_dim": None, "reproject_vision": False},
    "action_head_cfg": {"add_pos_embed": True, "use_vlln": True, "noise_beta_alpha": 1.5, "noise_beta_beta": 1.0},
    "diffusion_model_cfg": {"norm_type": "ada_norm", "interleave_self_attention": True, "positional_embeddings": None},
    "vl_self_attention_cfg": {"positional_embeddings": None},
}
"""The only values that these entries of config.json may have here."""


def _published_vision() -> dict[str, Any]:
    return {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }


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


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Size of a stack of attention blocks."""

    layers: int
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Entries of a token."""
        return self.heads * self.head_dim


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
    """Id of the token that stands for a piece of a picture."""
    vl_self_attention: Transformer = Transformer(layers=4, heads=32, head_dim=64)
    """What pictures and sentence go through before actions look at them."""
    dit: Transformer = Transformer(layers=16, heads=32, head_dim=48)
    """The diffusion transformer that moves actions."""
    dit_outputs: int = 1024
    """Entries of one of its output tokens."""
    hidden: int = 1024
    """Width inside the small networks that each robot has of its own."""
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
    """Times that the network can tell apart."""
    noise_scale: float = 0.999
    """Times in training are (noise_scale - draw) / noise_scale, of draws from Beta(1.5, 1)."""

    def __post_init__(self) -> None:
        for name, found in vars(self).items():
            if name in ("vision", "text", "vl_self_attention", "dit", "noise_scale"):
                continue
            if not isinstance(found, int) or isinstance(found, bool) or found < (name != "image_token"):
                raise PolicyError(
                    f"config.json: {name} is {found!r}, expected a whole number from 1 on: download it again"
                )

    @property
    def width(self) -> int:
        """Entries of a token of pictures and sentence."""
        size: int = self.text["hidden_size"]
        return size

    @property
    def picture_tokens(self) -> int:
        """Tokens of one picture."""
        count: int = (self.vision["image_size"] // self.vision["patch_size"]) ** 2
        return count

    @classmethod
    def from_config(cls, config: Mapping[str, Any], eagle: Mapping[str, Any] | None) -> Architecture:
        """Read the contents of config.json and, where the checkpoint has it, of the vision-language model's own.

        Raises:
            PolicyError: an entry is missing, or asks for something that does not exist here.
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
            raise PolicyError(f"config.json is damaged ({error}): download it again") from error

    def to_config(self) -> dict[str, Any]:
        """Contents of config.json; the inverse of `from_config`, together with `to_eagle_config`."""
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
        """Contents of the vision-language model's config.json."""
        return {
            "model_type": "eagle_2_5_vl",
            "image_token_index": self.image_token,
            "use_pixel_shuffle": False,
            "text_config": {"model_type": "qwen3", **self.text},
            "vision_config": {"model_type": "siglip_vision_model", **self.vision},
        }


def check_model(config: Mapping[str, Any]) -> None:
    """Refuse the config.json of another model."""
    written = config.get("model_type", config.get("type"))
    if written != MODEL_TYPE:
        raise PolicyError(
            f"config.json is that of a {written!r} model, expected {MODEL_TYPE!r}: give the folder of a GR00T N1.5 "
            "checkpoint, or set model.name to that model"
        )


def _check_supported(config: Mapping[str, Any]) -> None:
    for section, wanted in SUPPORTED.items():
        for key, value in wanted.items():
            found = config[section].get(key, value)
            if found != value:
                raise PolicyError(f"config.json: {section}.{key} is {found!r}, only {value!r} is supported")


def _eagle_sizes(eagle: Mapping[str, Any]) -> dict[str, Any]:
    if eagle.get("use_pixel_shuffle"):
        raise PolicyError("eagle2_hg_model/config.json: use_pixel_shuffle is true, only false is supported")
    published = {"vision": _published_vision(), "text": _published_text()}
    for needed in ("vision_config", "text_config", "image_token_index"):
        if needed not in eagle:
            raise PolicyError(f"eagle2_hg_model/config.json has no {needed!r}: download it again")
    sizes = {
        part: {key: eagle[f"{part}_config"].get(key, old) for key, old in published[part].items()} for part in published
    }
    return {"image_token": eagle["image_token_index"], **sizes}


def _transformer(config: Mapping[str, Any]) -> Transformer:
    return Transformer(
        layers=config["num_layers"], heads=config["num_attention_heads"], head_dim=config["attention_head_dim"]
    )


def _sizes(transformer: Transformer) -> dict[str, int]:
    return {
        "num_layers": transformer.layers,
        "num_attention_heads": transformer.heads,
        "attention_head_dim": transformer.head_dim,
    }
