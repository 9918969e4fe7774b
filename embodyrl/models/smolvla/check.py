"""Checks of a config of SmolVLA against its checkpoint. Reads no weights and imports no torch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import shown_descriptions
from embodyrl.config.schema import Config
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import FlowInfo, FlowSizes, told_texts
from embodyrl.models.lerobot import LerobotInfo, Robot
from embodyrl.models.smolvla.checkpoint import CheckpointFiles, files_before_simulator
from embodyrl.models.smolvla.config import Architecture, SmolVLAConfig
from embodyrl.models.smolvla.prompts import Prompts
from embodyrl.models.vla.cameras import check_chosen, check_images_shown, check_there
from embodyrl.models.vla.config import Frozen
from embodyrl.models.vla.fits import (
    SimulatorSizes,
    attempt,
    check_horizon,
    check_patches,
    check_sizes,
    check_without_checkpoint,
    note_executed,
)

STATES = "other states with env.proprio, or set model.state to none"
"""What could be changed if the statistics are of other states than the simulator's."""


class SmolVLAInfo(FlowInfo, LerobotInfo):
    """SmolVLA."""

    def sizes(self, model: SmolVLAConfig, chunk_size: int) -> FlowSizes:
        """Return the sizes that steering depends on, from the files of the checkpoint.

        Raises:
            PolicyError: these are missing or damaged.
        """
        sizes = CheckpointFiles.read(model).architecture
        return FlowSizes(model.horizon or chunk_size, sizes.action_dim, sizes.expert.width)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config of SmolVLA."""
        model = config.model
        assert isinstance(model, SmolVLAConfig)
        yield from super().check(config)
        yield from check_there(config)
        if model.horizon is not None and model.horizon < config.rollout.chunk_size:
            yield ConfigIssue(
                "model.horizon",
                f"model.horizon = {model.horizon} is less than rollout.chunk_size = {config.rollout.chunk_size}",
                "set it to that number or more, or to null",
            )
        if model.checkpoint is None:
            yield from _check_scratch(config, model)
        elif Path(model.checkpoint).is_dir():
            yield from _check_folder(config, model)

    def notes(self, config: Config) -> Iterator[str]:
        """Yield a text if the checkpoint was meant to execute its chunks otherwise than the config does."""
        model = config.model
        assert isinstance(model, SmolVLAConfig)
        if model.checkpoint is not None and Path(model.checkpoint).is_dir():
            yield from note_executed(config, CheckpointFiles.read(model).config.get("n_action_steps"))


def _check_scratch(config: Config, model: SmolVLAConfig) -> Iterator[ConfigIssue]:
    sizes = model.scratch
    yield from check_patches(sizes.image_size, sizes.patch_size)
    patches = sizes.image_size // sizes.patch_size
    if patches % sizes.shuffle:
        yield ConfigIssue(
            "model.scratch.shuffle",
            f"an image of {patches} x {patches} patches cannot be cut into squares of model.scratch.shuffle = "
            f"{sizes.shuffle}",
            "choose a divisor",
        )
    for name in ("vision_size", "hidden_size"):
        if getattr(sizes, name) % sizes.heads or getattr(sizes, name) < 2 * sizes.heads:
            yield ConfigIssue(
                f"model.scratch.{name}",
                f"model.scratch.{name} = {getattr(sizes, name)} cannot be split among {sizes.heads} heads",
                "choose a larger multiple",
            )
    width = int(sizes.hidden_size * sizes.expert_width)
    if width < 2 or width % 2:
        yield ConfigIssue(
            "model.scratch.expert_width",
            f"model.scratch.expert_width = {sizes.expert_width} makes the action expert {width} wide",
            "choose another, so that int(hidden_size * expert_width) is even",
        )
    if model.frozen is not Frozen.nothing:
        yield ConfigIssue(
            "model.frozen",
            f"model.frozen = {model.frozen.value} leaves random weights as they are, because model.checkpoint is null",
            "set model.frozen to nothing, or name a checkpoint",
            fix={"model.frozen": "nothing"},
        )
    yield from check_without_checkpoint(model, "vlm")
    yield from check_chosen(model.cameras, config)
    if model.statistics is not None and Path(model.statistics).is_file():  # those of demonstrations may be yet to come
        there = SimulatorSizes.of_config(config)
        robot = yield from _read_robot(files_before_simulator(config.env.cameras, sizes.image_size, *there), model)
        yield from check_sizes(robot, there, "model.statistics", states=STATES)


def _check_folder(config: Config, model: SmolVLAConfig) -> Iterator[ConfigIssue]:
    try:
        files = CheckpointFiles.read(model)
        architecture, tokenizer = files.architecture, files.tokenizer
    except PolicyError as error:
        path = "model.vlm" if "model.vlm" in str(error) else "model.checkpoint"
        yield error.issue(path)
        return
    yield from check_images_shown(model.cameras, config, architecture.images)
    robot = yield from _read_robot(files, model)
    yield from incompatibilities(
        architecture, robot, model, config.rollout.chunk_size, SimulatorSizes.of_config(config)
    )
    length = model.prompt_length or architecture.prompt_length
    prompts = Prompts(tokenizer, pad=architecture.pad_token, length=length)
    try:
        for task in told_texts(shown_descriptions(config), model.indicator):
            prompts.ids(task)
    except PolicyError as error:
        yield ConfigIssue("model.prompt_length", str(error))


def _read_robot(files: CheckpointFiles, model: SmolVLAConfig) -> Generator[ConfigIssue, None, Robot | None]:
    """Return the normalisation of states and actions; None if it cannot be read, which yields an issue."""
    named = model.statistics
    return (
        yield from attempt(
            "model.checkpoint" if named is None else "model.statistics",
            lambda: (files if named is None else files.with_statistics(named)).robot(model),
        )
    )


def incompatibilities(
    sizes: Architecture, robot: Robot | None, model: SmolVLAConfig, chunk: int, there: SimulatorSizes
) -> Iterator[ConfigIssue]:
    """Yield an issue for each part of a checkpoint that does not fit a simulator."""
    yield from check_horizon(chunk, sizes.horizon)
    yield from check_horizon(model.horizon or 0, sizes.horizon, "model.horizon")
    most = (sizes.state_dim, sizes.action_dim)
    yield from check_sizes(robot, there, "model.statistics", states=STATES, most=most)
