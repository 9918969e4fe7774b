"""Checks of a small network against the checkpoint that it starts from, without torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import action_dim, acts_by_choice, fact, replay_of, state_dim
from embodyrl.config.schema import Config
from embodyrl.hub import is_hub_name
from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import (
    DESCRIPTION_FILE,
    SINGLE_FILE,
    read_description,
    read_json,
    refuse_other_weights,
    saved_model,
    weight_shapes,
)
from embodyrl.registry import SupportedModel
from embodyrl.runs import CHECKPOINTS, LAST

ACTOR = "actor."
"""Beginning of the names of weights that every such policy has."""
FREE = ("activation", "log_std_init", "denoising_steps", "critic_gradient", "cameras")
"""Options that change no name and no shape of a weight."""


def check_saved(config: Config) -> Iterator[ConfigIssue]:
    """Check that the weights of model.checkpoint are those of this model, with these options and sizes."""
    folder, name = Path(str(config.model.checkpoint)), config.model.name
    if config.model.checkpoint is None or is_hub_name(str(folder)) or not folder.is_dir():
        return  # other rules report the last
    try:
        refuse_other_weights(folder)
    except PolicyError as error:
        yield error.issue("model.checkpoint")
        return
    if not (folder / SINGLE_FILE).is_file():
        last = folder / CHECKPOINTS / LAST / "policy"
        yield ConfigIssue(
            "model.checkpoint",
            f"model.checkpoint = {str(folder)!r} holds no {SINGLE_FILE}",
            f"name {last if last.is_dir() else 'the folder `policy` of a checkpoint'}",
        )
        return
    try:
        other = saved_model(folder)
        shapes = weight_shapes(folder)
        saved, chunk_size = read_description(folder, name)
    except PolicyError as error:
        yield error.issue("model.checkpoint")
        return
    if other is not None and other != name:
        serves = replay_of(config) is None or fact(SupportedModel, other, "off_policy")
        yield ConfigIssue(
            ("model.checkpoint", "model.name"),
            f"model.checkpoint = {str(folder)!r} holds a policy of model {other!r}, and model is {name!r}",
            f"name one of model {name!r}, " + (f"set model to {other}, " if serves else "") + "or set it to null",
        )
    elif not any(each.startswith(ACTOR) for each in shapes):
        first = ", ".join(sorted(shapes)[:3])
        yield ConfigIssue(
            "model.checkpoint",
            f"{folder / SINGLE_FILE} holds {first or 'nothing'}{', ...' if len(shapes) > 3 else ''}, and no weight of "
            f"model {name!r} ({ACTOR}*)",
            "name the folder `policy` of a checkpoint of this model",
        )
    elif chunk_size is None:
        yield from _states_read(config, shapes)
    else:
        yield from _options(config, saved)
        yield from _sizes(config, read_json(folder / DESCRIPTION_FILE)["spec"])


def _options(config: Config, saved: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that options that decide about weights are those of the checkpoint."""
    here = json.loads(json.dumps(dataclasses.asdict(config.model)))
    others = [key for key, value in saved.items() if key not in FREE and key in here and here[key] != value]
    for key in others:
        if key == "head" and acts_by_choice(config):
            continue  # it has no such distribution
        # Which head an algorithm learns with is not a matter of choice.
        fixed = key == "head" and replay_of(config) is not None
        yield ConfigIssue(
            ("model.checkpoint", f"model.{key}"),
            f"model.{key} = {here[key]!r}, but the policy in {config.model.checkpoint} was saved with {saved[key]!r}",
            ("" if fixed else f"set model.{key} to {saved[key]}, or ")
            + f"name a checkpoint that has model.{key} = {here[key]!r}, or set model.checkpoint to null",
        )


def _states_read(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[ConfigIssue]:
    """Check that weights without a description read states of the simulator's size."""
    shape, state = shapes.get(f"{ACTOR}0.weight", ()), state_dim(config)
    if config.model.name == "mlp" and len(shape) == 2 and state not in (None, shape[1]):
        yield ConfigIssue(
            ("model.checkpoint", "env.name"),
            f"the policy in {config.model.checkpoint} reads states of {shape[1]} numbers, those of the simulator have "
            f"{state}",
            "name a checkpoint of this simulator, or set model.checkpoint to null",
        )


def _sizes(config: Config, spec: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that the checkpoint decides about chunks of this size, for a simulator with these sizes."""
    chunk = config.rollout.chunk_size
    if spec["chunk_size"] != chunk:
        yield ConfigIssue(
            ("model.checkpoint", "rollout.chunk_size"),
            f"rollout.chunk_size = {chunk}, but the policy in {config.model.checkpoint} was saved with "
            f"{spec['chunk_size']}",
            f"set rollout.chunk_size to {spec['chunk_size']}, or name another checkpoint",
        )
    state = state_dim(config) if getattr(config.model, "state", True) else None
    for what, found, wanted in (
        ("actions", spec.get("action_dim"), action_dim(config)),
        ("states", spec.get("proprio_dim") or None, state),
    ):
        if None not in (found, wanted) and found != wanted:
            yield ConfigIssue(
                ("model.checkpoint", "env.name"),
                f"the policy in {config.model.checkpoint} was saved for {what} of {found} numbers, those of the "
                f"simulator have {wanted}",
                "name a checkpoint of this simulator, or set model.checkpoint to null",
            )
