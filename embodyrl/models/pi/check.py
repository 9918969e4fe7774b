"""What is wrong with a config of pi0 or pi0.5 and its checkpoint, told without reading weights or importing torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from embodyrl.config.rules import state_dim
from embodyrl.config.schema import Config
from embodyrl.models.companions import choose_key
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.check import Objection
from embodyrl.models.flow.check import check as check_flow
from embodyrl.models.pi.architecture import Architecture
from embodyrl.models.pi.files import NUMBERS, CheckpointFiles
from embodyrl.models.pi.options import Frozen, PiConfig, StateInput
from embodyrl.registry import near_match

ABSENT = "absent"


@dataclass(frozen=True)
class Cameras:
    """Which of a simulator's cameras a model sees."""

    used: tuple[str, ...]
    """All of the simulator's."""
    order: tuple[int, ...]
    """Their numbers, in the model's order."""


def choose_cameras(wanted: Sequence[str], there: Sequence[str] | None, architecture: Architecture) -> Cameras:
    """Match a checkpoint's pictures with a simulator's cameras.

    Absent pictures are left out: public code shows black ones, which it then masks everywhere.

    Args:
        wanted: `model.cameras`.
        there: the simulator's cameras; None: whatever is wanted.
        architecture: what the checkpoint sees.

    Raises:
        PolicyError: the checkpoint expects a picture that nothing was said about, or that the simulator lacks.
    """
    pictures = architecture.pictures
    cameras = tuple(there) if there is not None else tuple(name for name in wanted or pictures if name != ABSENT)
    names = tuple(wanted) or cameras
    if len(names) != len(pictures):
        raise PolicyError(
            f"the checkpoint expects {len(pictures)} picture(s) ({', '.join(pictures)}), {len(names)} are named "
            f"({', '.join(names) or 'none'}): set model.cameras to a camera, or `{ABSENT}`, for each"
        )
    for name in names:
        if name != ABSENT and name not in cameras:
            near = near_match(name, list(cameras))
            hint = f" - did you mean {near!r}?" if near else ""
            raise PolicyError(f"env.cameras has no {name!r}{hint} (has: {', '.join(cameras) or 'none'})")
    shown = [name for name in names if name != ABSENT]
    unseen = [name for name in cameras if name not in shown]
    if unseen or not shown:
        raise PolicyError(
            f"the model does not look at {', '.join(unseen)}: remove it from env.cameras, or name it in model.cameras"
            if unseen
            else "the model needs pictures: set env.cameras"
        )
    return Cameras(cameras, tuple(cameras.index(name) for name in shown))


def check(config: Config) -> Iterator[Objection]:
    """Object to what pi0 and pi0.5 cannot do."""
    model = config.model
    assert isinstance(model, PiConfig)
    yield from check_flow(config)
    own, other = (StateInput.token, "pi05") if model.name == "pi0" else (StateInput.prompt, "pi0")
    if model.state not in (own, StateInput.none):
        yield (
            "model.state",
            f"model.state = {model.state.value}, which model {model.name!r} has no place for",
            f"set it to {own.value} or none, or model.name to {other}",
        )
    if model.frozen is Frozen.language and config.engine.lora.rank:
        yield (
            "engine.lora.rank",
            f"engine.lora.rank = {config.engine.lora.rank} puts adapters around the language model, which "
            "model.frozen = language leaves as it is",
            "set model.frozen to vision or nothing, or engine.lora.rank to 0",
        )
    if model.checkpoint is None:
        yield from _check_scratch(model)
        if not config.env.cameras:
            yield "env.cameras", f"model {model.name!r} needs pictures, and env.cameras is empty", "name a camera"
    elif Path(model.checkpoint).is_dir():
        yield from _check_folder(config, model, Path(model.checkpoint))


def _check_scratch(model: PiConfig) -> Iterator[Objection]:
    sizes = model.scratch
    if sizes.image_size % sizes.patch_size:
        yield (
            "model.scratch.patch_size",
            f"a picture of model.scratch.image_size = {sizes.image_size} cannot be cut into patches of "
            f"{sizes.patch_size} pixels",
            "choose a divisor",
        )
    for name in ("hidden_size", "expert_size", "vision_size"):
        if getattr(sizes, name) % sizes.heads:
            yield (
                f"model.scratch.{name}",
                f"model.scratch.{name} = {getattr(sizes, name)} cannot be split among {sizes.heads} heads",
                "choose a multiple",
            )
    for name in ("tokenizer", "unnorm_key"):
        if getattr(model, name) is not None:
            yield (
                f"model.{name}",
                f"model.{name} is set, but model.checkpoint is null",
                "name the weights it belongs to",
            )


def _check_folder(config: Config, model: PiConfig, folder: Path) -> Iterator[Objection]:
    try:
        files = CheckpointFiles.read(folder, tokenizer=model.tokenizer, statistics=model.statistics)
        architecture = Architecture.from_config(model.name, files.config, expert_head=files.layout.expert_head)
        _ = files.tokenizer
        statistics = files.statistics
    except PolicyError as error:
        yield "model.checkpoint", f"model.checkpoint: {error}", ""
        return
    if config.rollout.chunk_size > architecture.horizon:
        yield (
            "rollout.chunk_size",
            f"rollout.chunk_size = {config.rollout.chunk_size}, but the checkpoint gives {architecture.horizon} "
            "actions at once",
            f"set rollout.chunk_size to {architecture.horizon} or less",
        )
    try:
        choose_cameras(model.cameras, config.env.cameras, architecture)
    except PolicyError as error:
        yield "model.cameras", str(error), ""
    try:
        chosen = statistics[choose_key(statistics, model.unnorm_key)]
    except PolicyError as error:
        yield "model.unnorm_key", f"model.unnorm_key: {error}", ""
        return
    needed = ("actions",) if model.state is StateInput.none and not model.relative_entries else ("state", "actions")
    for key in needed:
        lacking = [name for name in NUMBERS[model.normalization] if name not in chosen.get(key, {})]
        if lacking:
            yield (
                "model.normalization",
                f"model.normalization = {model.normalization.value} needs {', '.join(lacking)} of {key}, which the "
                "checkpoint's statistics lack",
                "choose the other normalization, or other statistics",
            )
    states = len(chosen.get("state", {}).get(NUMBERS[model.normalization][0], ()))
    if states > architecture.state_dim:
        yield (
            "model.unnorm_key",
            f"the statistics are of states with {states} numbers, the checkpoint takes {architecture.state_dim}",
            "choose statistics of another robot",
        )
    there = state_dim(config)
    if "state" in needed and there is not None and states != there:
        yield (
            "env.proprio",
            f"the statistics are of states with {states} numbers, the simulator has {there}",
            "set model.unnorm_key to statistics of this robot, or env.proprio to other states",
        )
