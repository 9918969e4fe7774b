"""Checks of a config of GR00T N1.7 or N1.6 against its checkpoint. Reads no weights and imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import shown_descriptions
from embodyrl.config.schema import Config
from embodyrl.hub import is_hub_name
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import FlowInfo, FlowSizes, told_texts
from embodyrl.models.gr00t.check import PREDICTS, check_adapters, check_one_robot
from embodyrl.models.gr00t.config import ValueInput
from embodyrl.models.gr00t.prompts import PromptError
from embodyrl.models.gr00t_n17.checkpoint import CheckpointFiles
from embodyrl.models.gr00t_n17.config import VLM, Gr00tN17Config
from embodyrl.models.gr00t_n17.robots import Robot
from embodyrl.models.lerobot import LerobotInfo
from embodyrl.models.saved import with_kept
from embodyrl.models.vla.cameras import check_there
from embodyrl.models.vla.config import StateInput
from embodyrl.models.vla.fits import (
    SimulatorSizes,
    attempt,
    check_horizon,
    check_patches,
    check_without_checkpoint,
    note_executed,
)
from embodyrl.screen import counted


class Gr00tN17Info(FlowInfo, LerobotInfo):
    """GR00T N1.7 and N1.6."""

    def sizes(self, model: Gr00tN17Config, chunk_size: int) -> FlowSizes:
        """Return the sizes that steering depends on, from the files of the checkpoint.

        Raises:
            PolicyError: these are missing or damaged.
        """
        sizes = CheckpointFiles.read(model).architecture
        sees_state = model.value_input is ValueInput.vl_and_state
        width = sizes.width + sizes.head.dit.width * sees_state
        return FlowSizes(sizes.action_horizon, sizes.head.max_action_dim, width)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config of GR00T."""
        model = config.model
        assert isinstance(model, Gr00tN17Config)
        yield from super().check(config)
        yield from check_there(config)
        yield from check_adapters(config)
        if model.checkpoint is None:
            yield from _check_scratch(config, model)
        elif Path(model.checkpoint).is_dir() and not is_hub_name(model.vlm):  # which is a fault already
            yield from _check_folder(config, model)

    def notes(self, config: Config) -> Iterator[str]:
        """Yield texts if the checkpoint was meant to act otherwise than the config says."""
        model = config.model
        assert isinstance(model, Gr00tN17Config)
        if model.checkpoint is not None and Path(model.checkpoint).is_dir():
            files = CheckpointFiles.read(model)
            yield from note_executed(config, files.written.get("n_action_steps"))
            if (steps := files.architecture.steps) != model.denoising_steps:
                yield (
                    f"the checkpoint states {steps} denoising steps (num_inference_timesteps), here there are "
                    f"model.denoising_steps={model.denoising_steps}"
                )
            if (frames := files.robot.frames) > 1:
                yield (
                    f"the checkpoint reads {frames} images of each camera, taken one after the other (delta_indices); "
                    "here it gets the newest one as often"
                )


def _check_scratch(config: Config, model: Gr00tN17Config) -> Iterator[ConfigIssue]:
    scratch, chunk = model.scratch, config.rollout.chunk_size
    yield from check_without_checkpoint(model, "vlm")
    yield from check_one_robot(model.embodiment_id)
    yield from check_patches(scratch.image_size, scratch.patch_size, joined=2)
    yield from check_horizon(chunk, scratch.action_horizon or chunk, predicts=PREDICTS)
    for name, least in (("vision_size", 4), ("hidden_size", 6), ("action_size", 1)):
        size = getattr(scratch, name)
        if (
            size % scratch.heads
            or size < least * scratch.heads
            or (name != "action_size" and size // scratch.heads % 2)
        ):
            yield ConfigIssue(
                f"model.scratch.{name}",
                f"model.scratch.{name} = {size} cannot be split among {scratch.heads} heads",
                f"choose a larger multiple of {2 * scratch.heads}",
            )


def _check_folder(config: Config, model: Gr00tN17Config) -> Iterator[ConfigIssue]:
    try:
        files = CheckpointFiles.read(model)
        for found in (files.architecture, files.geometry):  # which are read once they are asked for
            assert found is not None
    except PolicyError as error:
        yield _issue(error, model)
        return
    robot = yield from attempt("model.embodiment_tag", lambda: files.robot)
    if robot is None:
        return
    robot = read_by(robot, model.state)
    yield from attempt("model.embodiment_tag", lambda: files.embodiment(model.embodiment_id))
    cameras = config.env.cameras
    yield from incompatibilities(files, robot, config.rollout.chunk_size, cameras, SimulatorSizes.of_config(config))
    if cameras:
        yield from _check_prompts(config, with_kept(model, Path(str(model.checkpoint))), files, robot)


def _check_prompts(
    config: Config, model: Gr00tN17Config, files: CheckpointFiles, robot: Robot
) -> Iterator[ConfigIssue]:
    """Yield issues if the tokenizer does not fit the model, or a known task description is too long."""
    height, width = config.env.image_size
    images = len(config.env.cameras) * robot.frames
    try:
        files.prompts(
            (height, width), images, told_texts(shown_descriptions(config), model.indicator), model.prompt_length
        )
    except PromptError as error:
        yield ConfigIssue("model.prompt_length", str(error))
    except PolicyError as error:
        yield _issue(error, model, "model.vlm")


def _issue(error: PolicyError, model: Gr00tN17Config, setting: str | None = None) -> ConfigIssue:
    """Return an error as the fault of a setting, by default of the one that it is about; files of `model.vlm` have the
    names that they have there."""
    text = error.message
    if setting is None and model.statistics is not None and model.statistics in text:
        setting = "model.statistics"
    elif setting is None:
        of_vlm = VLM in text or (model.vlm is not None and model.vlm in text)
        setting = "model.vlm" if of_vlm else "model.checkpoint"
    if model.vlm is not None:
        text = text.replace(f"{VLM}/", f"{Path(model.vlm)}/")
    return PolicyError(text, error.remedy).issue(setting)


def read_by(robot: Robot, state: StateInput) -> Robot:
    """Return a robot without its state if nothing reads it: neither the network nor relative actions."""
    is_read = state is StateInput.token or any(group.reference is not None for group in robot.action)
    return robot if is_read else dataclasses.replace(robot, state=())


def incompatibilities(
    files: CheckpointFiles,
    robot: Robot,
    chunk: int,
    cameras: Sequence[str] | None,
    there: SimulatorSizes,
) -> Iterator[ConfigIssue]:
    """Yield an issue for each part of a checkpoint that does not fit a simulator.

    Args:
        files: of the checkpoint.
        robot: that is chosen from them.
        chunk: actions per chunk.
        cameras: of the simulator; None: there is none.
        there: sizes of the simulator.
    """
    sizes = files.architecture
    if cameras is not None and robot.cameras is not None and len(robot.cameras) != len(cameras):
        yield ConfigIssue(
            "env.cameras",
            f"env.cameras names {counted(len(cameras), 'camera')}, but the checkpoint was trained with "
            f"{counted(len(robot.cameras), 'image')} of {robot.tag!r}: {', '.join(robot.cameras)}",
            "name a camera of the simulator for each, in this order",
        )
    horizon, predicts = sizes.action_horizon, PREDICTS
    if robot.steps is not None and robot.steps > horizon:
        yield ConfigIssue(
            "model.checkpoint",
            f"{files.processing.file}: {robot.tag}.action.delta_indices names {robot.steps} steps, but "
            f"{PREDICTS.format(horizon=horizon)} (action_horizon)",
            "download both files of the same checkpoint",
        )
    elif robot.steps is not None and robot.steps < horizon:
        horizon = robot.steps
        predicts = f"only {{horizon}} actions of {robot.tag!r} mean something (delta_indices); further ones are noise"
    yield from check_horizon(chunk, horizon, predicts=predicts)
    rows = (
        (
            "state",
            "a state",
            robot.state,
            robot.encoded_state_dim,
            sizes.head.max_state_dim,
            there.proprio,
            robot.state_dim,
        ),
        (
            "action",
            "an action",
            robot.action,
            robot.action_dim,
            sizes.head.max_action_dim,
            there.action,
            robot.action_dim,
        ),
    )
    for name, what, groups, encoded, most, wanted, size in rows:
        listed = ", ".join(f"{group.key} {group.size}" for group in groups) or "nothing"
        if encoded > most:
            yield ConfigIssue(
                "model.embodiment_tag",
                f"{what} of {robot.tag!r} has {encoded} numbers ({listed}), but the checkpoint takes {most} at most",
                "choose another robot",
            )
        if wanted is not None and size != wanted and groups:
            yield ConfigIssue(
                "model.embodiment_tag",
                f"{what} of {robot.tag!r} has {size} numbers ({listed}), the simulator's has {wanted}",
                "choose another robot, set model.statistics to those of this one"
                + (", or choose other states with env.proprio" if name == "state" else ""),
            )
