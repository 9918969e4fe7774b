"""From a config to a policy."""

from __future__ import annotations

from pathlib import Path

import torch

from embodyrl.config.schema import ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.models.policy import Policy
from embodyrl.registry import SupportedModel
from embodyrl.seeding import derive_seed


def build_policy(config: ModelConfig, simulator: SimulatorSpec, *, chunk_size: int, seed: int) -> Policy:
    """Build the policy that `config` names, with weights that depend on `seed` alone or come from `config.checkpoint`.

    Raises:
        PolicyError: the model cannot serve this simulator, or the checkpoint does not fit.
    """
    policy_type = SupportedModel.load(config.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "policy"))
        policy: Policy = policy_type(config, simulator, chunk_size)
    policy.name = config.name
    if config.checkpoint is not None:
        policy.load(Path(config.checkpoint))
    return policy
