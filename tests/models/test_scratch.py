"""Every size of a model with random weights (`model.scratch`) changes the model."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.models import PolicyObservation, build_policy
from embodyrl.registry import SupportedModel

CHUNK = 1
SPEC = SimulatorSpec(
    tasks={"push": "push the cube"},
    actions=(ActionField(name="arm", meaning="force", unit="N", low=(-1.0, -1.0), high=(1.0, 1.0)),),
    cameras=("front",),
    image_size=(64, 64),
    proprio_dim=3,
    max_episode_steps=10,
    control_frequency=1.0,
)


def with_scratch() -> list[str]:
    """Models that have sizes of their own."""
    found = []
    for name in SupportedModel.names():
        options: Any = SupportedModel.entry(name).load_options()
        if "scratch" in {each.name for each in dataclasses.fields(options)}:
            found.append(name)
    return found


def usual(name: str) -> Any:
    """Return a model's options as they are by themselves."""
    options: Any = SupportedModel.entry(name).load_options()
    return options(name=name)


def fingerprint(name: str, changes: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """Shapes and sums of a model's weights, and what it does."""
    config = usual(name)
    config = dataclasses.replace(config, scratch=dataclasses.replace(config.scratch, **changes))
    policy = build_policy(config, SPEC, chunk_size=CHUNK, seed=1)
    draw = np.random.default_rng(0)
    seen = Observation(
        images=draw.integers(0, 256, (1, 1, 64, 64, 3), dtype=np.uint8),
        proprio=np.ones((1, SPEC.proprio_dim), np.float32),
        task_descriptions=list(SPEC.tasks.values())[:1],
    )
    with torch.no_grad():
        inputs = policy.preprocess(PolicyObservation.of(seen))
        acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
        actions = torch.cat([acted.actions.flatten(), acted.logprobs.flatten()])  # tokens stay what they are for long
    return {key: (each.shape, float(each.double().sum())) for key, each in policy.state_dict().items()}, actions


def another(value: Any) -> Any:
    """Return another value of a setting; None: none is tried."""
    if isinstance(value, Enum):
        return next(each for each in type(value) if each is not value)
    if isinstance(value, list):
        return None  # image encoders, of which one is small enough for tests
    if isinstance(value, bool):
        return not value
    return CHUNK + 1 if value is None else 2 * value


@pytest.mark.parametrize("name", with_scratch())
def test_every_size_counts(name: str) -> None:
    if missing := SupportedModel.entry(name).missing():
        pytest.skip(f"{name} needs {missing[0].module}: {missing[0].install}")
    weights, actions = fingerprint(name, {})
    dead = []
    for setting in dataclasses.fields(usual(name).scratch):
        value = another(getattr(usual(name).scratch, setting.name))
        if value is not None:
            other, moved = fingerprint(name, {setting.name: value})
            if other == weights and torch.equal(actions, moved):
                dead.append(setting.name)
    assert not dead, "settings that nothing reads"
