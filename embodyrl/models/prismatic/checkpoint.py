"""Files of an OpenVLA or OpenVLA-OFT checkpoint beside the weights. Also builds these files for models with random
weights, and for the published size.

Imports no torch, so that a config can be checked against its checkpoint before anything starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.prismatic.config import THREE_LAYERS, PrismaticConfig
from embodyrl.models.prismatic.prompts import PAD, new_tokenizer
from embodyrl.models.saved import parse_json, read_json, refuse_other_weights
from embodyrl.models.vla.folder import CONFIG, ConfiguredFolder, as_json, check_whole, finite_numbers, impossible, wrong
from embodyrl.models.vla.prompts import TOKENIZER

if TYPE_CHECKING:  # options of models are read where the package is not installed
    from tokenizers import Tokenizer

# ---------------------------------------------------------------------------------------------------------------- files

STATISTICS = "dataset_statistics.json"
PREPROCESSOR = "preprocessor_config.json"
COMPANIONS = (
    PREPROCESSOR,
    TOKENIZER,
    "processor_config.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    STATISTICS,
)
"""Files that `save` writes unchanged."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles(ConfiguredFolder):
    """All files except the weights."""

    @classmethod
    def read(cls, config: PrismaticConfig) -> CheckpointFiles:
        """See `CheckpointFolder.read`."""
        folder = Path(str(config.checkpoint))
        refuse_other_weights(folder)
        refuse_unknown_parts(folder)
        for name in (CONFIG, PREPROCESSOR, TOKENIZER):
            if not (folder / name).is_file():
                raise PolicyError(
                    f"{folder} holds no {name}", "give the folder of an OpenVLA or OpenVLA-OFT checkpoint"
                )
        companions = {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}
        files = cls(config=read_json(folder / CONFIG), companions=companions)
        for name in (PREPROCESSOR, STATISTICS):
            files.parse(name)
        return files

    @classmethod
    def scratch(cls, config: PrismaticConfig, simulator: SimulatorSpec, chunk_size: int) -> CheckpointFiles:
        """See `CheckpointFolder.scratch`."""
        tokenizer, sizes = new_tokenizer(simulator.tasks.values()), config.scratch
        pad, towers = tokenizer.token_to_id(PAD), len(sizes.vision)
        text = {
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size() + BINS,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.mlp_size,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.heads,
            "initializer_range": sizes.initializer_range,
            "pad_token_id": pad,
        }
        own = {
            "timm_model_ids": list(sizes.vision),
            "timm_override_act_layers": [None] * towers,
            "image_sizes": [sizes.image_size] * towers,
            "use_fused_vision_backbone": towers == 2,
            "text_config": text,
            "pad_token_id": pad,
            "pad_to_multiple_of": 0,
        }
        statistics = {"simulator": _ranges(simulator)}
        return cls._new(own, _preprocessor(sizes.image_size, towers), statistics, tokenizer)

    @classmethod
    def published(cls, config: PrismaticConfig) -> CheckpointFiles:
        """See `CheckpointFolder.published`; the statistics are called as `config.unnorm_key` asks for."""
        mask = [True] * (ACTION_DIM - 1) + [False]
        robot = {"action": _unit(ACTION_DIM) | {"mask": mask}, "proprio": _unit(PROPRIO_DIM)}
        return cls._new({}, _preprocessor(SIDE, 2), {config.unnorm_key or "published": robot}, new_tokenizer([]))

    @classmethod
    def _new(
        cls, own: dict[str, Any], preprocessor: Mapping[str, Any], statistics: Mapping[str, Any], tokens: Tokenizer
    ) -> CheckpointFiles:
        companions = {PREPROCESSOR: as_json(preprocessor), STATISTICS: as_json(statistics)}
        return cls(config=PUBLISHED_CONFIG | own, companions=companions | {TOKENIZER: tokens.to_str().encode()})

    def parse(self, name: str) -> dict[str, Any]:
        """Return the contents of a JSON companion; empty if the file does not exist."""
        return parse_json(self.companions.get(name, b"{}"), name)

    @property
    def statistics(self) -> dict[str, Any]:
        """Return statistics of the training data by data set, which `read_range` checks; fine-tuned models have them in
        a separate file.

        Raises:
            PolicyError: those in config.json are no object.
        """
        own = self.config.get("norm_stats")
        if own is not None and not isinstance(own, Mapping):
            raise PolicyError(
                f"{CONFIG}: norm_stats is {own!r:.60}, an object with data sets was expected", "download it again"
            )
        return {**(own or {}), **self.parse(STATISTICS)}

    @property
    def tokenizer(self) -> bytes:
        """Return the contents of tokenizer.json."""
        return self.companions[TOKENIZER]

    @property
    def preprocessing(self) -> Preprocessing:
        """How images are preprocessed.

        Raises:
            PolicyError: preprocessor_config.json is damaged, or asks for what is not implemented.
        """
        return read_preprocessing(self.parse(PREPROCESSOR))


def head_file(folder: Path, name: str) -> Path:
    """Return the file of a head.

    Raises:
        PolicyError: there is none, or there are several.
    """
    found = sorted(folder.glob(f"{name}--*_checkpoint.pt"))
    if not found:
        raise PolicyError(f"{folder} holds no {name}--*_checkpoint.pt, which the model's options ask for")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise PolicyError(f"{folder} holds several files of the {name} ({names}): leave the one to use")
    return found[0]


TRAINED_WITH = {
    "action_head": (
        "a head that computes actions, its action tokens perhaps never",
        "set model.action_head to l1 (model openvla_oft), or remove the file if the tokens were trained as well",
    ),
    "proprio_projector": (
        "the robot's state as a further input",
        "set model.use_proprio to true (model openvla_oft), or remove the file if the model can do without",
    ),
}
"""What the file of a part tells about the training of the model, and what to do if nothing reads it, by its prefix."""
NOT_IMPLEMENTED = {
    "vision_backbone": "a vision tower that reads the task description (FiLM)",
    "noisy_action_projector": "a head that denoises actions",
}
"""What the file of a part tells about a training that is not implemented, by its prefix."""


def refuse_unknown_parts(folder: Path) -> None:
    """Raise a `PolicyError` if a folder has a part that is not implemented, without which the model fails silently."""
    for name, what in NOT_IMPLEMENTED.items():
        if found := sorted(folder.glob(f"{name}--*.pt")):
            raise PolicyError(f"{found[0]} shows a model with {what}, which is not implemented", "take another one")


def unused_parts(folder: Path, used: Collection[str]) -> Iterator[PolicyError]:
    """Yield an error for each part in a folder that the model was trained with and that is not among those used, by
    their prefixes: from such a model, reinforcement learning begins without any success."""
    for name, (trained_with, remedy) in TRAINED_WITH.items():
        found = sorted(folder.glob(f"{name}--*.pt"))
        if found and name not in used:
            yield PolicyError(f"{found[0]} is not read, but the model was trained with {trained_with}", remedy)


# -------------------------------------------------------------------------------------- statistics and preprocessing

ENDS = {"q99": ("q01", "q99"), "min_max": ("min", "max")}
"""Statistics that are mapped to -1 and 1, by the name of the normalisation."""


@dataclass(frozen=True)
class Range:
    """What is mapped to [-1, 1], for each number of an action or a state."""

    low: Sequence[float]
    high: Sequence[float]
    mask: Sequence[bool]
    """False: the number stays as it is."""


def read_range(statistics: Mapping[str, Any], key: str, part: str, bounds: str) -> Range:
    """Return the range of a data set's actions or states.

    Args:
        statistics: by data set.
        key: the data set.
        part: `action` or `proprio`.
        bounds: a key of `ENDS`.

    Raises:
        PolicyError: the statistics are missing or damaged.
    """
    where = f"the statistics of {key!r}"
    chosen = statistics[key]
    entry = chosen.get(part) if isinstance(chosen, Mapping) else None
    if not isinstance(entry, Mapping):
        raise wrong(f"{where}: {part}", entry, f"an object with {' and '.join(ENDS[bounds])}")
    if missing := [name for name in ENDS[bounds] if name not in entry]:
        raise PolicyError(f"the checkpoint's statistics lack {', '.join(missing)} (have: {', '.join(entry)})")
    low, high = (_numbers(entry[name], f"{where}: {part}.{name}") for name in ENDS[bounds])
    mask = entry.get("mask", [True] * len(low))
    if not isinstance(mask, list) or not all(isinstance(each, bool) for each in mask):
        raise wrong(f"{where}: {part}.mask", mask, "a list of true and false")
    if not len(low) == len(high) == len(mask):
        names = f"{part}.{ENDS[bounds][0]}, {ENDS[bounds][1]} and mask"
        raise PolicyError(
            f"{where}: {names} have {len(low)}, {len(high)} and {len(mask)} numbers, as many of each were expected",
            "download them again",
        )
    if (fault := impossible(ENDS[bounds], low, high)) is not None:
        raise PolicyError(f"{where}: {part}.{fault}", "download them again")
    return Range(low, high, mask)


def _numbers(found: Any, where: str) -> list[float]:
    if not found:
        raise wrong(where, found, "a list of numbers")
    return finite_numbers(found, where)


@dataclass(frozen=True)
class Preprocessing:
    """How images are resized and normalised."""

    side: int
    """Of the square images [pixels]."""
    interpolation: int
    """PIL's number."""
    mean: Sequence[float]
    """`[3*T]`, for `T` vision towers."""
    std: Sequence[float]


def read_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """Read the contents of preprocessor_config.json.

    Raises:
        PolicyError: it is damaged, or asks for what is not implemented.
    """
    strategy = config.get("image_resize_strategy")
    if strategy != "resize-naive":
        raise PolicyError(
            f"{PREPROCESSOR}: image_resize_strategy is {strategy!r:.60}, only 'resize-naive' is supported"
        )
    resizes = [
        (*_list(entry, "tvf_resize_params", "size", 2), entry.get("interpolation"))
        for entry in _entries(config, "tvf_resize_params")
    ]
    height, width, interpolation = resizes[0]
    if any(each != resizes[0] for each in resizes) or height != width:
        raise PolicyError(f"{PREPROCESSOR}: expected the same square size for every vision tower")
    if type(interpolation) is not int or interpolation not in range(6):
        raise wrong(f"{PREPROCESSOR}: interpolation", interpolation, "PIL's number of one, from 0 to 5,")
    colours: dict[str, list[float]] = {"mean": [], "std": []}
    for entry in _entries(config, "tvf_normalize_params"):
        for name, numbers in colours.items():
            numbers += _numbers(_list(entry, "tvf_normalize_params", name, 3), f"{PREPROCESSOR}: {name}")
    if 0 in colours["std"]:
        raise wrong(f"{PREPROCESSOR}: std", 0, "a number above 0")
    return Preprocessing(
        check_whole(height, "tvf_resize_params.image_size", file=PREPROCESSOR), interpolation, **colours
    )


def _entries(config: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the entries of a list, one for each vision tower."""
    found = config.get(name)
    if not isinstance(found, list) or len(found) not in (1, 2) or not all(isinstance(each, Mapping) for each in found):
        raise wrong(f"{PREPROCESSOR}: {name}", found, "a list of one object for each of one or two vision towers")
    return found


def _list(entry: Mapping[str, Any], where: str, name: str, length: int) -> list[Any]:
    found = entry.get(name)
    if not isinstance(found, list) or len(found) != length:
        raise wrong(f"{PREPROCESSOR}: {where}.{name}", found, f"a list of {length}")
    return found


# ------------------------------------------------------------------------------------------------- without a checkpoint

SIDE, BINS = 224, 256
ACTION_DIM, PROPRIO_DIM = 7, 8
PUBLISHED_CONFIG: dict[str, Any] = {
    "model_type": "openvla",
    "arch_specifier": f"no-align+{THREE_LAYERS}",
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "image_sizes": [SIDE, SIDE],
    "use_fused_vision_backbone": True,
    "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000},
    "pad_token_id": 32000,
    "pad_to_multiple_of": 64,
    "n_action_bins": BINS,
    "norm_stats": {},
}
"""config.json of the published checkpoints. Missing sizes have LlamaConfig's defaults, which are those of Llama 2 7B
except for the longest sequence."""


def _preprocessor(side: int, towers: int) -> dict[str, Any]:
    """Return the preprocessor_config.json of a new model."""
    return {
        "image_resize_strategy": "resize-naive",
        "tvf_resize_params": [{"size": [side, side], "interpolation": 3}] * towers,
        "tvf_normalize_params": [{"mean": [0.5] * 3, "std": [0.5] * 3}] * towers,
    }


def _unit(size: int) -> dict[str, Any]:
    """Return statistics of the range -1 .. 1."""
    low, high = [-1.0] * size, [1.0] * size
    return {"min": low, "max": high, "q01": low, "q99": high}


def _ranges(simulator: SimulatorSpec) -> dict[str, Any]:
    """Return statistics that map [-1, 1] to the simulator's action range and leave states unchanged."""
    low, high = simulator.action_low.tolist(), simulator.action_high.tolist()
    ones = np.ones(simulator.proprio_dim)
    ends = {"min": low, "max": high, "q01": low, "q99": high, "mask": [True] * len(low)}
    states = {name: (sign * ones).tolist() for name, sign in (("min", -1), ("max", 1), ("q01", -1), ("q99", 1))}
    return {"action": ends, "proprio": states}
