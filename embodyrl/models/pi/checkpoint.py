"""What the folder of a pi0 or pi0.5 checkpoint says beside its weights: their names, statistics, tokenizer; and the
same for a model that starts from nothing or has the published size. Nothing here imports torch, so that a config can be
checked against its checkpoint before anything starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import unit_range
from embodyrl.models.errors import PolicyError
from embodyrl.models.pi.config import Normalization, PiConfig, StateInput
from embodyrl.models.pi.prompts import Prompts, read_tokenizer, word_tokenizer
from embodyrl.models.saved import open_shard, parse_json, shard_files
from embodyrl.models.vla.checkpoint import (
    CONFIG,
    FilesBesideWeights,
    first_not_finite,
    parse_statistics,
    simulator_to_start_in,
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
"""Beginnings of names in the network, and in public files; other names are the same."""
EMBEDDING = "embed_tokens.weight"
WORDS = f"{BOTH}paligemma.model.language_model.embed_tokens.weight"
HEAD = f"{BOTH}paligemma.lm_head.weight"
LEROBOT_PREFIX = "model."
MARKS = {"action_time_mlp_in.weight": "pi0", "time_mlp_in.weight": "pi05"}
"""Weights that tell the two models apart, where config.json does not."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """In what public files differ."""

    prefix: str = ""
    """Of every name: `model.` in lerobot's files, nothing in openpi's."""
    embedding: str = HEAD
    """What the word embedding is called. It is tied to the language model's output layer, and safetensors keeps one."""
    expert_head: bool = True
    """Whether the action expert's output layer is there, which nothing uses."""
    model: str | None = None
    """`pi0` or `pi05`, by the layers that only one of them has; None: neither."""

    @classmethod
    def of(cls, names: Iterable[str]) -> Layout:
        """The layout of a file with these names."""
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
        """The layout of a checkpoint's weights; see `shard_files` and `open_shard` for what is raised."""
        names: list[str] = []
        for path in shard_files(folder):
            with open_shard(path, "np") as shard:
                names += shard.keys()
        return cls.of(names)

    def public(self, name: str) -> str:
        """From a name in the network to that in a file."""
        if name == EMBEDDING:
            return self.prefix + self.embedding
        for own, public in PARTS.items():
            if name.startswith(own):
                return self.prefix + public + name.removeprefix(own)
        return self.prefix + name

    def own(self, public: str) -> str:
        """From a name in a file to that in the network."""
        name = public.removeprefix(self.prefix)
        if name in (HEAD, WORDS):
            return EMBEDDING
        for own, beginning in PARTS.items():
            if name.startswith(beginning):
                return own + name.removeprefix(beginning)
        return name


# ---------------------------------------------------------------------------------------------------------------- files

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
OPENPI_FILE, LEROBOT_FILE, NORMALIZER_FILE = "norm_stats.json", "stats.json", "normalizer_processor.safetensors"
"""Files of statistics: openpi's (also under assets/<data set>/), a LeRobotDataset's, and that of a lerobot policy."""
KEPT = (".json", ".model", "_processor.safetensors")

OPENPI_NAMES = {"state": "state", "actions": "actions"}
LEROBOT_NAMES = {"state": "observation.state", "actions": "action"}
"""What states and actions are called in either's statistics."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Those of one data set, as they are written; `read_norm_stats` makes sure that they are whole."""

    file: str
    """Where they are from, for messages."""
    content: Mapping[str, Any]
    """By what the file calls states and actions, each with some of mean, std, q01, q99."""
    names: Mapping[str, str]
    """What it calls them."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles(FilesBesideWeights):
    """Everything but the weights."""

    layout: Layout
    """How the weights are called."""

    @classmethod
    def read(cls, folder: Path, *, tokenizer: str | None = None, statistics: str | None = None) -> CheckpointFiles:
        """Read a checkpoint's folder.

        Args:
            folder: of the checkpoint.
            tokenizer: file to use instead of the one in the folder.
            statistics: the same for statistics.

        Raises:
            PolicyError: it is not the folder of such a checkpoint, or the other files are not there.
        """
        if not (folder / CONFIG).is_file():
            raise PolicyError(f"{folder} holds no {CONFIG}: give the folder of a pi0 or pi0.5 checkpoint")
        places = sorted([*folder.glob("*"), *folder.glob("assets/**/*")])
        paths = [path for path in places if path.name.endswith(KEPT) and path.is_file()]
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        config = parse_json(found.pop(CONFIG), str(folder / CONFIG))
        if tokenizer is not None:
            found = _replace(found, Path(tokenizer), TOKENIZERS, "model.tokenizer")
        files = cls(config=config, companions=found, layout=Layout.read(folder))
        return files if statistics is None else files.with_statistics(statistics)

    def with_statistics(self, path: str) -> CheckpointFiles:
        """The same with the statistics of another file.

        Raises:
            PolicyError: it is not there, or called otherwise than such files are.
        """
        found = _replace(self.companions, Path(path), (OPENPI_FILE, LEROBOT_FILE, NORMALIZER_FILE), "model.statistics")
        return dataclasses.replace(self, companions=found)

    @property
    def statistics(self) -> dict[str, Statistics]:
        """Statistics by data set.

        Raises:
            PolicyError: there are none, or a file of them is damaged.
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
        """Name and contents of the tokenizer's file.

        Raises:
            PolicyError: there is none.
        """
        for name in TOKENIZERS:
            if name in self.companions:
                return name, self.companions[name]
        raise PolicyError(
            f"the checkpoint has no {' or '.join(TOKENIZERS)}: put PaliGemma's tokenizer into its folder, or set "
            "model.tokenizer to that file"
        )


def _replace(found: Mapping[str, bytes], path: Path, names: tuple[str, ...], setting: str) -> dict[str, bytes]:
    """The companions with another file instead of those with these names."""
    if not path.is_file() or not path.name.endswith(names):
        raise PolicyError(f"{setting} = {str(path)!r} is no file called {' or '.join(names)}")
    kept = {name: content for name, content in found.items() if not name.endswith(names)}
    return kept | {path.name: path.read_bytes()}


def _openpi(content: bytes, path: str) -> Mapping[str, Any]:
    """Openpi's statistics, which some public files hold without the entry `norm_stats` around them."""
    parsed = parse_json(content, path)
    found = parsed.get("norm_stats", parsed)
    if not isinstance(found, Mapping):
        raise PolicyError(
            f"{path}: norm_stats is {found!r}, a JSON object with state and actions was expected: download it again"
        )
    return found


# ----------------------------------------------------------------------------------------------------------- statistics

NUMBERS = {Normalization.zscore: ("mean", "std"), Normalization.quantile: ("q01", "q99")}
"""What each way to normalise needs."""
KNOWN = [name for names in NUMBERS.values() for name in names]
REMEDY = "download the file again, or set model.statistics to another one"


@dataclass(frozen=True)
class NormStats:
    """Two numbers for each entry of a state or an action."""

    first: Sequence[float]
    """Means, or 1st percentiles."""
    second: Sequence[float]
    """Standard deviations, or 99th percentiles."""

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, kw_only=True)
class Robot:
    """What a checkpoint knows of one robot."""

    states: NormStats | None
    """None: the model does not look at states."""
    actions: NormStats


def sees_state(model: PiConfig) -> bool:
    """Return whether the state reaches the network, or actions are relative to it."""
    return model.state is not StateInput.none or model.relative_action_dims > 0


def robot_of(statistics: Statistics, model: PiConfig, *, proprio: int | None, action_dim: int | None) -> Robot:
    """The robot that statistics describe, without the zeros that openpi once padded states and actions with.

    Args:
        statistics: of one data set.
        model: the model's options.
        proprio: numbers in the simulator's state; None: not known.
        action_dim: the same of an action.

    Raises:
        PolicyError: they lack numbers, or are damaged.
    """
    states = read_norm_stats(statistics, "state", model.normalization, proprio) if sees_state(model) else None
    actions = read_norm_stats(statistics, "actions", model.normalization, action_dim)
    if not len(actions):
        raise PolicyError(f"{statistics.file}: {statistics.names['actions']} has nothing but zeros: {REMEDY}")
    return Robot(states=states, actions=actions)


def read_norm_stats(statistics: Statistics, kind: str, normalization: Normalization, size: int | None) -> NormStats:
    """The numbers that a normalisation needs, in the length that the simulator has.

    Args:
        statistics: of one data set.
        kind: `state` or `actions`.
        normalization: what is needed.
        size: numbers that the simulator has; statistics that are longer, or all of them if it is None (not known), end
            with the last entry that is no padding.

    Raises:
        PolicyError: they lack what is needed, or are damaged.
    """
    where = f"{statistics.file}: {statistics.names[kind]}"
    columns = _columns(statistics, kind, normalization, where)
    length, real = len(columns[NUMBERS[normalization][0]]), _without_padding(list(columns.values()))
    kept = length if size is not None and length <= size else real
    first, second = (columns[name][:kept] for name in NUMBERS[normalization])
    return NormStats(first, second)


def _columns(statistics: Statistics, kind: str, normalization: Normalization, where: str) -> dict[str, Sequence[float]]:
    """All numbers of the entry that are there, of one length."""
    entry = statistics.content.get(statistics.names[kind])
    if not isinstance(entry, Mapping):
        raise PolicyError(
            f"{statistics.file} has no entry {statistics.names[kind]!r} (has: {', '.join(statistics.content) or 'none'}"
            "): set model.statistics to the file of a data set that was recorded with it"
        )
    found = {name: entry[name] for name in KNOWN if entry.get(name) is not None}
    lacking = [name for name in NUMBERS[normalization] if name not in found]
    if lacking:
        other = next(each for each in Normalization if each is not normalization)
        raise PolicyError(
            f"{where} lacks {', '.join(lacking)} (has: {', '.join(found) or 'none'}), which model.normalization = "
            f"{normalization.value} needs: set model.statistics to a file with them, or model.normalization to "
            f"{other.value} if the model was trained so"
        )
    columns = {name: _finite(numbers, f"{where}.{name}") for name, numbers in found.items()}
    lengths = {name: len(numbers) for name, numbers in columns.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise PolicyError(f"{where} is damaged: {told} numbers, as many of each were expected: {REMEDY}")
    return columns


def _finite(numbers: Any, where: str) -> Sequence[float]:
    """The list, if it is one of finite numbers."""
    if not isinstance(numbers, list):
        raise PolicyError(f"{where} is {numbers!r}, a list of numbers was expected: {REMEDY}")
    if (place := first_not_finite(numbers)) is not None:
        raise PolicyError(f"{where}[{place}] is {numbers[place]!r}, a finite number was expected: {REMEDY}")
    return numbers


def _without_padding(columns: Sequence[Sequence[float]]) -> int:
    """Return how many entries are left without the last ones that are zero in every column: padding has no mean and no
    width, whereas the mean alone may well be zero."""
    return max((place + 1 for column in columns for place, number in enumerate(column) if number), default=0)


# ------------------------------------------------------------------------------------------------- without a checkpoint


def scratch_files(config: PiConfig, simulator: SimulatorSpec | None, chunk_size: int) -> CheckpointFiles:
    """Files of a model whose vocabulary are the simulator's task descriptions, whose ranges are the simulator's unless
    statistics are given, and whose horizon is a chunk.

    Raises:
        PolicyError: there is no simulator (None) or it takes a choice among n instead of continuous numbers, or there
            are no statistics where they are said to be.
    """
    simulator = simulator_to_start_in(simulator)
    tokenizer = word_tokenizer(simulator.tasks.values())
    prompts = Prompts(*read_tokenizer(TOKENIZERS[0], tokenizer.to_str().encode()), length=0)
    state = np.zeros(simulator.proprio_dim) if config.state is StateInput.prompt else None
    sizes = config.scratch
    description = {
        "type": config.name,
        "max_action_dim": simulator.action_dim,
        "max_state_dim": max(1, simulator.proprio_dim),
        "chunk_size": chunk_size,
        "tokenizer_max_length": max(len(prompts.ids(task, state)) for task in simulator.tasks.values()),
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
    ranges = (json.dumps({"norm_stats": _ranges(simulator)}, indent=2) + "\n").encode()
    companions = {OPENPI_FILE: ranges, TOKENIZERS[0]: tokenizer.to_str().encode()}
    files = CheckpointFiles(config=description, companions=companions, layout=Layout(expert_head=False))
    return files if config.statistics is None else files.with_statistics(config.statistics)


def _gemma(config: PiConfig, width: int) -> dict[str, int]:
    """Both experts have the heads of the wider one, whose keys they share."""
    sizes = config.scratch
    return {
        "hidden_size": width,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": int(width * sizes.mlp_ratio),
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": 1,
        "head_dim": max(sizes.hidden_size, sizes.expert_size) // sizes.heads // 2 * 2,
    }


def _ranges(simulator: SimulatorSpec) -> dict[str, Any]:
    """Statistics that map the simulator's action range to [-1, 1], and take states as they are."""
    centre, half_width = unit_range(simulator)
    zeros, ones = np.zeros(simulator.proprio_dim), np.ones(simulator.proprio_dim)
    numbers = {
        "actions": (centre, half_width, simulator.action_low, simulator.action_high),
        "state": (zeros, ones, -ones, ones),
    }
    names = ("mean", "std", "q01", "q99")
    return {
        key: {name: np.asarray(column).tolist() for name, column in zip(names, columns, strict=True)}
        for key, columns in numbers.items()
    }


STATE_DIM, ACTION_DIM = 8, 7
"""Those of public checkpoints for LIBERO."""


def published_files() -> CheckpointFiles:
    """Files of a model of the published size; config.json says nothing, which stands for openpi's sizes."""
    above = {name: name in ("std", "q99") for name in KNOWN}
    ranges = {
        key: {name: [float(one)] * count for name, one in above.items()}
        for key, count in (("state", STATE_DIM), ("actions", ACTION_DIM))
    }
    companions = {
        OPENPI_FILE: json.dumps({"norm_stats": ranges}).encode(),
        TOKENIZERS[0]: word_tokenizer([]).to_str().encode(),
    }
    return CheckpointFiles(config={}, companions=companions, layout=Layout(expert_head=False))
