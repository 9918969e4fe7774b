"""Files of a GR00T checkpoint beside the weights: statistics by robot, tokenizer, sizes. Also builds these files for
models with random weights, and for the published size.

Imports no torch, so that a config can be checked against its checkpoint before anything starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.envs import SimulatorSpec
from embodyrl.errors import did_you_mean
from embodyrl.files import is_plain_name
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import told_texts
from embodyrl.models.gr00t.config import (
    EMBODIMENTS,
    LEROBOT_PREFIX,
    LEROBOT_TYPE,
    MODEL_TYPE,
    Architecture,
    Gr00tConfig,
    Transformer,
    check_model,
    refuse_weights,
)
from embodyrl.models.gr00t.prompts import PIECE, SPECIAL, new_tokenizer
from embodyrl.models.saved import read_json, refuse_other_weights, weight_shapes
from embodyrl.models.vla.folder import (
    CONFIG,
    ConfiguredFolder,
    as_json,
    finite_numbers,
    impossible,
    no_config,
    parse_statistics,
)
from embodyrl.models.vla.prompts import TOKENIZER

# ----------------------------------------------------------------------------------------------------------- statistics

LEROBOT_STATE, LEROBOT_ACTION = "observation.state", "action"
LEROBOT_TAG = "new_embodiment"
"""Robot of the statistics of a LeRobotDataset, which names none."""
ENTRIES = ("min", "max", "mean", "std")
REMEDY = "set model.statistics to Isaac's metadata.json, or to meta/stats.json of a LeRobotDataset"


@dataclass(frozen=True, kw_only=True)
class NormStats:
    """Statistics of the numbers in a state or an action, in order."""

    min: Sequence[float]
    max: Sequence[float]
    mean: Sequence[float]
    std: Sequence[float]
    parts: Sequence[str]
    """Names of the parts that the numbers belong to."""

    def __len__(self) -> int:
        return len(self.min)


@dataclass(frozen=True, kw_only=True)
class Robot:
    """Statistics of one robot."""

    tag: str
    state: NormStats
    action: NormStats
    cameras: Sequence[str] | None
    """Images of its training data; None: the file does not name them."""


def as_metadata(content: Mapping[str, Any], tag: str = LEROBOT_TAG) -> dict[str, Any]:
    """Return contents in the form of Isaac's metadata.json. Those of a LeRobotDataset's stats.json, which names no
    robot, become those of `tag`."""
    if LEROBOT_ACTION not in content:
        return dict(content)
    state, action = content.get(LEROBOT_STATE), content[LEROBOT_ACTION]
    return {tag: {"statistics": {"state": {} if state is None else {"state": state}, "action": {"action": action}}}}


def choose_robot(
    metadata: Mapping[str, Any],
    tag: str | None,
    *,
    origin: str,
    video_keys: Sequence[str] | None,
    state_keys: Sequence[str] | None,
    action_keys: Sequence[str] | None,
) -> Robot:
    """Return one of the robots in metadata.json. Entries of other robots are not read.

    Args:
        metadata: contents of the file.
        tag: the robot's name; None: the only one.
        origin: the file, for messages.
        video_keys: images to use, in order; None: all.
        state_keys: parts of the state to use, in order; None: all.
        action_keys: parts of an action to use, in order; None: all.

    Raises:
        PolicyError: the robot or one of its parts does not exist, or numbers are missing or damaged.
    """
    known = ", ".join(sorted(metadata)) or "none"
    if tag is None:
        if len(metadata) > 1:
            raise PolicyError(f"{origin} has statistics of several robots", f"set embodiment_tag to one of {known}")
        if not metadata:
            raise PolicyError(f"{origin} has statistics of no robot: {REMEDY}")
        tag = next(iter(metadata))
    if tag not in metadata:
        hint = did_you_mean(tag, metadata, lead=" - ")
        raise PolicyError(f"{origin} has no statistics of embodiment_tag = {tag!r}{hint} (known: {known})")
    reader = _Reader(origin)
    entry = reader.entries(metadata[tag], tag)
    numbers = reader.entries(entry.get("statistics"), tag)
    state = reader.entries(numbers.get("state", {}), f"{tag}.state")
    action = reader.entries(numbers.get("action"), f"{tag}.action")
    cameras = reader.entries(entry.get("modalities", {}), f"{tag}.modalities").get("video")
    if cameras is not None:
        cameras = reader.chosen(reader.entries(cameras, f"{tag}.video"), video_keys, f"{tag}.video", "video_keys")
    robot = Robot(
        tag=tag,
        state=reader.ranges(state, state_keys, f"{tag}.state", "state_keys"),
        action=reader.ranges(action, action_keys, f"{tag}.action", "action_keys"),
        cameras=cameras,
    )
    if not robot.action:
        raise PolicyError(
            f"{origin}: the statistics of {tag}.action have no numbers, expected one per entry of an "
            f"action: {REMEDY}, and model.action_keys to its parts"
        )
    return robot


@dataclass(frozen=True)
class _Reader:
    """Reads entries of a file with checks of their types; raises `PolicyError` for wrong ones."""

    origin: str
    """The file."""

    def damaged(self, where: str, found: object, expected: str) -> PolicyError:
        """Return the error for an entry of another type than expected."""
        text = "nothing" if found is None else repr(found)
        shown = text if len(text) <= 60 else f"{text[:60]}.."
        return PolicyError(f"{self.origin}: the statistics of {where} are {shown}, expected {expected}: {REMEDY}")

    def entries(self, found: object, where: str) -> Mapping[str, Any]:
        """Return an entry that is a JSON object."""
        if not isinstance(found, Mapping):
            raise self.damaged(where, found, "an object with entries")
        return found

    def chosen(self, known: Mapping[str, Any], keys: Sequence[str] | None, where: str, option: str) -> list[str]:
        """Return the names of the parts to use."""
        chosen = list(known) if keys is None else list(keys)
        for key in chosen:
            if key not in known:
                hint = did_you_mean(key, known, lead=" - ")
                raise PolicyError(
                    f"{option} names {key!r}, which the statistics of {where} lack{hint} (known: "
                    f"{', '.join(known) or 'none'})"
                )
        return chosen

    def ranges(self, known: Mapping[str, Any], keys: Sequence[str] | None, where: str, option: str) -> NormStats:
        """Return the statistics of all parts to use, concatenated."""
        chosen = self.chosen(known, keys, where, option)
        columns: dict[str, list[float]] = {name: [] for name in ENTRIES}
        for key in chosen:
            for name, column in self._part(known[key], f"{where}.{key}").items():
                columns[name] += column
        return NormStats(parts=chosen, **columns)

    def _part(self, found: object, where: str) -> dict[str, list[float]]:
        part = self.entries(found, where)
        missing = [name for name in ENTRIES if name not in part]
        if missing:
            raise PolicyError(
                f"{self.origin}: the statistics of {where} lack {', '.join(missing)} (found: "
                f"{', '.join(part) or 'nothing'}): {REMEDY}"
            )
        columns = {name: finite_numbers(part[name], f"{where}.{name}", self.damaged) for name in ENTRIES}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise PolicyError(
                f"{self.origin}: the statistics of {where} differ in length "
                f"({', '.join(f'{name} {length}' for name, length in lengths.items())}), expected as many numbers of "
                f"each: {REMEDY}"
            )
        for first, second in (("min", "max"), ("mean", "std")):
            if (fault := impossible((first, second), columns[first], columns[second])) is not None:
                raise PolicyError(f"{self.origin}: the statistics of {where} are damaged, {fault}: {REMEDY}")
        return columns


# ---------------------------------------------------------------------------------------------------------------- files

EAGLE = "eagle2_hg_model"
"""Folder of the vision-language model's files."""
EAGLE_CONFIG = f"{EAGLE}/config.json"
METADATA = "experiment_cfg/metadata.json"
TOKENIZER_FILES = (TOKENIZER, "vocab.json", "merges.txt", "added_tokens.json")
PREPROCESSOR, PACKING = "policy_preprocessor.json", "groot_pack_inputs"
"""LeRobot's list of preprocessing steps, and the prefix of the step that has the statistics."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles(ConfiguredFolder):
    """All files except the weights; `companions` are the tokenizer's."""

    eagle: Mapping[str, Any] | None
    """The vision-language model's config.json; None: that of the published model."""
    metadata: Mapping[str, Any]
    """Statistics by robot."""
    origin: str
    """File of the statistics, for messages."""

    @classmethod
    def read(cls, config: Gr00tConfig) -> CheckpointFiles:
        """See `CheckpointFolder.read`; with the statistics in the file `config.statistics`, if it is given, because the
        folder need not have its own."""
        folder = Path(str(config.checkpoint))
        refuse_other_weights(folder)
        if not (folder / CONFIG).is_file():
            raise no_config(folder, "a GR00T N1.5 checkpoint")
        content = read_json(folder / CONFIG)
        if content.get("type") == LEROBOT_TYPE:  # which is that of all versions
            refuse_weights(weight_shapes(folder), MODEL_TYPE, LEROBOT_PREFIX)
        if content.get("type") == LEROBOT_TYPE:
            content = Architecture().to_config()
        check_model(content)
        eagle = folder / EAGLE_CONFIG
        metadata, origin = read_statistics(folder if config.statistics is None else Path(config.statistics))
        return cls(
            config=content,
            eagle=_read_json(eagle, "") if eagle.is_file() else None,
            metadata=metadata,
            companions=_read_tokenizer(folder, config.tokenizer),
            origin=origin,
        )

    @classmethod
    def scratch(cls, config: Gr00tConfig, simulator: SimulatorSpec, chunk_size: int) -> CheckpointFiles:
        """See `CheckpointFolder.scratch`."""
        metadata, origin = (
            (_statistics(simulator), "the simulator")
            if config.statistics is None
            else read_statistics(Path(config.statistics))
        )
        tokenizer = new_tokenizer(told_texts(simulator.tasks.values(), config.indicator))
        sizes = _scratch_sizes(config, simulator, tokenizer.get_vocab_size(), chunk_size)
        return cls(
            config=sizes.to_config(),
            eagle=sizes.to_eagle_config(),
            metadata=metadata,
            origin=origin,
            companions={TOKENIZER: tokenizer.to_str().encode()},
        )

    @classmethod
    def published(cls, config: Gr00tConfig) -> CheckpointFiles:
        """See `CheckpointFolder.published`."""
        sizes = Architecture()
        numbers = {
            name: {name: {entry: [float(entry in ("max", "std"))] * count for entry in ENTRIES}}
            for name, count in (("state", STATE_DIM), ("action", ACTION_DIM))
        }
        tag = config.embodiment_tag or next(iter(EMBODIMENTS))
        return cls(
            config=sizes.to_config(),
            eagle=None,
            metadata={tag: {"statistics": numbers}},
            companions={TOKENIZER: new_tokenizer([], sizes.image_token).to_str().encode()},
            origin="the published model",
        )

    def with_statistics(self, path: str) -> CheckpointFiles:
        """Return the files as they are: `read` and `scratch` have read these statistics."""
        return self

    @property
    def architecture(self) -> Architecture:
        """The network's shape."""
        return Architecture.from_config(self.config, self.eagle)

    def with_cameras(self, tag: str, cameras: Sequence[str]) -> CheckpointFiles:
        """Return a copy with images for a robot whose statistics do not name them."""
        return dataclasses.replace(self, metadata={**self.metadata, tag: _with_cameras(self.metadata[tag], cameras)})

    def contents(self) -> Mapping[str, bytes]:
        """See `CheckpointFolder.contents`."""
        found = {CONFIG: self.config, METADATA: self.metadata}
        if self.eagle is not None:
            found[EAGLE_CONFIG] = self.eagle
        tokenizer = {f"{EAGLE}/{name}": content for name, content in self.companions.items()}
        return {name: as_json(content) for name, content in found.items()} | tokenizer


def _with_cameras(robot: Mapping[str, Any], cameras: Sequence[str]) -> dict[str, Any]:
    """Return a robot's metadata with the names of its images."""
    return {**robot, "modalities": {"video": {camera: {} for camera in cameras}}}


def read_statistics(path: Path) -> tuple[dict[str, Any], str]:
    """Return statistics by robot, and their file. Entries are checked later, in `choose_robot`.

    Args:
        path: Isaac's metadata.json, a LeRobotDataset's stats.json, or the folder of a checkpoint.

    Raises:
        PolicyError: the file does not exist, or is damaged.
    """
    if path.is_dir() and (path / PREPROCESSOR).is_file() and not (path / METADATA).is_file():
        return _lerobot_statistics(path)
    file = path / METADATA if path.is_dir() else path
    return as_metadata(_read_json(file, REMEDY)), str(file)


def _lerobot_statistics(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the statistics beside a LeRobot policy's weights, under the robot that it names."""
    steps = _read_json(folder / PREPROCESSOR, "").get("steps", [])
    packing = [step for step in steps if str(step.get("registry_name", "")).startswith(PACKING)]
    name = packing[0].get("state_file") if packing else None
    if not is_plain_name(name) or not (folder / name).is_file():
        found = f"names {name}, which is not there" if name else f"has no step {PACKING}.. with statistics"
        raise PolicyError(f"{folder / PREPROCESSOR} {found}: {REMEDY}")
    features = parse_statistics((folder / name).read_bytes(), name)
    tag = packing[0].get("config", {}).get("embodiment_tag", LEROBOT_TAG)
    return as_metadata(features, tag), str(folder / name)


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    if not path.is_file():
        raise PolicyError(f"{path.parent} holds no {path.name}: {remedy}")
    return read_json(path)


def _read_tokenizer(folder: Path, named: str | None) -> dict[str, bytes]:
    places = [folder / EAGLE, folder] if named is None else [Path(named)]
    for place in places:
        found = {name: (place / name).read_bytes() for name in TOKENIZER_FILES if (place / name).is_file()}
        if TOKENIZER in found or {"vocab.json", "merges.txt"} <= found.keys():
            return found
    where = " or ".join(map(str, places))
    raise PolicyError(
        f"no tokenizer in {where} (tokenizer.json, or vocab.json and merges.txt): set model.tokenizer to the folder "
        "eagle2_hg_model of Isaac-GR00T"
    )


# ------------------------------------------------------------------------------------------------- without a checkpoint

ROBOT = "simulator"
"""Robot of such a model, unless statistics name another."""


def _scratch_sizes(model: Gr00tConfig, simulator: SimulatorSpec, vocabulary: int, chunk_size: int) -> Architecture:
    """Return the shape of a model with random weights."""
    config = model.scratch
    heads, horizon = config.heads, config.action_horizon or chunk_size
    return Architecture(
        vision={
            **Architecture().vision,
            "hidden_size": config.vision_size,
            "intermediate_size": 4 * config.vision_size,
            "num_hidden_layers": config.vision_layers,
            "num_attention_heads": heads,
            "image_size": config.image_size,
            "patch_size": config.patch_size,
        },
        text={
            **Architecture().text,
            "hidden_size": config.hidden_size,
            "intermediate_size": 3 * config.hidden_size,
            "num_hidden_layers": config.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": config.hidden_size // heads,
            "vocab_size": vocabulary,
            "initializer_range": config.initializer_range,
        },
        text_layers=config.layers,
        image_token=SPECIAL.index(PIECE),
        vl_self_attention=Transformer(
            layers=config.self_attention_layers, heads=heads, head_dim=config.hidden_size // heads
        ),
        dit=Transformer(layers=config.action_layers, heads=heads, head_dim=config.action_size // heads),
        dit_outputs=config.action_size,
        hidden=config.action_size,
        max_state_dim=max(simulator.proprio_dim, 1),
        max_action_dim=simulator.action_dim,
        action_horizon=horizon,
        future_tokens=4,
        embodiments=1,
        max_positions=horizon,
    )


def _statistics(simulator: SimulatorSpec) -> dict[str, Any]:
    """Return metadata that map [-1, 1] to the simulator's action range and leave states unchanged."""
    low, high = simulator.action_low, simulator.action_high
    centre, half = (0.5 * (low + high)).tolist(), (0.5 * (high - low)).tolist()
    count = simulator.proprio_dim
    action = {"min": low.tolist(), "max": high.tolist(), "mean": centre, "std": half}
    state = {"min": [-1.0] * count, "max": [1.0] * count, "mean": [0.0] * count, "std": [1.0] * count}
    numbers = {"state": {"state": state}, "action": {"action": action}}
    return {ROBOT: _with_cameras({"statistics": numbers}, simulator.cameras)}


STATE_DIM, ACTION_DIM = 8, 7
"""Sizes of public checkpoints for LIBERO."""
