"""Checks of a config of ACT against its checkpoint. Reads no weights and imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import environment_state
from embodyrl.config.schema import Config
from embodyrl.envs import SimulatorSpec
from embodyrl.models.act.checkpoint import CheckpointFiles, Scales, files_before_simulator
from embodyrl.models.act.config import ACTConfig, Architecture
from embodyrl.models.lerobot import ENVIRONMENT, LerobotInfo
from embodyrl.models.vla.cameras import ABSENT, check_each_once, check_images_shown, check_there
from embodyrl.models.vla.config import StateInput
from embodyrl.models.vla.fits import SimulatorSizes, attempt, check_horizon, check_robot, note_executed


class ACTInfo(LerobotInfo):
    """ACT."""

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config of ACT."""
        model = config.model
        assert isinstance(model, ACTConfig)
        if model.checkpoint is not None and Path(model.checkpoint).is_dir():
            yield from _check_folder(config, model)
            return
        if environment_state(config) == (0, 0):  # else that may be all that it reads
            yield from check_there(config)
        if model.checkpoint is None:
            yield from _check_scratch(config, model)

    def notes(self, config: Config) -> Iterator[str]:
        """Yield a text if the checkpoint was meant to execute its chunks otherwise than the config does."""
        model = config.model
        assert isinstance(model, ACTConfig)
        if model.checkpoint is None or not Path(model.checkpoint).is_dir():
            return
        settings = CheckpointFiles.read(model).config
        coefficient, executed = settings["temporal_ensemble_coeff"], settings["n_action_steps"]
        if coefficient is not None and config.eval.ensemble is None:
            yield (
                f"the checkpoint was evaluated with temporal ensembling (temporal_ensemble_coeff {coefficient}); to do "
                f"so here: embodyrl eval with rollout.chunk_size={settings['chunk_size']} eval.ensemble={coefficient}"
            )
        elif coefficient is None:
            yield from note_executed(config, executed)


def _check_scratch(config: Config, model: ACTConfig) -> Iterator[ConfigIssue]:
    sizes = model.scratch
    if sizes.hidden_size % sizes.heads or sizes.hidden_size % 4:
        yield ConfigIssue(
            "model.scratch.hidden_size",
            f"model.scratch.hidden_size = {sizes.hidden_size} cannot be split among {sizes.heads} heads, or into the "
            "four parts of places in an image",
            "choose a multiple of both",
        )
    yield from check_each_once(model.cameras, config)
    if model.statistics is not None and Path(model.statistics).is_file():  # those of demonstrations may be yet to come
        there, statistics = SimulatorSizes.of_config(config), model.statistics
        scales = yield from attempt(
            "model.statistics", lambda: files_before_simulator(*there).with_statistics(statistics).scales()
        )
        if scales is not None:
            yield from _other_robot(scales, model, there, None)


def _check_folder(config: Config, model: ACTConfig) -> Iterator[ConfigIssue]:
    sizes = yield from attempt("model.checkpoint", lambda: CheckpointFiles.read(model).architecture)
    if sizes is None:
        return
    yield from _check_cameras(config, model, sizes)
    if ABSENT in model.cameras:
        yield ConfigIssue(
            "model.cameras",
            f"model.cameras names {ABSENT}, but this model has no way to see that an image is missing",
            "name a camera for each image",
        )
    path = "model.checkpoint" if model.statistics is None else "model.statistics"
    scales = yield from attempt(path, lambda: CheckpointFiles.of(model, None, config.rollout.chunk_size).scales())
    if scales is None:
        return
    size = config.env.image_size
    yield from _misfits(sizes, config.rollout.chunk_size, (size[0], size[-1]))
    yield from _other_robot(scales, model, SimulatorSizes.of_config(config), environment_state(config))


def _check_cameras(config: Config, model: ACTConfig, sizes: Architecture) -> Iterator[ConfigIssue]:
    """Yield an issue if the checkpoint's images are not those of the cameras."""
    if not sizes.images:
        if config.env.cameras:
            yield ConfigIssue(
                "env.cameras", "the checkpoint reads no images, and env.cameras is not empty", "set env.cameras to []"
            )
        return
    yield from check_there(config)
    yield from check_images_shown(model.cameras, config, sizes.images)


class StateParts(NamedTuple):
    """Which numbers of the state observation a model reads as what."""

    size: int
    """Numbers in the state observation."""
    robot: Sequence[int]
    """Those of the robot's state."""
    environment: Sequence[int]
    """Those of the environment's state; none if the model does not read it separately."""


def state_parts(sizes: Architecture, simulator: SimulatorSpec | None) -> StateParts:
    """Return the parts of a simulator's state observation; without a simulator the robot's numbers are followed by the
    environment's, as many as the network reads."""
    if simulator is None:
        first, size = sizes.state_dim, sizes.state_dim + sizes.environment_dim
        return StateParts(size, range(first), range(first, size))
    size, environment = simulator.proprio_dim, range(*simulator.environment_state)
    if not sizes.environment_dim:
        return StateParts(size, range(size), ())
    return StateParts(size, [number for number in range(size) if number not in environment], environment)


def incompatibilities(
    sizes: Architecture, scales: Scales, model: ACTConfig, chunk: int, simulator: SimulatorSpec | None
) -> Iterator[ConfigIssue]:
    """Yield an issue for each part of a checkpoint that does not fit a simulator."""
    there = simulator is not None and len(simulator.cameras) > 0 and len(sizes.images) > 0
    yield from _misfits(sizes, chunk, simulator.image_size if simulator is not None and there else None)
    if simulator is not None:
        yield from _other_robot(scales, model, SimulatorSizes.of(simulator), simulator.environment_state)


def _misfits(sizes: Architecture, chunk: int, shown: tuple[int, int] | None) -> Iterator[ConfigIssue]:
    """Yield an issue for each size of a config that the network does not have; `shown` is the images'."""
    yield from check_horizon(chunk, sizes.horizon)
    if shown is not None and sizes.images and shown != sizes.image_size:
        height, width = sizes.image_size
        yield ConfigIssue(
            "env.image_size",
            f"the simulator's images have {shown[0]} x {shown[1]} pixels, the checkpoint's {height} x {width}, and "
            "this model never resizes images",
            f"set env.image_size to [{height}, {width}]",
        )


def _other_robot(
    scales: Scales, model: ACTConfig, there: SimulatorSizes, environment: tuple[int, int] | None
) -> Iterator[ConfigIssue]:
    """Yield an issue for each size of a robot, or of the environment's state, that is not the simulator's."""
    proprio = there.proprio
    if scales.environment is not None and environment is not None:
        size, offered = len(scales.environment), environment[1] - environment[0]
        if size != offered:
            yield ConfigIssue(
                "model.checkpoint",
                f"the checkpoint reads {ENVIRONMENT} of {size} numbers, the simulator observes {offered or 'none'}",
                "choose observations that have it (env.kwargs; env.environment_state names it among the entries of a "
                "Dict), or a checkpoint without",
            )
            return
        proprio = None if proprio is None else proprio - offered
    rows = [("actions", scales.actions, there.action, "its matching controller")]
    if model.state is StateInput.token and scales.states is not None:
        rows.append(("states", scales.states, proprio, "other states with env.proprio, or set model.state to none"))
    for what, scale, wanted, instead in rows:
        yield from check_robot(what, len(scale), len(scale), wanted, settings=("model.statistics",), instead=instead)
