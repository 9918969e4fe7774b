"""Checks of a config of pi0-FAST against its checkpoint, and the checkpoint's convention. Reads no weights and imports
no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Learns
from embodyrl.config.rules import shown_descriptions
from embodyrl.config.schema import Config
from embodyrl.models.errors import PolicyError
from embodyrl.models.lerobot import PREPROCESSOR, LerobotInfo, Robot, stated_ways
from embodyrl.models.pi.check import STATES, incompatibilities, kept_as, read_robot, relative_to_nothing
from embodyrl.models.pi.checkpoint import LEROBOT_PREFIX, ways_of
from embodyrl.models.pi.config import Normalization, StateInput
from embodyrl.models.pi.prompts import read_tokenizer
from embodyrl.models.pi0_fast.checkpoint import CheckpointFiles, Vocabulary
from embodyrl.models.pi0_fast.config import Architecture, Convention, Decoding, LossMean, Pi0FastConfig
from embodyrl.models.pi0_fast.prompts import Prompts
from embodyrl.models.saved import with_kept
from embodyrl.models.vla.cameras import check_chosen, check_images_shown, check_there
from embodyrl.models.vla.fits import (
    SimulatorSizes,
    attempt,
    check_heads,
    check_patches,
    check_sizes,
    check_without_checkpoint,
    file_setting,
    note_executed,
)

# ---------------------------------------------------------------------------------------------------------- conventions


def with_defaults(config: Pi0FastConfig, files: CheckpointFiles) -> Pi0FastConfig:
    """Return the options with null values for convention, normalisation and the mean of the loss filled: as saved with
    the policy, else by its files. The normalisation stays null where files may state it, see `ways_of`.

    Raises:
        PolicyError: a file that determines a value is damaged.
    """
    folder = Path(config.checkpoint or "")
    options = with_kept(config, folder) if config.checkpoint is not None and folder.is_dir() else config
    lerobot = files.layout.prefix == LEROBOT_PREFIX
    convention = kept_as(Convention, "convention", options.convention)
    convention = convention or (Convention.lerobot if lerobot else Convention.openpi)
    normalization = kept_as(Normalization, "normalization", options.normalization)
    unstated = PREPROCESSOR in files.companions and stated_ways(files.config, files.companions) is None
    if normalization is None and unstated:
        normalization = Normalization.zscore  # the default of LeRobot's class
    mean = LossMean.tokens if convention is Convention.lerobot else LossMean.samples
    return dataclasses.replace(
        options, convention=convention, normalization=normalization, loss_mean=options.loss_mean or mean
    )


def written_numbers(model: Pi0FastConfig, states: int) -> int | None:
    """Return how many numbers of a state a prompt contains; None: no state."""
    return states if model.state is StateInput.prompt else None


# --------------------------------------------------------------------------------------------------------------- checks


class Pi0FastInfo(LerobotInfo):
    """pi0-FAST."""

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config of pi0-FAST."""
        model = config.model
        assert isinstance(model, Pi0FastConfig)
        if model.state is StateInput.token:
            yield ConfigIssue(
                "model.state",
                f"model.state = token, which model {model.name!r} has no place for",
                "set it to prompt or none",
            )
        if model.checkpoint is None:
            yield from _check_scratch(config, model)
        if model.checkpoint is not None and Path(model.checkpoint).is_dir():
            yield from _check_folder(config, model)
        else:
            yield from check_there(config)

    def notes(self, config: Config) -> Iterator[str]:
        """Yield texts about the conventions of a checkpoint, and how to change them."""
        model = config.model
        assert isinstance(model, Pi0FastConfig)
        if model.checkpoint is None or not Path(model.checkpoint).is_dir():
            return
        files = CheckpointFiles.read(model)
        options = with_defaults(model, files)
        reason = "model.convention"
        if model.convention is None:
            reason = "by the layout of the weights; model.convention changes it"
        yield (
            f"tokens are in {'LeRobot' if options.convention is Convention.lerobot else 'openpi'}'s order ({reason})"
        )
        ways = ways_of(options, files)
        yield f"states are normalised by {ways['STATE']}, actions by {ways['ACTION']}"
        if model.decoding is Decoding.all:
            yield "tokens are chosen among the whole vocabulary (model.decoding), as public code does"
        yield from note_executed(config, files.config.get("n_action_steps"))


def _check_scratch(config: Config, model: Pi0FastConfig) -> Iterator[ConfigIssue]:
    sizes = model.scratch
    yield from check_patches(sizes.image_size, sizes.patch_size)
    yield from check_heads(sizes, "hidden_size", "vision_size")
    yield from check_chosen(model.cameras, config)
    yield from check_without_checkpoint(model, "tokenizer", "action_tokenizer", "unnorm_key")
    if model.statistics is not None and Path(model.statistics).is_file():
        there = SimulatorSizes.of_config(config)
        robot = yield from read_robot(there, model, CheckpointFiles.nothing())
        yield from check_sizes(robot, there, "model.statistics", states=STATES)
        yield from relative_to_nothing(robot, model.relative_action_dims)


def _check_folder(config: Config, model: Pi0FastConfig) -> Iterator[ConfigIssue]:
    try:
        files = CheckpointFiles.read(model)
        sizes = files.architecture
    except PolicyError as error:
        yield error.issue(file_setting(error))
        return
    if files.layout.has_expert or not files.layout.matrices:
        what = "have an action expert" if files.layout.has_expert else "have no word embedding"
        yield ConfigIssue(
            ("model.checkpoint", "model.name"),
            f"the weights in model.checkpoint {what}, so they are not those of pi0-FAST",
            "name the folder of a pi0-FAST checkpoint, or set model.name to pi0 or pi05",
        )
        return
    yield from check_images_shown(model.cameras, config, sizes.images)
    options = yield from attempt("model.checkpoint", lambda: with_defaults(model, files))
    if options is None:
        return
    there = SimulatorSizes.of_config(config)
    robot = yield from read_robot(there, options, files)
    chunk = config.rollout.chunk_size
    yield from incompatibilities(sizes.horizon, chunk, robot, there, options.relative_action_dims)
    yield from _check_demonstrations(config, sizes)
    yield from _check_tokens(config, options, files, sizes, robot)


def _check_demonstrations(config: Config, sizes: Architecture) -> Iterator[ConfigIssue]:
    """Yield an issue if demonstrated chunks are not as long as those that the model writes."""
    learns = config.algorithm.needs(config).learns
    chunk = config.rollout.chunk_size
    if learns in (Learns.imitation, Learns.weighted_imitation) and chunk < sizes.horizon:
        yield ConfigIssue(
            "rollout.chunk_size",
            f"rollout.chunk_size = {chunk}, but an answer of the checkpoint is a chunk of {sizes.horizon} actions, "
            "so demonstrated ones must be, too",
            f"set it to {sizes.horizon}; eval.actions executes fewer of them",
            fix={"rollout.chunk_size": sizes.horizon},
        )


def _check_tokens(
    config: Config, model: Pi0FastConfig, files: CheckpointFiles, sizes: Architecture, robot: Robot | None
) -> Iterator[ConfigIssue]:
    """Yield issues if a tokenizer does not fit the model, or a known task description is too long."""
    states = 0 if robot is None or robot.states is None else len(robot.states)
    path = "model.checkpoint" if model.tokenizer is None else "model.tokenizer"
    text = yield from attempt(path, lambda: read_tokenizer(*files.tokenizer))
    if text is None:
        return
    source = "model.checkpoint" if model.action_tokenizer is None else "model.action_tokenizer"
    yield from attempt(source, lambda: Vocabulary.of(text, sizes, files.fast.size))
    prompts = Prompts(text, model.prompt_length or sizes.prompt_length, lower=model.convention is Convention.openpi)
    try:
        prompts.check(shown_descriptions(config), written_numbers(model, states))
    except PolicyError as error:
        yield ConfigIssue("model.prompt_length", str(error))
