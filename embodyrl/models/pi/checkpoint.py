"""Files of a pi0 or pi0.5 checkpoint beside the weights: names of weights, statistics, tokenizer. Also builds these
files for models with random weights, and for the published size.

Imports no torch, so that a config can be checked against its checkpoint before anything starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from tokenizers import Tokenizer

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import unit_range
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import told_texts
from embodyrl.models.lerobot import NUMBERS as LEROBOT_NUMBERS
from embodyrl.models.lerobot import (
    Robot,
    Scale,
    refuse_relative_actions,
    refuse_scaled_images,
    stated_ways,
    unscaled,
    wrong_number,
)
from embodyrl.models.lerobot import scale_of as lerobot_scale
from embodyrl.models.pi.config import (
    PUBLISHED_NORMALIZATION,
    Architecture,
    Normalization,
    PiConfig,
    ReadsRobot,
    StateInput,
)
from embodyrl.models.pi.prompts import Prompts, new_tokenizer, read_tokenizer
from embodyrl.models.saved import INDEX_FILE, parse_json, refuse_other_weights, weight_shapes
from embodyrl.models.vla.fits import SimulatorSizes
from embodyrl.models.vla.folder import (
    CONFIG,
    ConfiguredFolder,
    as_json,
    finite_numbers,
    impossible,
    no_config,
    parse_statistics,
)

# ----------------------------------------------------------------------------------------------------- names of weights

BOTH = "paligemma_with_expert."
PARTS = {
    "vision.": f"{BOTH}paligemma.model.vision_tower.vision_model.",
    "projector.": f"{BOTH}paligemma.model.multi_modal_projector.linear.",
    "language.": f"{BOTH}paligemma.model.language_model.",
    "expert.": f"{BOTH}gemma_expert.model.",
    "expert_lm_head.": f"{BOTH}gemma_expert.lm_head.",
}
"""Prefixes of names in the network and in public files; other names are the same."""
EMBEDDING = "embed_tokens.weight"
WORDS = f"{BOTH}paligemma.model.language_model.embed_tokens.weight"
HEAD = f"{BOTH}paligemma.lm_head.weight"
LEROBOT_PREFIX = "model."
MARKS = {"action_time_mlp_in.weight": "pi0", "time_mlp_in.weight": "pi05"}
"""Weights that distinguish the two models where config.json does not."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of weights in which public files differ."""

    prefix: str = ""
    """Prefix of every name: `model.` in LeRobot's files, empty in openpi's."""
    embedding: str = HEAD
    """Name of the word embedding. It is tied to the language model's output layer, and safetensors keeps one of
    them."""
    expert_head: bool = True
    """Whether the files contain the action expert's output layer, which is not used."""
    model: str | None = None
    """`pi0` or `pi05`, by layers that only one of them has; None: neither."""

    @classmethod
    def of(cls, names: Iterable[str]) -> Layout:
        """Return the layout of a file with these names of weights."""
        known = set(names)
        prefix = LEROBOT_PREFIX if any(name.startswith(LEROBOT_PREFIX + BOTH) for name in known) else ""
        return cls(
            prefix=prefix,
            embedding=HEAD if prefix + HEAD in known else WORDS,
            model=next((model for name, model in MARKS.items() if prefix + name in known), None),
            expert_head=any(name.startswith(prefix + PARTS["expert_lm_head."]) for name in known),
        )

    @classmethod
    def read(cls, folder: Path) -> Layout:
        """Return the layout of a checkpoint's weights; raises what `weight_shapes` raises."""
        return cls.of(weight_shapes(folder))

    def public(self, name: str) -> str:
        """Return the name in a file of a name in the network."""
        if name == EMBEDDING:
            return self.prefix + self.embedding
        for own, public in PARTS.items():
            if name.startswith(own):
                return self.prefix + public + name.removeprefix(own)
        return self.prefix + name

    def own(self, public: str) -> str:
        """Return the name in the network of a name in a file."""
        name = public.removeprefix(self.prefix)
        if name in (HEAD, WORDS):
            return EMBEDDING
        for own, beginning in PARTS.items():
            if name.startswith(beginning):
                return own + name.removeprefix(beginning)
        return name


# ---------------------------------------------------------------------------------------------------------------- files

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
PALIGEMMA = (
    "PaliGemma's is https://storage.googleapis.com/big_vision/paligemma_tokenizer.model, or tokenizer.json of "
    "google/paligemma-3b-pt-224"
)
"""Where the tokenizer is public."""
OPENPI_FILE, LEROBOT_FILE, NORMALIZER_FILE = "norm_stats.json", "stats.json", "normalizer_processor.safetensors"
"""Files of statistics: openpi's (also under assets/<data set>/), a LeRobotDataset's, and a LeRobot policy's."""
KEPT = (".json", ".model", "_processor.safetensors")

OPENPI_NAMES = {"state": "state", "actions": "actions"}
LEROBOT_NAMES = {"state": "observation.state", "actions": "action"}
"""Names of states and actions in the statistics of each."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Unchecked statistics of one data set; `read_scale` checks them."""

    file: str
    """Their file, for messages."""
    content: Mapping[str, Any]
    """Entries by the file's names of states and actions, each with some of mean, std, q01, q99."""
    names: Mapping[str, str]
    """The file's names of `state` and `actions`."""


@dataclass(frozen=True, kw_only=True)
class PaliGemmaFiles(ConfiguredFolder):
    """All files except the weights, of models that have PaliGemma's tokenizer and openpi's or LeRobot's statistics. A
    subclass sets `MODELS`."""

    MODELS: ClassVar[str]
    """Names of the models, for messages."""

    @classmethod
    def read_companions(cls, config: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the contents of config.json, and those of the other files by path; the tokenizer is the file
        `config.tokenizer`, if it is given.

        Raises:
            PolicyError: it is not the folder of such a checkpoint.
        """
        folder = Path(str(config.checkpoint))
        refuse_other_weights(folder)
        if not (folder / CONFIG).is_file():
            raise no_config(folder, f"a {cls.MODELS} checkpoint")
        places = sorted([*folder.glob("*"), *folder.glob("assets/**/*")])
        # Not the index of the weights' files: they are written again, in a number of files of their own.
        paths = [path for path in places if path.name.endswith(KEPT) and path.name != INDEX_FILE and path.is_file()]
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        content = parse_json(found.pop(CONFIG), str(folder / CONFIG))
        if config.tokenizer is not None:
            found = _replace(found, Path(config.tokenizer), TOKENIZERS, "model.tokenizer")
        return content, found

    def with_statistics(self, path: str) -> Self:
        """See `CheckpointFolder.with_statistics`."""
        found = _replace(self.companions, Path(path), (OPENPI_FILE, LEROBOT_FILE, NORMALIZER_FILE), "model.statistics")
        return dataclasses.replace(self, companions=found)

    @property
    def statistics(self) -> dict[str, Statistics]:
        """Return the statistics by data set.

        Raises:
            PolicyError: there are none, or a file is damaged.
        """
        found = dict(self._statistics())
        if not found:
            raise PolicyError(
                f"the checkpoint has no statistics ({OPENPI_FILE}, {LEROBOT_FILE} or a {NORMALIZER_FILE}) to normalise "
                "states and actions with: set model.statistics to such a file"
            )
        return found

    def _statistics(self) -> Iterator[tuple[str, Statistics]]:
        for path, content in self.companions.items():
            if path.endswith(OPENPI_FILE):
                folder = path.removesuffix(OPENPI_FILE).strip("/").removeprefix("assets").strip("/")
                yield folder or "openpi", Statistics(file=path, content=_openpi(content, path), names=OPENPI_NAMES)
            elif path.rpartition("/")[2] == LEROBOT_FILE:
                yield "lerobot", Statistics(file=path, content=parse_json(content, path), names=LEROBOT_NAMES)
            elif path.endswith(NORMALIZER_FILE) and "unnormalizer" not in path:
                yield "lerobot", Statistics(file=path, content=parse_statistics(content, path), names=LEROBOT_NAMES)

    @property
    def tokenizer(self) -> tuple[str, bytes]:
        """Return name and contents of the tokenizer's file.

        Raises:
            PolicyError: there is none.
        """
        for name in TOKENIZERS:
            if name in self.companions:
                return name, self.companions[name]
        raise PolicyError(
            f"the checkpoint has no {' or '.join(TOKENIZERS)}",
            f"put PaliGemma's tokenizer into its folder, or set model.tokenizer to that file; {PALIGEMMA}",
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles(PaliGemmaFiles):
    """All files of pi0 or pi0.5 except the weights."""

    MODELS = "pi0 or pi0.5"

    layout: Layout
    """Names of the weights."""

    @classmethod
    def read(cls, config: PiConfig) -> CheckpointFiles:
        """See `CheckpointFolder.read`; the tokenizer is the file `config.tokenizer`, if it is given."""
        content, found = cls.read_companions(config)
        return cls(config=content, companions=found, layout=Layout.read(Path(str(config.checkpoint))))

    @classmethod
    def scratch(cls, config: PiConfig, simulator: SimulatorSpec, chunk_size: int) -> CheckpointFiles:
        """See `CheckpointFolder.scratch`."""
        texts = told_texts(simulator.tasks.values(), config.indicator)
        tokenizer = new_tokenizer(texts)
        prompts = Prompts(read_tokenizer(TOKENIZERS[0], tokenizer.to_str().encode()), length=0)
        state = np.zeros(simulator.proprio_dim) if config.state is StateInput.prompt else None
        sizes = config.scratch
        description = {
            "type": config.name,
            "max_action_dim": simulator.action_dim,
            "max_state_dim": max(1, simulator.proprio_dim),
            "chunk_size": chunk_size,
            "tokenizer_max_length": max(len(prompts.ids(text, state)) for text in texts),
            "image_resolution": [sizes.image_size] * 2,
            "input_features": {f"observation.images.{camera}": {"type": "VISUAL"} for camera in simulator.cameras},
            "vlm_config": {
                "text_config": _gemma(config, sizes.hidden_size) | {"vocab_size": tokenizer.get_vocab_size()},
                "vision_config": {
                    "hidden_size": sizes.vision_size,
                    "intermediate_size": int(sizes.vision_size * sizes.mlp_ratio),
                    "num_hidden_layers": sizes.layers,
                    "num_attention_heads": sizes.heads,
                    "patch_size": sizes.patch_size,
                },
            },
            "dit_config": _gemma(config, sizes.expert_size),
        }
        return cls._new(description, simulator_ranges(simulator), tokenizer)

    @classmethod
    def published(cls, config: PiConfig) -> CheckpointFiles:
        """See `CheckpointFolder.published`; an empty config.json stands for openpi's sizes."""
        return cls._new({}, published_ranges(), new_tokenizer([]))

    @classmethod
    def _new(cls, description: Mapping[str, Any], ranges: Mapping[str, Any], tokenizer: Tokenizer) -> CheckpointFiles:
        return cls(config=description, companions=new_companions(ranges, tokenizer), layout=Layout(expert_head=False))

    def architecture(self, name: str) -> Architecture:
        """Return the network's shape; raises what `Architecture.from_config` raises."""
        return Architecture.from_config(name, self.config, expert_head=self.layout.expert_head)


def _replace(found: Mapping[str, bytes], path: Path, names: tuple[str, ...], setting: str) -> dict[str, bytes]:
    """Return the companions with another file instead of those with these names."""
    if not path.is_file() or not path.name.endswith(names):
        remedy = PALIGEMMA if names == TOKENIZERS else "name such a file"
        raise PolicyError(f"{setting} = {str(path)!r} is no file called {' or '.join(names)}", remedy)
    kept = {name: content for name, content in found.items() if not name.endswith(names)}
    return kept | {path.name: path.read_bytes()}


def _openpi(content: bytes, path: str) -> Mapping[str, Any]:
    """Parse openpi's statistics; some public files lack the outer entry `norm_stats`."""
    parsed = parse_json(content, path)
    found = parsed.get("norm_stats", parsed)
    if not isinstance(found, Mapping):
        raise PolicyError(
            f"{path}: norm_stats is {found!r}, a JSON object with state and actions was expected: download it again"
        )
    return found


# ----------------------------------------------------------------------------------------------------------- statistics

NUMBERS: Mapping[str, tuple[str, ...]] = {"zscore": ("mean", "std"), "quantile": ("q01", "q99"), **LEROBOT_NUMBERS}
"""Statistics that each way of normalisation needs: openpi's, as `Normalization` names them, and LeRobot's."""
SAME = {"MEAN_STD": Normalization.zscore, "QUANTILES": Normalization.quantile}
"""LeRobot's ways that normalise by the same statistics as openpi's."""
USUAL = ("mean", "std", "q01", "q99")
"""Statistics that show which entries are padding."""
EPSILON = 1e-6
"""Added to the width of ranges, as in openpi."""
REMEDY = "download the file again, or set model.statistics to another one"


def scale_of(way: str, first: Sequence[float], second: Sequence[float]) -> Scale:
    """Return the normalisation by two statistics `[D]`, those of `NUMBERS[way]`."""
    low, high = np.array(first, np.float64), np.array(second, np.float64)
    if way not in list(Normalization):
        return lerobot_scale(way, low, high)
    if way == Normalization.zscore:
        return Scale(low, high + EPSILON, high + EPSILON)
    half_width = 0.5 * (high - low + EPSILON)
    return Scale(low, half_width, half_width, shift=1.0)


def sees_state(model: ReadsRobot) -> bool:
    """Return whether the model reads the state, or its actions are relative to it."""
    return model.state is not StateInput.none or model.relative_action_dims > 0


def robot_of(statistics: Statistics, model: ReadsRobot, files: PaliGemmaFiles, there: SimulatorSizes) -> Robot:
    """Return the robot that statistics describe, without the zeros that openpi once padded states and actions with.

    Raises:
        PolicyError: the statistics lack numbers, or are damaged, or the files state another normalisation than the
            options.
    """
    ways = ways_of(model, files)
    states = read_scale(statistics, "state", ways["STATE"], there.proprio) if sees_state(model) else None
    actions = read_scale(statistics, "actions", ways["ACTION"], there.action)
    if not len(actions):
        raise PolicyError(f"{statistics.file}: {statistics.names['actions']} has nothing but zeros: {REMEDY}")
    return Robot(states=states, actions=actions)


def ways_of(model: ReadsRobot, files: PaliGemmaFiles) -> dict[str, str]:
    """Return the way of normalisation (a key of `NUMBERS`) of STATE and ACTION: as LeRobot's files in the checkpoint
    state, else as the options do, else as published.

    Raises:
        PolicyError: a file is damaged, or the files contradict each other or the options.
    """
    if not model.relative_action_dims:
        joints = files.config.get("relative_exclude_joints", ["gripper"])
        refuse_relative_actions(
            files.config,
            files.companions,
            "set model.relative_action_dims to the number of leading action dims that are: all but "
            f"relative_exclude_joints, {joints!r:.60}",
        )
    wanted, stated = model.normalization, stated_ways(files.config, files.companions)
    if stated is None:
        usual = PUBLISHED_NORMALIZATION.get(model.name, Normalization.quantile)
        return dict.fromkeys(("STATE", "ACTION"), wanted or usual)
    refuse_scaled_images(stated)
    for kind in ("STATE", "ACTION") if sees_state(model) else ("ACTION",):
        if wanted is not None and SAME.get(stated[kind]) is not wanted:
            right = SAME.get(stated[kind], "null")
            raise PolicyError(
                f"model.normalization is {wanted.value}, but the checkpoint's {kind} was normalised by {stated[kind]} "
                f"(normalization_mapping)",
                f"set model.normalization to {right}",
            )
    return {kind: stated[kind] for kind in ("STATE", "ACTION")}


def read_scale(statistics: Statistics, kind: str, way: str, size: int | None) -> Scale:
    """Return the normalisation of a state or an action, without padding.

    Args:
        statistics: statistics of one data set.
        kind: `state` or `actions`.
        way: a key of `NUMBERS`.
        size: size in the simulator; None: not known. Statistics that are longer, or all if it is None, are cut after
            the last entry that is not padding.

    Raises:
        PolicyError: the statistics lack such numbers, or are damaged.
    """
    where = f"{statistics.file}: {statistics.names[kind]}"
    columns = _columns(statistics, kind, way, where)
    length, real = len(next(iter(columns.values()), ())), _without_padding(list(columns.values()))
    kept = length if size is not None and length <= size else real
    if not NUMBERS[way]:
        return unscaled(kept)
    first, second = (columns[name][:kept] for name in NUMBERS[way])
    if (fault := impossible(NUMBERS[way], first, second)) is not None:
        raise PolicyError(f"{where}.{fault}: {REMEDY}")
    return scale_of(way, first, second)


def _columns(statistics: Statistics, kind: str, way: str, where: str) -> dict[str, list[float]]:
    """Return all columns of the entry that exist; they have the same length."""
    entry = statistics.content.get(statistics.names[kind])
    if not isinstance(entry, Mapping):
        raise PolicyError(
            f"{statistics.file} has no entry {statistics.names[kind]!r} (has: {', '.join(statistics.content) or 'none'}"
            "): set model.statistics to the file of a data set that was recorded with it"
        )
    found = {name: entry[name] for name in dict.fromkeys((*USUAL, *NUMBERS[way])) if entry.get(name) is not None}
    if lacking := [name for name in NUMBERS[way] if name not in found]:
        raise PolicyError(
            f"{where} lacks {', '.join(lacking)} (has: {', '.join(found) or 'none'}), which {_needed_by(way)}"
        )
    columns = {name: finite_numbers(numbers, f"{where}.{name}", _wrong) for name, numbers in found.items()}
    lengths = {name: len(numbers) for name, numbers in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise PolicyError(f"{where} is damaged: {counts} numbers, as many of each were expected: {REMEDY}")
    return columns


def _needed_by(way: str) -> str:
    """Return the end of the message about statistics that a way of normalisation needs, with the remedy."""
    instead = "set model.statistics to a file with them"
    if way not in list(Normalization):
        return f"the checkpoint's normalization_mapping {way} needs: {instead}"
    other = next(each for each in Normalization if each != way)
    return (
        f"model.normalization = {way} needs: {instead}, or model.normalization to {other.value} if the model was "
        "trained so"
    )


def _wrong(where: str, found: object, expected: str) -> PolicyError:
    return wrong_number(where, found, expected, REMEDY)


def _without_padding(columns: Sequence[Sequence[float]]) -> int:
    """Return the number of entries before the trailing ones that are zero in every column. Padding has neither mean nor
    width, whereas a real entry may have mean 0."""
    return max((place + 1 for column in columns for place, number in enumerate(column) if number), default=0)


# ------------------------------------------------------------------------------------------------- without a checkpoint


def _gemma(config: PiConfig, width: int) -> dict[str, int]:
    """Return the sizes of one expert. Both have the head size of the wider one, because they share keys."""
    sizes = config.scratch
    return {
        "hidden_size": width,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": int(width * sizes.mlp_ratio),
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": 1,
        "head_dim": max(sizes.hidden_size, sizes.expert_size) // sizes.heads // 2 * 2,
    }


def simulator_ranges(simulator: SimulatorSpec) -> dict[str, Any]:
    """Return statistics that map the simulator's action range to [-1, 1] and leave states unchanged."""
    centre, half_width = unit_range(simulator)
    zeros, ones = np.zeros(simulator.proprio_dim), np.ones(simulator.proprio_dim)
    numbers = {
        "actions": (centre, half_width, simulator.action_low, simulator.action_high),
        "state": (zeros, ones, -ones, ones),
    }
    return {
        key: {name: np.asarray(column).tolist() for name, column in zip(USUAL, columns, strict=True)}
        for key, columns in numbers.items()
    }


def new_companions(ranges: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of statistics and of the tokenizer of a new model."""
    return {OPENPI_FILE: as_json({"norm_stats": ranges}), TOKENIZERS[0]: tokenizer.to_str().encode()}


def published_ranges() -> dict[str, Any]:
    """Return statistics of a robot of the published size, which change nothing."""
    return {
        key: {name: [float(name in ("std", "q99"))] * count for name in USUAL}
        for key, count in (("state", STATE_DIM), ("actions", ACTION_DIM))
    }


STATE_DIM, ACTION_DIM = 8, 7
"""Sizes of public checkpoints for LIBERO."""
