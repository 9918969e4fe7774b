"""Build policies on the meta device, for planning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from embodyrl.config.schema import ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import SteeringConfig
from embodyrl.models.policy import Policy
from embodyrl.models.saved import PUBLISHED
from embodyrl.planning.shapes import Assuming
from embodyrl.registry import SupportedModel

if TYPE_CHECKING:
    from embodyrl.models.flow.steering import SteeredPolicy


def build_weightless(config: ModelConfig, simulator: SimulatorSpec, *, chunk_size: int) -> tuple[Policy, str]:
    """Build the policy that `config` names on the meta device; also return the origin of its shape, for display.

    The shape is that of the checkpoint if it exists, without reading its weights; else that of the published model.

    Args:
        config: the model's options.
        simulator: the simulator's spec, as far as it is known; not used by models with a checkpoint.
        chunk_size: actions per chunk.

    Raises:
        PolicyError: the model does not fit the simulator, or its checkpoint does not exist and no size was published.
    """
    entry = SupportedModel.entry(config.name)
    policy_type: Callable[..., Policy] = entry.load()
    origin = "with random weights"
    known: SimulatorSpec | None = simulator
    if config.checkpoint is not None and Path(config.checkpoint).is_dir():
        origin, known = f"shape of {config.checkpoint}", None if entry.published else simulator
    elif config.checkpoint is not None:
        if entry.published is None:
            raise PolicyError(f"model.checkpoint = {config.checkpoint!r} does not exist, so its shape is not known")
        origin, known = f"{entry.published} (model.checkpoint is not there)", None
        config = dataclasses.replace(config, checkpoint=PUBLISHED)
    with Assuming(), torch.device("meta"):
        policy = policy_type(config, known, chunk_size)
    policy.name = config.name
    return policy, origin


def steered_weightless(policy: Policy, steering: SteeringConfig) -> SteeredPolicy:
    """Return a policy of `build_weightless` with a network on the meta device that steers it; raises what
    `models.flow.steering.steered` does."""
    from embodyrl.models.flow.steering import steered

    with Assuming(), torch.device("meta"):
        return steered(policy, steering, seed=0)
