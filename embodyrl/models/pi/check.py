"""Checks of a config of pi0 or pi0.5 against its checkpoint, and detection of the checkpoint's conventions (LeRobot's
or openpi's). Reads no weights and imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import shown_descriptions
from embodyrl.config.schema import Config
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import FlowInfo, FlowSizes, told_texts
from embodyrl.models.lerobot import PREPROCESSOR, RELATIVE_STEPS, LerobotInfo, Robot, steps_of
from embodyrl.models.pi.checkpoint import (
    LEROBOT_PREFIX,
    CheckpointFiles,
    Layout,
    PaliGemmaFiles,
    robot_of,
    sees_state,
    ways_of,
)
from embodyrl.models.pi.config import (
    Architecture,
    DenoisingTimes,
    NamesStatistics,
    Normalization,
    Pi05Config,
    PiConfig,
    StateInput,
    ValueFrom,
)
from embodyrl.models.pi.prompts import Prompts, read_tokenizer
from embodyrl.models.saved import with_kept
from embodyrl.models.vla.cameras import check_chosen, check_images_shown, check_there
from embodyrl.models.vla.config import Frozen
from embodyrl.models.vla.fits import (
    SimulatorSizes,
    attempt,
    check_heads,
    check_horizon,
    check_patches,
    check_sizes,
    check_without_checkpoint,
    file_setting,
    note_executed,
)
from embodyrl.models.vla.folder import choose_key

STATES = "other states with env.proprio"
"""What could be changed if the statistics are of other states than the simulator's."""

# ---------------------------------------------------------------------------------------------------------- conventions

WRITES_STATE = "pi05_prepare_state_tokenizer_processor_step"
"""The step that writes the state into the prompt. Its name is the same in all versions; up to LeRobot 0.4.4 it first
pads the state to the model's width, from 0.5.0 on it does not."""
Options = TypeVar("Options", bound=PiConfig)
Choice = TypeVar("Choice", bound=StrEnum)


def with_defaults(config: Options, files: CheckpointFiles) -> Options:
    """Return the options with null values for prompt, times and normalisation filled: as saved with the policy, else
    by its files. The normalisation stays null where LeRobot's files may state it, see `ways_of`.

    Raises:
        PolicyError: a file that determines a value is damaged.
    """
    folder = Path(config.checkpoint or "")
    options = with_kept(config, folder) if config.checkpoint is not None and folder.is_dir() else config
    found: dict[str, Any] = {
        "denoising_times": _times(options.denoising_times, files),
        "normalization": kept_as(Normalization, "normalization", options.normalization),
    }
    if isinstance(options, Pi05Config) and options.padded_state is None:
        found["padded_state"] = pads_state(files)
    return dataclasses.replace(options, **found)


def _times(wanted: str | None, files: CheckpointFiles) -> DenoisingTimes:
    """Return the wanted way, else the one that the layout of the weights implies."""
    found = kept_as(DenoisingTimes, "denoising_times", wanted)
    if found is None:
        return DenoisingTimes.divided if files.layout.prefix == LEROBOT_PREFIX else DenoisingTimes.summed
    return found


def kept_as(kind: type[Choice], name: str, value: Any) -> Choice | None:
    """Return the value of an option, which may come from a saved policy's description.

    Raises:
        PolicyError: there it has another value than those of `kind`.
    """
    if value is None:
        return None
    if not isinstance(value, str) or value not in list(kind):
        raise PolicyError(f"the checkpoint was saved with {name} = {value!r:.60}", f"set model.{name}")
    return kind(value)


def pads_state(files: CheckpointFiles) -> bool:
    """Return whether a checkpoint's prompts contain the state padded with zeros to the model's width.

    Raises:
        PolicyError: LeRobot's list of steps is damaged.
    """
    # Files of LeRobot 0.5.0, which was the newest for a month, cannot be distinguished from those of 0.4.
    names = [step.get("registry_name") for step in steps_of(files.companions, PREPROCESSOR)]
    is_newer = "use_relative_actions" in files.config or any(name in names for name in RELATIVE_STEPS)
    return WRITES_STATE in names and not is_newer


def writes_padded(config: PiConfig) -> bool:
    """Return whether settled options pad the state before it is written into the prompt."""
    return isinstance(config, Pi05Config) and config.state is StateInput.prompt and bool(config.padded_state)


def _reason(name: str, given: PiConfig, kept: PiConfig) -> str:
    if getattr(given, name) is not None:
        return f"model.{name}"
    if getattr(kept, name) is not None:
        return f"as the policy was saved; model.{name} changes it"
    return f"by the checkpoint's files; model.{name} changes it"


# --------------------------------------------------------------------------------------------------------------- checks


class PiInfo(FlowInfo, LerobotInfo):
    """pi0 and pi0.5."""

    def sizes(self, model: PiConfig, chunk_size: int) -> FlowSizes:
        """Return the sizes that steering depends on, from the files of the checkpoint.

        Raises:
            PolicyError: these are missing or damaged.
        """
        sizes = CheckpointFiles.read(model).architecture(model.name)
        read = sizes.expert if model.value_from is ValueFrom.expert else sizes.language
        return FlowSizes(sizes.horizon, sizes.action_dim, read.width)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config of pi0 or pi0.5."""
        model = config.model
        assert isinstance(model, PiConfig)
        yield from super().check(config)
        own, other = (StateInput.token, "pi05") if model.name == "pi0" else (StateInput.prompt, "pi0")
        if model.state not in (own, StateInput.none):
            yield ConfigIssue(
                "model.state",
                f"model.state = {model.state.value}, which model {model.name!r} has no place for",
                f"set it to {own.value} or none, or model.name to {other}",
            )
        if model.frozen is Frozen.language and config.engine.lora.rank:
            yield ConfigIssue(
                "engine.lora.rank",
                f"engine.lora.rank = {config.engine.lora.rank} puts adapters around the language model, which "
                "model.frozen = language leaves as it is",
                "set model.frozen to vision or nothing, or engine.lora.rank to 0",
            )
        if model.checkpoint is None:
            yield from _check_scratch(config, model)
        if model.checkpoint is not None and Path(model.checkpoint).is_dir():
            yield from _check_folder(config, model)
        else:
            yield from check_there(config)

    def notes(self, config: Config) -> Iterator[str]:
        """Yield texts about the conventions of a checkpoint's prompts, denoising times and normalisation, and how to
        change them."""
        model = config.model
        assert isinstance(model, PiConfig)
        if model.checkpoint is None or not Path(model.checkpoint).is_dir():
            return
        files = CheckpointFiles.read(model)
        options, kept = with_defaults(model, files), with_kept(model, Path(model.checkpoint))
        if isinstance(options, Pi05Config) and options.state is StateInput.prompt:
            assert isinstance(model, Pi05Config) and isinstance(kept, Pi05Config)
            width = files.architecture(model.name).state_dim
            way = (
                f"the state in the prompt is filled up to {width} numbers, as LeRobot 0.4 does"
                if options.padded_state
                else "the state in the prompt is the robot's own numbers, as openpi and LeRobot since 0.5 write it"
            )
            yield f"{way} ({_reason('padded_state', model, kept)})"
        way = (
            f"denoising times are 1 - i/{model.denoising_steps}, as LeRobot's since 0.4.3"
            if options.denoising_times is DenoisingTimes.divided
            else f"denoising times add up -1/{model.denoising_steps} in float32, as openpi's"
        )
        yield f"{way} ({_reason('denoising_times', model, kept)})"
        ways = ways_of(options, files)
        both = f"states are normalised by {ways['STATE']}, actions by {ways['ACTION']}"
        way = both if sees_state(options) else f"actions are normalised by {ways['ACTION']}"
        yield f"{way} ({_reason('normalization', model, kept)})"
        yield from note_executed(config, files.config.get("n_action_steps"))


def _check_scratch(config: Config, model: PiConfig) -> Iterator[ConfigIssue]:
    sizes = model.scratch
    yield from check_patches(sizes.image_size, sizes.patch_size)
    yield from check_heads(sizes, "hidden_size", "expert_size", "vision_size")
    yield from check_chosen(model.cameras, config)
    yield from check_without_checkpoint(model, "tokenizer", "unnorm_key")
    if model.statistics is not None and Path(model.statistics).is_file():
        nothing = CheckpointFiles(config={}, companions={}, layout=Layout())
        there = SimulatorSizes.of_config(config)
        robot = yield from read_robot(there, model, nothing)
        yield from check_sizes(robot, there, "model.statistics", states=STATES)
        yield from relative_to_nothing(robot, model.relative_action_dims)


def _check_folder(config: Config, model: PiConfig) -> Iterator[ConfigIssue]:
    try:
        files = CheckpointFiles.read(model)
        architecture = files.architecture(model.name)
    except PolicyError as error:
        yield error.issue(file_setting(error))
        return
    if files.layout.model not in (None, model.name):
        yield ConfigIssue(
            "model.name",
            f"the weights in model.checkpoint are those of {files.layout.model}, but model.name is {model.name}",
            f"set model.name to {files.layout.model}",
        )
        return
    yield from check_images_shown(model.cameras, config, architecture.images)
    options = yield from attempt("model.checkpoint", lambda: with_defaults(model, files))
    if options is None:
        return
    there = SimulatorSizes.of_config(config)
    robot = yield from read_robot(there, options, files)
    relative, most = options.relative_action_dims, (architecture.state_dim, architecture.action_dim)
    yield from incompatibilities(architecture.horizon, config.rollout.chunk_size, robot, there, relative, most)
    yield from _check_prompts(config, options, files, architecture, robot)


def _check_prompts(
    config: Config, model: PiConfig, files: CheckpointFiles, sizes: Architecture, robot: Robot | None
) -> Iterator[ConfigIssue]:
    """Yield issues if the tokenizer does not fit the model, or a known task description is too long."""
    states = 0 if robot is None or robot.states is None else len(robot.states)
    path = "model.checkpoint" if model.tokenizer is None else "model.tokenizer"
    length = model.prompt_length or sizes.prompt_length
    prompts = yield from attempt(path, lambda: Prompts(read_tokenizer(*files.tokenizer), length))
    if prompts is None:
        return
    try:
        prompts.check(
            told_texts(shown_descriptions(config), model.indicator), written_numbers(model, states, sizes.state_dim)
        )
    except PolicyError as error:
        yield ConfigIssue("model.prompt_length", str(error))


def written_numbers(model: PiConfig, states: int, width: int) -> int | None:
    """Return how many numbers a prompt contains beside the task description; None: no state. A padded
    state has `width` numbers, that of the network."""
    if model.state is not StateInput.prompt:
        return None
    return width if writes_padded(model) else states


def read_robot(
    there: SimulatorSizes, model: NamesStatistics, files: PaliGemmaFiles
) -> Generator[ConfigIssue, None, Robot | None]:
    """Return the ranges in the statistics; None if they cannot be read, which yields an issue."""
    named = model.statistics
    source = "model.checkpoint" if named is None else "model.statistics"
    statistics = yield from attempt(
        source, lambda: (files if named is None else files.with_statistics(named)).statistics
    )
    if statistics is None:
        return None
    key = yield from attempt("model.unnorm_key", lambda: choose_key(statistics, model.unnorm_key))
    if key is None:
        return None
    return (yield from attempt(source, lambda: robot_of(statistics[key], model, files, there)))


def incompatibilities(
    horizon: int,
    chunk: int,
    robot: Robot | None,
    there: SimulatorSizes,
    relative: int,
    most: tuple[float, float] = (math.inf, math.inf),
) -> Iterator[ConfigIssue]:
    """Yield an issue for each part of a checkpoint that does not fit a simulator.

    Args:
        horizon: actions that its network predicts.
        chunk: actions that are executed.
        robot: ranges of its statistics; None: they cannot be read.
        there: the simulator's sizes.
        relative: leading action dims that are relative to the state.
        most: numbers of a state and of an action that its network takes.
    """
    yield from check_horizon(chunk, horizon)
    yield from check_sizes(robot, there, "model.unnorm_key", "model.statistics", states=STATES, most=most)
    yield from relative_to_nothing(robot, relative)


def relative_to_nothing(robot: Robot | None, relative: int) -> Iterator[ConfigIssue]:
    """Yield an issue if more action dims are relative to the state than there are."""
    if robot is None or not relative:
        return
    states, actions = len(robot.states or ()), len(robot.actions)
    if relative > min(states, actions):
        yield ConfigIssue(
            "model.relative_action_dims",
            f"model.relative_action_dims = {relative}, but a state has {states} numbers and an action {actions}",
            f"set it to {min(states, actions)} or less",
        )
