"""Checks of a config of GR00T against its checkpoint. Reads no weights and imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import shown_descriptions
from embodyrl.config.schema import Config
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import FlowInfo, FlowSizes, told_texts
from embodyrl.models.gr00t.checkpoint import CheckpointFiles, Robot, choose_robot, read_statistics
from embodyrl.models.gr00t.config import Architecture, Gr00tConfig, ValueInput, embodiment_number
from embodyrl.models.gr00t.prompts import PromptError, Prompts, Write, prompt
from embodyrl.models.saved import open_shard, shard_files, with_kept
from embodyrl.models.vla.fits import (
    SimulatorSizes,
    attempt,
    check_heads,
    check_horizon,
    check_patches,
    check_without_checkpoint,
)
from embodyrl.models.vla.prompts import TOKENIZER
from embodyrl.screen import counted

PREDICTS = "the model denoises {horizon} actions at a time"


class Gr00tInfo(FlowInfo):
    """GR00T."""

    def sizes(self, model: Gr00tConfig, chunk_size: int) -> FlowSizes:
        """Return the sizes that steering depends on, from the files of the checkpoint.

        Raises:
            PolicyError: these are missing or damaged.
        """
        sizes = CheckpointFiles.read(model).architecture
        sees_state = model.value_input is ValueInput.vl_and_state
        return FlowSizes(sizes.action_horizon, sizes.max_action_dim, sizes.width + sizes.dit.width * sees_state)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config of GR00T."""
        model = config.model
        assert isinstance(model, Gr00tConfig)
        yield from super().check(config)
        if not config.env.cameras:
            yield ConfigIssue(
                "env.cameras", f"env.cameras is empty, but model {model.name!r} needs images", "name a camera"
            )
        yield from check_adapters(config)
        if model.checkpoint is None:
            yield from _check_scratch(config, model)
        elif Path(model.checkpoint).is_dir():
            yield from _check_folder(config, model)


def check_adapters(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue if adapters go around a vision-language model that stays as it is."""
    model: Any = config.model
    if model.freeze_vision and model.freeze_language and config.engine.lora.rank:
        yield ConfigIssue(
            "engine.lora.rank",
            f"engine.lora.rank = {config.engine.lora.rank} puts adapters around the vision-language model, which "
            "model.freeze_vision and model.freeze_language leave as it is",
            "set one of these to false, or engine.lora.rank to 0",
        )


def check_one_robot(number: int | None) -> Iterator[ConfigIssue]:
    """Yield an issue if a model without a checkpoint is asked for the networks of another robot."""
    if number:
        yield ConfigIssue(
            "model.embodiment_id",
            f"model.embodiment_id = {number}, but a model without a checkpoint has networks for one robot only",
            "set it to null",
        )


def _check_scratch(config: Config, model: Gr00tConfig) -> Iterator[ConfigIssue]:
    scratch, chunk = model.scratch, config.rollout.chunk_size
    yield from _check_own_statistics(config, model)
    yield from check_without_checkpoint(model, "tokenizer")
    yield from check_one_robot(model.embodiment_id)
    yield from check_patches(scratch.image_size, scratch.patch_size)
    yield from check_horizon(chunk, scratch.action_horizon or chunk, predicts=PREDICTS)
    yield from check_heads(scratch, "vision_size", "hidden_size", "action_size")


def _check_own_statistics(config: Config, model: Gr00tConfig) -> Iterator[ConfigIssue]:
    """Check the statistics of a model with random weights."""
    if model.statistics is None:
        for name in ("embodiment_tag", "video_keys", "state_keys", "action_keys"):
            if getattr(model, name) is not None:
                yield ConfigIssue(
                    f"model.{name}",
                    f"model.{name} chooses from statistics, but model.checkpoint and model.statistics are null",
                    "set model.statistics, or leave it out",
                )
        return
    if not Path(model.statistics).exists():  # demonstrations may be yet to come
        return
    path = Path(model.statistics)
    robot = yield from attempt("model.statistics", lambda: robot_of(*read_statistics(path), model))
    if robot is None:
        return
    sizes = SimulatorSizes.of_config(config)
    for what, found, there in (("a state", robot.state, sizes.proprio), ("an action", robot.action, sizes.action)):
        if there is not None and len(found) != there:
            yield ConfigIssue(
                "model.statistics",
                f"model.statistics are of {what} with {len(found)} numbers, the simulator has {there}",
                "name statistics of demonstrations by this robot (data.path, too, if they are from there)",
            )


def _check_folder(config: Config, model: Gr00tConfig) -> Iterator[ConfigIssue]:
    try:
        files = CheckpointFiles.read(model)
        sizes = files.architecture
        for path in shard_files(Path(str(model.checkpoint))):
            open_shard(path, "np")
        robot = robot_of(files.metadata, files.origin, model)
    except PolicyError as error:
        yield error.issue("model.checkpoint")
        return
    yield from attempt(
        "model.embodiment_id", lambda: embodiment_number(robot.tag, model.embodiment_id, sizes.embodiments)
    )
    cameras = len(config.env.cameras)
    yield from incompatibilities(robot, sizes, config.rollout.chunk_size, cameras, SimulatorSizes.of_config(config))
    if TOKENIZER in files.companions and cameras:  # the other form cannot be read without torch
        yield from _check_prompts(config, with_kept(model, Path(str(model.checkpoint))), files)


def _check_prompts(config: Config, model: Gr00tConfig, files: CheckpointFiles) -> Iterator[ConfigIssue]:
    """Yield issues if the tokenizer does not fit the model, or a known task description is too long."""
    sizes = files.architecture
    try:
        Prompts(
            files.companions,
            write=writer(model, len(config.env.cameras), sizes),
            image_token=sizes.image_token,
            images=len(config.env.cameras),
            tasks=told_texts(shown_descriptions(config), model.indicator),
            padding=model.padding,
            length=model.prompt_length,
        )
    except PromptError as error:
        yield ConfigIssue("model.prompt_length", str(error))
    except PolicyError as error:
        path = "model.checkpoint" if model.tokenizer is None else "model.tokenizer"
        yield error.issue(path)


def writer(model: Gr00tConfig, images: int, sizes: Architecture) -> Write:
    """Return how prompts with a number of images are written."""
    return partial(prompt, images=images, pieces=sizes.image_tokens, listed=model.listed_task)


def robot_of(metadata: Mapping[str, Any], origin: str, model: Gr00tConfig) -> Robot:
    """Return the robot that a config chooses; see `choose_robot`."""
    return choose_robot(
        metadata,
        model.embodiment_tag,
        origin=origin,
        video_keys=model.video_keys,
        state_keys=model.state_keys,
        action_keys=model.action_keys,
    )


def incompatibilities(
    robot: Robot, sizes: Architecture, chunk: int, cameras: int | None, there: SimulatorSizes
) -> Iterator[ConfigIssue]:
    """Yield an issue for each part of a checkpoint that does not fit a simulator."""
    state, action = robot.state, robot.action
    if robot.cameras is not None and cameras is not None and len(robot.cameras) != cameras:
        yield ConfigIssue(
            "env.cameras",
            f"env.cameras names {counted(cameras, 'camera')}, but the checkpoint was trained with "
            f"{counted(len(robot.cameras), 'image')}: {', '.join(robot.cameras)}",
            "name a camera of the simulator for each, or choose some of them with model.video_keys",
        )
    yield from check_horizon(chunk, sizes.action_horizon, predicts=PREDICTS)
    for name, ranges, most in (("state", state, sizes.max_state_dim), ("action", action, sizes.max_action_dim)):
        if len(ranges) > most:
            yield ConfigIssue(
                f"model.{name}_keys",
                f"the {name} of {robot.tag!r} has {len(ranges)} numbers ({', '.join(ranges.parts)}), but the "
                f"checkpoint takes {most} at most",
                f"choose some of them with model.{name}_keys",
            )
    for name, ranges, wanted, instead in (
        ("state", state, there.proprio, "other states with env.proprio"),
        ("action", action, there.action, "statistics of this robot with model.statistics"),
    ):
        if wanted is not None and len(ranges) != wanted:
            yield ConfigIssue(
                f"model.{name}_keys",
                f"the statistics of {robot.tag!r} describe {'an' if name == 'action' else 'a'} {name} of {len(ranges)} "
                f"numbers ({', '.join(ranges.parts) or 'none'}), the simulator has {wanted}",
                f"choose its parts with model.{name}_keys, or {instead}",
            )
