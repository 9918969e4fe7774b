"""From a config, or a checkpoint, to a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from embodyrl.config.build import build_section
from embodyrl.config.check import check_settings
from embodyrl.config.compose import Settings
from embodyrl.config.issues import Location
from embodyrl.config.schema import ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.policy import Policy
from embodyrl.models.saved import read_description
from embodyrl.registry import SupportedModel
from embodyrl.seeding import derive_seed


def build_policy(config: ModelConfig, simulator: SimulatorSpec | None, *, chunk_size: int, seed: int) -> Policy:
    """Build the policy that `config` names, with weights that depend on `seed` alone or come from `config.checkpoint`.

    Args:
        config: the model's options.
        simulator: what the simulator offers; some models with a checkpoint do without.
        chunk_size: actions per decision.
        seed: of random weights.

    Raises:
        PolicyError: the model cannot serve this simulator, or the checkpoint does not fit.
    """
    policy_type = SupportedModel.load(config.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "policy"))
        policy: Policy = policy_type(config, simulator, chunk_size)
    policy.name = config.name
    if config.checkpoint is not None:
        policy.start_from(Path(config.checkpoint))
    return policy


def load_policy(
    name: str,
    *,
    checkpoint: str | Path,
    simulator: SimulatorSpec | None = None,
    chunk_size: int | None = None,
    **options: Any,
) -> Policy:
    """A trained policy, ready to act.

    Args:
        name: of the model, as `embodyrl list models` shows it.
        checkpoint: folder of its weights.
        simulator: what it is to act in; None: a model whose checkpoint says what its actions are returns those.
        chunk_size: actions per decision; None: as many as the policy was saved with, or, if it comes from elsewhere,
            what the model's public checkpoints have.
        options: the model's options, as in the `model:` section of a config; others are those that the policy was saved
            with, or the model's defaults if it comes from elsewhere.

    Raises:
        UnknownNameError: there is no such model.
        MissingPackageError: it needs a package that is not installed.
        PolicyError: an option is unknown or wrong, or the checkpoint does not fit.
    """
    entry = SupportedModel.entry(name)
    entry.load()
    saved, saved_chunk = read_description(Path(checkpoint), name)
    data = {**saved, "name": name, "checkpoint": str(checkpoint), **options}
    faults = check_settings(Settings(data), ModelConfig, Location(f"load_policy({name!r})"), ())
    if faults:
        raise PolicyError("; ".join(map(str, faults)))
    if chunk_size is None:
        chunk_size = entry.usual_chunk if saved_chunk is None else saved_chunk
    policy = build_policy(build_section(ModelConfig, data), simulator, chunk_size=chunk_size, seed=0)
    return policy.eval()
