"""Normalisation of LeRobot's policies: where their folders keep statistics, and what these numbers mean.

Three generations are read: state files of processor steps, named in policy_preprocessor.json and
policy_postprocessor.json (since LeRobot 0.4); buffers inside model.safetensors (before); and the meta/stats.json of a
LeRobotDataset. Formulas as in LeRobot 0.6.1, `processor/normalize_processor.py`. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from embodyrl.config.infos import ModelInfo
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import unit_range
from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import (
    DESCRIPTION_FILE,
    INDEX_FILE,
    open_shard,
    parse_json,
    read_json,
    refuse_other_weights,
    shard_files,
)
from embodyrl.models.vla.folder import (
    CONFIG,
    CheckpointFolder,
    damaged,
    finite_numbers,
    impossible,
    no_config,
    parse_statistics,
    wrong,
)

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
STEP_FILE = "_processor.safetensors"
"""Ending of the names of state files of steps."""
STATS_FILE = "stats.json"
BUFFERS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
"""Beginnings of the names of buffers in model.safetensors."""
EPSILON = 1e-8
NUMBERS: Mapping[str, tuple[str, ...]] = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "IDENTITY": (),
}
"""Ways of normalisation, and the statistics that each needs."""
KNOWN_NUMBERS = tuple(dict.fromkeys(name for names in NUMBERS.values() for name in names))

VISION, STATE, ACTION = "VISUAL", "observation.state", "action"
"""Kind of the features that are images, and names of two others."""
ENVIRONMENT, ENV = "observation.environment_state", "ENV"
"""Name and kind of the input that is the state of the environment and not of the robot."""
KINDS = (VISION, "STATE", "ACTION")
"""Kinds of the features that are normalised."""
IMAGES = "observation.image"
"""Beginning of the names of features that are images."""
MAPPING = "normalization_mapping"
"""Entry of config.json with the way of normalisation of each kind of feature."""
RELATIVE_STEPS = ("delta_actions_processor", "relative_actions_processor")
"""Two names of the step that makes actions relative, which exists from LeRobot 0.5.1 on."""
KEPT = (".json", STEP_FILE)
"""Endings of the names of files that a saved policy has copies of."""
NOT_KEPT = (INDEX_FILE, DESCRIPTION_FILE)
"""Of these, files that are written anew."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """Normalisation of a feature: `(x - origin) / divisor - shift`, and back `(x + shift) * factor + origin`."""

    origin: Vector
    divisor: Vector
    factor: Vector
    shift: float = 0.0

    def __len__(self) -> int:
        return len(self.origin)


@dataclass(frozen=True, kw_only=True)
class Robot:
    """Normalisation of one robot's states and actions."""

    states: Scale | None
    """None: the model reads no states."""
    actions: Scale


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Unchecked statistics of a policy; `scale` checks them."""

    source: str
    """Where they are from, for messages."""
    features: Mapping[str, Mapping[str, Any]]
    """By name of the feature (`observation.state`), with some of mean, std, min, max."""
    ways: Mapping[str, str]
    """Way of normalisation by kind of feature (STATE, ACTION, VISUAL), as config.json has it."""
    sizes: Mapping[str, int]
    """First dimension of each feature, as config.json has it."""

    def scale(self, feature: str, kind: str) -> Scale:
        """Return the normalisation of a feature.

        Args:
            feature: its name.
            kind: STATE, ACTION or VISUAL.

        Raises:
            PolicyError: there are no statistics of it, they are damaged, or the way is not implemented.
        """
        way = way_of(self.ways, kind)
        size = self.sizes.get(feature)
        if way == "IDENTITY" and size is not None:
            return unscaled(size)
        entry = self.entry(feature)
        if entry is None or way == "IDENTITY":
            raise self._lacking(feature)
        columns = [self._column(f"{feature}.{name}", entry.get(name)) for name in NUMBERS[way]]
        first, second = columns
        if len(first) != len(second):
            raise PolicyError(
                f"{self.source}: {feature} has {len(first)} and {len(second)} numbers, as many of each were expected: "
                "download the file again"
            )
        if (fault := impossible(NUMBERS[way], first.tolist(), second.tolist())) is not None:
            raise PolicyError(f"{self.source}: {feature}.{fault}: set model.statistics to another file")
        return scale_of(way, first, second)

    def entry(self, feature: str) -> Mapping[str, Any] | None:
        """Return the statistics of a feature; None if there are none.

        LeRobot's migration of old checkpoints writes `cam_high` as `cam.high`. Such a name is taken for the feature's
        if it can be that of no other.
        """
        if feature in self.features:
            return self.features[feature]
        plain = feature.replace(".", "_")
        alike = [name for name in self.sizes if name.replace(".", "_") == plain]
        written = [name for name in self.strangers() if name.replace(".", "_") == plain]
        return self.features[written[0]] if len(alike) == len(written) == 1 else None

    def strangers(self) -> list[str]:
        """Return the names of statistics that are of no feature in config.json."""
        return [name for name in self.features if name not in self.sizes]

    def _lacking(self, feature: str) -> PolicyError:
        known = ", ".join(self.features) or "nothing"
        why = ", of other data sets" if self.strangers() else ""
        return PolicyError(
            f"{self.source} has no statistics of {feature!r} (has: {known}{why}), and nothing would be normalised "
            "without: set model.statistics to the meta/stats.json of the data set that the policy is to learn from or "
            "was trained on"
        )

    def _column(self, where: str, numbers: Any) -> Vector:
        """Return a list of finite numbers; each of those of images, of shape `[3, 1, 1]`, is in lists of one entry."""
        if isinstance(numbers, list):
            numbers = [_innermost(number) for number in numbers]
        return np.array(finite_numbers(numbers, f"{self.source}: {where}", wrong_number), np.float64)


def wrong_number(
    where: str, found: object, expected: str, remedy: str = "set model.statistics to another file"
) -> PolicyError:
    """Return the error for what is at a place of statistics."""
    return PolicyError(f"{where} is {found!r}, {expected} was expected: {remedy}")


def scale_of(way: str, first: Vector, second: Vector) -> Scale:
    """Return the normalisation by two statistics `[D]`, those of `NUMBERS[way]`."""
    if way == "MEAN_STD":
        return Scale(first, second + EPSILON, second)
    half = np.where(second == first, EPSILON, second - first) / 2.0
    return Scale(first, half, half, shift=1.0)


def unscaled(size: int) -> Scale:
    """Return the normalisation that leaves numbers `[size]` as they are."""
    return Scale(np.zeros(size), np.ones(size), np.ones(size))


def _innermost(number: Any) -> Any:
    while isinstance(number, list) and len(number) == 1:
        number = number[0]
    return number


# ----------------------------------------------------------------------------------------------- ways of normalisation


def way_of(ways: Mapping[str, Any], kind: str) -> str:
    """Return the way in which a kind of feature is normalised; as in LeRobot, a kind that is not named is left as it
    is.

    Raises:
        PolicyError: there is no such way.
    """
    way = ways.get(kind, "IDENTITY")
    if not isinstance(way, str) or way not in NUMBERS:
        raise PolicyError(
            f"config.json: {MAPPING}.{kind} is {way!r:.60}, which is not implemented (known: {', '.join(NUMBERS)}): "
            "take another checkpoint"
        )
    return way


def stated_ways(config: Mapping[str, Any], companions: Mapping[str, bytes]) -> Mapping[str, str] | None:
    """Return the way of normalisation by kind of feature (VISUAL, STATE, ACTION) that a checkpoint's files state:
    `normalization_mapping` in config.json, and `norm_map` of the steps that normalise, by which LeRobot acts. None if
    none of them does.

    Raises:
        PolicyError: a file is damaged, states an unknown way, or they contradict each other.
    """
    stated: list[tuple[str, Mapping[str, Any], Sequence[str]]] = []
    if MAPPING in config:
        stated.append((f"{CONFIG}: {MAPPING}", section(config, MAPPING), KINDS))
    for file, concerned in ((PREPROCESSOR, KINDS), (POSTPROCESSOR, KINDS[-1:])):
        for step in _normalizing(companions, file):
            settings = section(step, "config", file)
            if "norm_map" in settings:
                stated.append((f"{file}: norm_map", section(settings, "norm_map", file), concerned))
    ways: dict[str, str] = {}
    origins: dict[str, str] = {}
    for origin, mapping, kinds in stated:
        for kind in kinds:
            way = way_of(mapping, kind)
            if ways.setdefault(kind, way) != way:
                raise PolicyError(
                    f"{origins[kind]} says that {kind} is normalised by {ways[kind]}, {origin} by {way}",
                    "keep the files of one and the same training together: download the checkpoint again",
                )
            origins.setdefault(kind, origin)
    return ways or None


def refuse_relative_actions(config: Mapping[str, Any], companions: Mapping[str, bytes], remedy: str) -> None:
    """Raise a `PolicyError` if a policy's actions are offsets from the state in which a chunk begins, which nothing
    adds."""
    flags = {f"{CONFIG}: use_relative_actions": config.get("use_relative_actions")}
    for step in steps_of(companions, PREPROCESSOR):
        if step.get("registry_name") in RELATIVE_STEPS:
            enabled = section(step, "config", PREPROCESSOR).get("enabled")
            flags[f"{PREPROCESSOR}: {step['registry_name']}.enabled"] = enabled
    for where, flag in flags.items():
        if flag not in (None, False):
            raise PolicyError(
                f"{where} is {json.dumps(flag):.60}: actions are offsets from the state in which a chunk begins, which "
                "nothing adds",
                remedy,
            )


def refuse_scaled_images(ways: Mapping[str, str]) -> None:
    """Raise a `PolicyError` if images are to be normalised, for models that read them as they are."""
    if (way := way_of(ways, VISION)) != "IDENTITY":
        raise PolicyError(
            f"{CONFIG}: {MAPPING}.{VISION} is {way}, but this model reads images as they are: take another checkpoint"
        )


def check_type(config: Mapping[str, Any], name: str) -> None:
    """Raise a `PolicyError` if a config.json is that of another model than `name`."""
    if config["type"] != name:
        raise PolicyError(
            f"config.json is that of a {config['type']!r} model: set model.name to that one, or give another folder"
        )


def refuse_unknown(config: Mapping[str, Any], known: Mapping[str, Sequence[Any]]) -> None:
    """Raise a `PolicyError` if an entry of config.json has another value than those that are implemented, `known`."""
    for key, values in known.items():
        if key in config and config[key] not in values:
            raise PolicyError(
                f"config.json: {key} is {config[key]!r}, which is not implemented (known: "
                f"{', '.join(dict.fromkeys(map(repr, values)))}): take another checkpoint"
            )


def section(config: Mapping[str, Any], key: str, file: str = CONFIG) -> Mapping[str, Any]:
    """Return an object in a config.json, or in another file; an empty one if it is not there.

    Raises:
        PolicyError: it is something else.
    """
    found = config.get(key, {})
    if not isinstance(found, Mapping):
        raise wrong(f"{file}: {key}", found, "a JSON object")
    return found


def features_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features of input and output, with their shapes.

    Raises:
        PolicyError: one has no shape.
    """
    features = {**section(config, "input_features"), **section(config, "output_features")}
    for name, feature in features.items():
        shape = feature.get("shape") if isinstance(feature, Mapping) else None
        if not isinstance(shape, list) or not shape or not all(type(size) is int for size in shape):
            raise damaged(f"feature {name!r}", feature, "a shape")
    return features


def _sources(
    config: Mapping[str, Any], companions: Mapping[str, bytes], buffers: Mapping[str, NDArray[Any]]
) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield names and contents of statistics, the ones to use first."""
    steps = [step for file in (PREPROCESSOR, POSTPROCESSOR) for step in _normalizing(companions, file)]
    named = [step["state_file"] for step in steps if "state_file" in step]
    if named:
        found: dict[str, dict[str, Any]] = {}
        for name in named:
            if not isinstance(name, str) or name not in companions:
                raise PolicyError(
                    f"{PREPROCESSOR} or {POSTPROCESSOR} names {name!r:.60}, which is not in the checkpoint's folder: "
                    "download it, too"
                )
            found |= parse_statistics(companions[name], name)
        yield named[0], found
    if buffers:
        yield "model.safetensors", _of_buffers(config, buffers)
    if STATS_FILE in companions:
        yield STATS_FILE, parse_json(companions[STATS_FILE], STATS_FILE)


def steps_of(companions: Mapping[str, bytes], file: str) -> Sequence[Mapping[str, Any]]:
    """Return the steps in one of the two lists of steps; none if the file is not there.

    Raises:
        PolicyError: it is damaged.
    """
    if file not in companions:
        return []
    steps = parse_json(companions[file], file).get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise wrong(f"{file}: steps", steps, "a list of steps")
    return steps


def _normalizing(companions: Mapping[str, bytes], file: str) -> Sequence[Mapping[str, Any]]:
    """Return the steps in a list that normalise, in either direction."""
    return [step for step in steps_of(companions, file) if "normalizer" in str(step.get("registry_name"))]


def _of_buffers(config: Mapping[str, Any], buffers: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, Any]]:
    """Return statistics by feature from buffers `normalize_inputs.buffer_observation_state.mean`."""
    dotted = {f"buffer_{name.replace('.', '_')}": name for name in features_of(config)}
    found: dict[str, dict[str, Any]] = {}
    for key, numbers in buffers.items():
        name, _, number = next(key.removeprefix(each) for each in BUFFERS if key.startswith(each)).rpartition(".")
        found.setdefault(dotted.get(name, name), {})[number] = numbers.tolist()
    return found


def read_buffers(folder: Path) -> dict[str, NDArray[Any]]:
    """Return the buffers of normalisation inside a checkpoint's weights, by their names there.

    Raises:
        PolicyError: files of weights are missing or damaged.
    """
    found: dict[str, NDArray[Any]] = {}
    for path in shard_files(folder):
        with open_shard(path, "np") as shard:
            names = [name for name in shard.keys() if name.startswith(BUFFERS)]  # noqa: SIM118 - not a mapping
            found |= {name: shard.get_tensor(name) for name in names}
    return found


# ---------------------------------------------------------------------------------------------------------------- files


class LerobotInfo(ModelInfo):
    """A model whose checkpoints may be LeRobot's."""

    def executed(self, folder: Path) -> dict[str, Any]:
        """Return how LeRobot executes the chunks of a checkpoint, as settings of `eval`; empty if its config.json does
        not say, as that of openpi.

        Raises:
            PolicyError: the file is damaged.
        """
        path = folder / CONFIG
        config = read_json(path) if path.is_file() else {}
        coefficient, steps = config.get("temporal_ensemble_coeff"), config.get("n_action_steps")
        if isinstance(coefficient, int | float) and not isinstance(coefficient, bool):
            return {"eval.ensemble": float(coefficient), "eval.actions": None}
        if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
            return {"eval.actions": steps, "eval.ensemble": None}
        return {}


@dataclass(frozen=True, kw_only=True)
class LerobotFiles(CheckpointFolder):
    """Files of a checkpoint except the weights, config.json among `companions`. A subclass sets `DEFAULTS`."""

    DEFAULTS: ClassVar[Mapping[str, Any]]
    """What LeRobot takes for entries that a config.json does not have."""

    buffers: Mapping[str, NDArray[Any]]
    """Buffers of normalisation inside model.safetensors, as older versions of LeRobot wrote them."""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json, with LeRobot's defaults where neither it nor the steps that normalise say."""
        written = parse_json(self.companions[CONFIG], CONFIG)
        refuse_relative_actions(
            written, self.companions, "take a checkpoint that was trained with policy.use_relative_actions=false"
        )
        ways = stated_ways(written, self.companions)
        return {**self.DEFAULTS, **written, **({} if ways is None else {MAPPING: ways})}

    @cached_property
    def statistics(self) -> Statistics:
        """Its statistics; raises a `PolicyError` if a file is damaged."""
        return self._statistics(
            *next(_sources(self.config, self.companions, self.buffers), ("the checkpoint", dict[str, Any]()))
        )

    def _statistics(self, source: str, features: Mapping[str, Any]) -> Statistics:
        sizes = {name: feature["shape"][0] for name, feature in features_of(self.config).items()}
        return Statistics(source=source, features=features, ways=section(self.config, MAPPING), sizes=sizes)

    @classmethod
    def read(cls, config: Any) -> Self:
        """See `CheckpointFolder.read`."""
        folder = Path(config.checkpoint)
        return cls(companions=read_companions(folder), buffers=read_buffers(folder))

    @classmethod
    def new(
        cls,
        description: Mapping[str, Any],
        numbers: Mapping[str, Mapping[str, Sequence[Any]]],
        others: Mapping[str, bytes] = MappingProxyType({}),
        **fields: Any,
    ) -> Self:
        """Return the files of a new policy.

        Args:
            description: contents of config.json.
            numbers: statistics by feature and name of the number.
            others: further files.
            fields: of the subclass.
        """
        written = {CONFIG: json.dumps(description, indent=4).encode(), **others}
        return cls(companions=written, buffers={}, **fields).with_numbers(numbers)

    def steps_between(self) -> Sequence[Mapping[str, Any]]:
        """Return the processor steps between those that every policy begins with and the normalisation."""
        return [_step("device_processor", device="cpu", float_dtype=None)]

    def with_statistics(self, path: str) -> Self:
        """Return a copy with the statistics of another file, as LeRobot keeps them. Those of images stay: a network
        that has learned to see has learned with them.

        Raises:
            PolicyError: the file does not exist, is of another kind, is damaged, or has none of actions.
        """
        if not Path(path).is_file() or not path.endswith((STATS_FILE, STEP_FILE)):
            raise PolicyError(f"model.statistics = {path!r} is no file called {STATS_FILE} or ..{STEP_FILE}")
        parse = parse_json if path.endswith(STATS_FILE) else parse_statistics
        found = self._statistics(path, parse(Path(path).read_bytes(), path))
        found.scale(ACTION, "ACTION")
        numbers = {}
        for name, feature in features_of(self.config).items():
            own = self._of_images(name, found) if feature.get("type") == VISION else None
            chosen = own or found.features.get(name)
            if chosen is not None and NUMBERS[way_of(found.ways, str(feature.get("type")))]:
                numbers[name] = {key: column for key, column in chosen.items() if key in KNOWN_NUMBERS}
        return self.with_numbers(numbers)

    def _of_images(self, name: str, found: Statistics) -> Mapping[str, Any] | None:
        """Return the checkpoint's own statistics of an image, for which another file's never stand in silently; None if
        it needs or has none.

        Raises:
            PolicyError: it has some of images, under names that fit none or several.
        """
        own = self.statistics.entry(name)
        others = [each for each in self.statistics.strangers() if each.startswith(IMAGES)]
        if own is None and others and way_of(found.ways, VISION) != "IDENTITY":
            raise PolicyError(
                f"{self.statistics.source} has statistics of the images {', '.join(others)}, and none of {name}, as "
                f"{CONFIG} calls it",
                f"rename it there to {name}: the network has learned to see with its own, not with those of "
                "model.statistics",
            )
        return own

    def with_numbers(self, numbers: Mapping[str, Mapping[str, Sequence[Any]]]) -> Self:
        """Return a copy with these statistics, by feature and name of the number."""
        kept = {name: content for name, content in self.companions.items() if not name.endswith(STEP_FILE)}
        ways = section(self.config, MAPPING)
        steps = processor_files(features_of(self.config), ways, numbers, self.steps_between())
        return replace(self, companions=kept | steps, buffers={})


def read_companions(folder: Path, *subfolders: str) -> dict[str, bytes]:
    """Return the files of a checkpoint except the weights, by path within its folder.

    Raises:
        PolicyError: it is not the folder of a checkpoint.
    """
    refuse_other_weights(folder)
    if not (folder / CONFIG).is_file():
        raise no_config(folder, "a checkpoint")
    paths = [path for each in ("", *subfolders) for path in (folder / each).glob("*")]
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(paths)
        if path.name.endswith(KEPT) and path.name not in NOT_KEPT and path.is_file()
    }


def new_features(
    images: Mapping[str, Sequence[int]], *, state: int, action: int, environment: int = 0
) -> dict[str, Any]:
    """Return the features in the config.json of a new policy.

    Args:
        images: shape of each, by name of the camera.
        state: numbers of the robot's state; 0: none is read.
        action: numbers of an action.
        environment: numbers of the environment's state; 0: none is read.
    """
    read: dict[str, Any] = {STATE: {"type": "STATE", "shape": [state]}} if state else {}
    if environment:
        read[ENVIRONMENT] = {"type": ENV, "shape": [environment]}
    read |= {f"{IMAGES}s.{camera}": {"type": VISION, "shape": [*shape]} for camera, shape in images.items()}
    return {"input_features": read, "output_features": {ACTION: {"type": "ACTION", "shape": [action]}}}


def new_numbers(state: int, action: int, simulator: SimulatorSpec | None = None) -> dict[str, dict[str, list[float]]]:
    """Return statistics of a new policy, that leave states of that many numbers unchanged and map a simulator's action
    range to [-1, 1]; without a simulator, actions are unchanged."""
    actions = {"mean": [0.0] * action, "std": [1.0] * action}
    if simulator is not None:
        actions = dict(zip(actions, (ends.tolist() for ends in unit_range(simulator)), strict=True))
    return {STATE: {"mean": [0.0] * state, "std": [1.0] * state}, ACTION: actions}


def processor_files(
    features: Mapping[str, Any],
    ways: Mapping[str, str],
    statistics: Mapping[str, Mapping[str, Sequence[float]]],
    before: Iterable[Mapping[str, Any]],
) -> dict[str, bytes]:
    """Return the lists of steps of a new policy and their state files, by name, as LeRobot reads them.

    Args:
        features: of input and output, as in config.json.
        ways: `MAPPING`, likewise.
        statistics: by feature and name of the number.
        before: steps between those that every policy begins with and the normalisation.
    """
    number = save(
        {
            f"{feature}.{name}": np.array(column, np.float32)
            for feature, columns in statistics.items()
            for name, column in columns.items()
        }
    )
    settings = {"eps": EPSILON, "features": features, "norm_map": ways}
    start = [_step("rename_observations_processor", rename_map={}), _step("to_batch_processor"), *before]
    there = f"policy_preprocessor_step_{len(start)}_normalizer{STEP_FILE}"
    back = f"policy_postprocessor_step_0_unnormalizer{STEP_FILE}"
    pre = [*start, _step("normalizer_processor", **settings) | {"state_file": there}]
    post = [
        _step("unnormalizer_processor", **settings) | {"state_file": back},
        _step("device_processor", device="cpu", float_dtype=None),
    ]
    lists = {
        PREPROCESSOR: {"name": "policy_preprocessor", "steps": pre},
        POSTPROCESSOR: {"name": "policy_postprocessor", "steps": post},
    }
    return {name: json.dumps(steps, indent=2).encode() for name, steps in lists.items()} | {there: number, back: number}


def _step(name: str, **settings: Any) -> dict[str, Any]:
    return {"registry_name": name, "config": settings}
