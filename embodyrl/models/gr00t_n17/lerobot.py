"""What processors of GR00T say, in the form in which NVIDIA writes it, and how LeRobot's steps say the same. Imports no
torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from embodyrl.models.errors import PolicyError
from embodyrl.models.gr00t_n17.geometry import Geometry
from embodyrl.models.gr00t_n17.robots import Settings, Source
from embodyrl.models.lerobot import (
    ACTION,
    POSTPROCESSOR,
    PREPROCESSOR,
    STATE,
    VISION,
    features_of,
    section,
    steps_of,
)
from embodyrl.models.saved import parse_json
from embodyrl.models.vla.folder import CONFIG, as_json, parse_statistics, wrong

PACK, ENCODE, DECODE, UNPACK = (
    *("groot_n1_7_pack_inputs", "groot_n1_7_vlm_encode", "groot_n1_7_action_decode"),
    "groot_action_unpack_unnormalize",
)
"""Beginnings of the names of LeRobot's steps."""
IMAGES = (
    *("image_crop_size", "image_target_size", "shortest_image_edge", "crop_fraction", "use_albumentations"),
    "letter_box_transform",
)
"""Settings of images."""
HORIZON = "chunk_size"
SIZES: Mapping[str, tuple[str, ...]] = {
    "action_head.state_encoder.layer1.W": ("max_num_embodiments", "max_state_dim", "hidden_size"),
    "action_head.action_encoder.W1.W": ("max_num_embodiments", "max_action_dim", "input_embedding_dim"),
    "action_head.position_embedding.weight": ("max_seq_len", "input_embedding_dim"),
    "action_head.vlln.weight": ("backbone_embedding_dim",),
}
"""Entries of NVIDIA's config.json by the weights whose shapes they are."""


@dataclass(frozen=True, kw_only=True)
class Processing:
    """What a processor's files say."""

    settings: Mapping[str, Any]
    """`processor_kwargs`."""
    statistics: Mapping[str, Any]
    """By robot."""
    embodiments: Mapping[str, Any] | None
    """Index of each robot's networks; None: the files do not say."""
    file: str
    statistics_file: str
    embodiments_file: str

    @cached_property
    def source(self) -> Source:
        """Its robots; raises a `PolicyError` if a setting is damaged."""
        modalities = self.settings.get("modality_configs")
        if not isinstance(modalities, Mapping):
            raise wrong(f"{self.file}: modality_configs", modalities, "a JSON object")
        if self.settings.get("use_mean_std"):
            raise PolicyError(f"{self.file}: use_mean_std is true, which is not implemented", "take another checkpoint")
        return Source(
            modalities=modalities,
            statistics=self.statistics,
            settings=Settings(
                percentiles=self._flag("use_percentiles", False),
                relative=self._flag("use_relative_action", False),
                clip=self._flag("clip_outliers", True),
                sin_cos=self._flag("apply_sincos_state_encoding", False),
            ),
            origin=self.file,
            numbers=self.statistics_file,
        )

    def _flag(self, key: str, usual: bool) -> bool:
        found = self.settings.get(key, usual)
        if not isinstance(found, bool):
            raise wrong(f"{self.file}: {key}", found, "true or false")
        return found


def stated_config(
    published: Mapping[str, Any], written: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return NVIDIA's config.json of a LeRobot policy: the published one, with the sizes that its weights have.

    Args:
        published: config.json of the published model, whose heads have the same width.
        written: LeRobot's config.json.
        shapes: of the weights, by their names in NVIDIA's files.
    """
    found = dict(published)
    for name, keys in SIZES.items():
        if len(shape := shapes.get(name, ())) == len(keys):
            found |= {key: size for key, size in zip(keys, shape, strict=True) if key}
    dit, attention = published["diffusion_model_cfg"], published.get("vl_self_attention_cfg")
    outputs = shapes.get("action_head.model.proj_out_2.weight", (dit["output_dim"],))[0]
    found["diffusion_model_cfg"] = dit | {"output_dim": outputs}
    found["diffusion_model_cfg"] |= _stack(shapes, "action_head.model", dit, found["input_embedding_dim"])
    if attention is not None:
        own = _stack(shapes, "action_head.vl_self_attention", attention, found["backbone_embedding_dim"])
        found["vl_self_attention_cfg"] = attention | own
    layers = _layers(shapes, "layers", "language_model.")
    horizon = written.get(HORIZON, published["action_horizon"])
    return found | {"select_layer": layers or published["select_layer"], "action_horizon": horizon}


def refuse_several_sizes(written: Mapping[str, Any], geometry: Geometry) -> None:
    """Raise a `PolicyError` if the images of a LeRobot policy are not of one size when the network sees them."""
    sizes: dict[tuple[int, int], str] = {}
    for name, feature in features_of(written).items():
        if feature.get("type") == VISION and len(feature["shape"]) == 3:
            height, width = sorted_sides(feature["shape"])
            sizes.setdefault(geometry.tokens(height, width), f"{name} ({height} x {width} pixels)")
    if len(sizes) > 1:
        raise PolicyError(
            f"{CONFIG}: images have several sizes when the network sees them: {', '.join(sizes.values())}",
            "take a checkpoint whose cameras have one size, as all cameras of a simulator have (env.image_size)",
        )


def sorted_sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return height and width of an image's shape, whose channel is first or last."""
    height, width = shape[1:] if shape[0] == 3 else shape[:2]
    return max(1, height), max(1, width)


def _layers(shapes: Mapping[str, tuple[int, ...]], stack: str, part: str) -> int:
    """Return the number of layers of a stack."""
    pattern = re.compile(rf"{re.escape(part)}(?:.*\.)?{stack}\.(\d{{1,4}})\.")
    return max((int(found[1]) + 1 for name in shapes if (found := pattern.search(name))), default=0)


def _stack(
    shapes: Mapping[str, tuple[int, ...]], part: str, published: Mapping[str, Any], width: int
) -> dict[str, int]:
    """Return number of layers and heads of a transformer."""
    layers, head = _layers(shapes, "transformer_blocks", f"{part}."), published["attention_head_dim"]
    if width % head:
        raise PolicyError(
            f"{CONFIG} is LeRobot's, which has no sizes, and {part} is {width} wide, which is no multiple of {head}, "
            "the width of the published model's heads",
            "give the checkpoint in NVIDIA's layout",
        )
    return {"num_layers": layers or published["num_layers"], "num_attention_heads": width // head}


def _step(companions: Mapping[str, bytes], file: str, *names: str) -> Mapping[str, Any] | None:
    for step in steps_of(companions, file):
        if str(step.get("registry_name")).startswith(names):
            return step
    return None


def read_steps(companions: Mapping[str, bytes]) -> Processing:
    """Return what LeRobot's steps say.

    Raises:
        PolicyError: a file or step is missing or damaged.
    """
    pack = _step(companions, PREPROCESSOR, PACK)
    if pack is None:
        raise PolicyError(f"{PREPROCESSOR} has no step {PACK}..", "download the files of the same checkpoint again")
    encode, decode = _step(companions, PREPROCESSOR, ENCODE), _step(companions, POSTPROCESSOR, DECODE)
    packed = section(pack, "config", PREPROCESSOR)
    decoded = {} if decode is None else section(decode, "config", POSTPROCESSOR)
    seen = {} if encode is None else section(encode, "config", PREPROCESSOR)
    tag = packed.get("embodiment_tag")
    if not isinstance(tag, str):
        raise wrong(f"{PREPROCESSOR}: {PACK}: embodiment_tag", tag, "a name")
    numbers, modalities, file = packed.get("raw_stats"), packed.get("modality_config"), PREPROCESSOR
    if not numbers or not modalities:
        numbers, modalities, file = _flat(companions, pack)
    settings = {
        **{name: seen[name] for name in IMAGES if seen.get(name) is not None},
        "modality_configs": {tag: modalities},
        "formalize_language": packed.get("formalize_language", True),
        "use_percentiles": packed.get("use_percentiles", False) and file == PREPROCESSOR,
        "use_relative_action": decoded.get("use_relative_action", False),
        "clip_outliers": packed.get("clip_outliers", True),
    }
    return Processing(
        settings=settings,
        statistics={tag: numbers},
        embodiments=packed.get("embodiment_mapping"),
        file=PREPROCESSOR,
        statistics_file=file,
        embodiments_file=PREPROCESSOR,
    )


def _flat(companions: Mapping[str, bytes], pack: Mapping[str, Any]) -> tuple[Any, Any, str]:
    """Return statistics of a policy whose states and actions have one group each, their groups, and the file."""
    name = pack.get("state_file")
    if not isinstance(name, str) or name not in companions:
        raise PolicyError(
            f"{PREPROCESSOR}: {PACK}.. names {name!r:.60} as the file of its statistics, which is not there",
            "download it, too, or set model.statistics",
        )
    features = parse_statistics(companions[name], name)
    states = {"state": features[STATE]} if STATE in features else {}
    if ACTION not in features:
        raise PolicyError(f"{name} has no statistics of {ACTION}", "set model.statistics")
    config = section(pack, "config", PREPROCESSOR)
    horizon, video = config.get("valid_action_horizon"), config.get("video_modality_keys")
    modalities = {
        "video": {"modality_keys": video} if video else {},
        "state": {"modality_keys": [*states]},
        "action": {
            "modality_keys": ["action"],
            "delta_indices": [*range(horizon)] if isinstance(horizon, int) and 0 < horizon < 10_000 else None,
        },
    }
    return {"state": states, "action": {"action": features[ACTION]}}, modalities, name


def with_robot(companions: Mapping[str, bytes], tag: str, numbers: Any, modalities: Any) -> dict[str, bytes]:
    """Return LeRobot's lists of steps in which a robot has these numbers and groups."""
    changed: dict[str, bytes] = {}
    given = {"raw_stats": numbers, "modality_config": modalities}
    for file, start, more in (
        (PREPROCESSOR, PACK, {"embodiment_tag": tag}),
        (POSTPROCESSOR, DECODE, {}),
    ):
        content = parse_json(companions[file], file)
        for step in content["steps"]:
            if str(step.get("registry_name")).startswith((start, UNPACK)):
                step["registry_name"] = f"{start}_v1" if start == DECODE else step["registry_name"]
                step["config"] = {**section(step, "config", file), **given, **more}
        changed[file] = as_json(content)
    return changed
