"""In what LeRobot and openpi differ about the same weights, and whose way a checkpoint was trained in. Nothing here
imports torch, so that it can be said before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from embodyrl.config.schema import Config
from embodyrl.models.companions import parse_json
from embodyrl.models.errors import PolicyError
from embodyrl.models.pi.architecture import Architecture
from embodyrl.models.pi.files import CheckpointFiles
from embodyrl.models.pi.layout import LEROBOT
from embodyrl.models.pi.options import DenoisingTimes, Pi05Config, PiConfig, StateInput
from embodyrl.models.saved import with_kept

PREPROCESSOR = "policy_preprocessor.json"
"""LeRobot's list of what it does to an observation."""
WRITES_STATE = "pi05_prepare_state_tokenizer_processor_step"
"""The step that writes a state into the prompt. Its name is the same in all versions; up to LeRobot 0.4.4 it fills the
state up to the model's width first, from 0.5.0 on it does not."""
SINCE_0_5_1 = ("delta_actions_processor", "relative_actions_processor")
"""A step that lists have from LeRobot 0.5.1 on, under its two names; config.json has `use_relative_actions` then. No
file tells 0.5.0, which was the newest for a month, from 0.4."""

Options = TypeVar("Options", bound=PiConfig)


def settled(config: Options, files: CheckpointFiles) -> Options:
    """Return the options with what they leave open (null) of the prompt and the times: as a saved policy had it, else
    as the files say.

    Raises:
        PolicyError: a file that says it is damaged.
    """
    folder = Path(config.checkpoint or "")
    options = with_kept(config, folder) if config.checkpoint is not None and folder.is_dir() else config
    found: dict[str, Any] = {"denoising_times": _times(options.denoising_times, files)}
    if isinstance(options, Pi05Config) and options.padded_state is None:
        found["padded_state"] = pads_state(files)
    return dataclasses.replace(options, **found)


def _times(wanted: str | None, files: CheckpointFiles) -> DenoisingTimes:
    """What is wanted, else what the layout of the weights says."""
    if wanted is None:
        return DenoisingTimes.divided if files.layout.prefix == LEROBOT else DenoisingTimes.summed
    if wanted not in list(DenoisingTimes):
        raise PolicyError(f"the checkpoint was saved with denoising_times = {wanted!r}: set model.denoising_times")
    return DenoisingTimes(wanted)


def pads_state(files: CheckpointFiles) -> bool:
    """Return whether a checkpoint's prompts hold the state filled up with zeros to the model's width.

    Raises:
        PolicyError: the list of LeRobot's steps is damaged.
    """
    content = files.companions.get(PREPROCESSOR)
    if content is None:
        return False
    steps = parse_json(content, PREPROCESSOR).get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise PolicyError(f"{PREPROCESSOR}: steps is {steps!r:.60}, a list of steps was expected: download it again")
    names = [step.get("registry_name") for step in steps]
    is_newer = "use_relative_actions" in files.config or any(name in names for name in SINCE_0_5_1)
    return WRITES_STATE in names and not is_newer


def writes_padded(config: PiConfig) -> bool:
    """Return whether settled options fill up the state before it is written into the prompt."""
    return isinstance(config, Pi05Config) and config.state is StateInput.prompt and bool(config.padded_state)


def notes(config: Config) -> Iterator[str]:
    """Say which way a checkpoint's prompts and denoising times go, and how to choose the other one."""
    model = config.model
    assert isinstance(model, PiConfig)
    if model.checkpoint is None or not Path(model.checkpoint).is_dir():
        return
    files = CheckpointFiles.read(Path(model.checkpoint), tokenizer=model.tokenizer)
    options, kept = settled(model, files), with_kept(model, Path(model.checkpoint))
    if isinstance(options, Pi05Config) and options.state is StateInput.prompt:
        assert isinstance(model, Pi05Config) and isinstance(kept, Pi05Config)
        width = Architecture.from_config(model.name, files.config, expert_head=False).state_dim
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


def _reason(name: str, given: PiConfig, kept: PiConfig) -> str:
    if getattr(given, name) is not None:
        return f"model.{name}"
    if getattr(kept, name) is not None:
        return f"as the policy was saved; model.{name} changes it"
    return f"by the checkpoint's files; model.{name} changes it"
