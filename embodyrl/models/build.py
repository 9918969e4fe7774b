"""Build a policy from a config, or load one from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from embodyrl.config.build import build_section
from embodyrl.config.check import check_settings
from embodyrl.config.compose import Settings
from embodyrl.config.issues import Location
from embodyrl.config.schema import BROUGHT, ModelConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.files import NO_FOREIGN_ENTRIES, foreign_entry
from embodyrl.hub import Kind, fetch, is_hub_name, parse
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import SteeringConfig, other_steering
from embodyrl.models.policy import Policy
from embodyrl.models.saved import read_description, read_steering
from embodyrl.registry import SupportedModel
from embodyrl.seeding import derive_seed


def build_policy(
    config: ModelConfig,
    simulator: SimulatorSpec | None,
    *,
    chunk_size: int,
    seed: int,
    steering: SteeringConfig | None = None,
) -> Policy:
    """Build the policy that `config` names, with weights from `config.checkpoint` or, without one, random weights from
    `seed`. A flow policy that was saved with a network that steers it is built with that.

    Args:
        config: the model's options.
        simulator: the simulator's spec; None: only for models that can be built from their checkpoint.
        chunk_size: actions per chunk.
        seed: of random weights.
        steering: of a network that chooses the noise of a flow policy; None: only if the checkpoint has one.

    Raises:
        PolicyError: the model does not fit the simulator, or the checkpoint does not fit.
    """
    for name in BROUGHT:
        folder = getattr(config, name, None)
        if folder is not None and (found := foreign_entry(Path(folder))) is not None:
            raise PolicyError(f"model.{name}: {found}", NO_FOREIGN_ENTRIES)
    policy_type = SupportedModel.load(config.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "policy"))
        policy: Policy = policy_type(config, simulator, chunk_size)
    policy.name = config.name
    if config.checkpoint is not None:
        policy.start_from(Path(config.checkpoint))
    saved = None if config.checkpoint is None else read_steering(Path(config.checkpoint))
    if saved is not None or steering is not None:
        policy = _steered(policy, config.checkpoint, saved, steering, seed)
    return policy


def _steered(
    policy: Policy, checkpoint: str | None, saved: dict[str, Any] | None, asked: SteeringConfig | None, seed: int
) -> Policy:
    """Return a policy with the network that steers it, in a checkpoint or new.

    Raises:
        PolicyError: the checkpoint's is not the one that was asked for, or damaged.
    """
    from embodyrl.models.flow.steering import steered

    if saved is None:
        assert asked is not None
        return steered(policy, asked, seed)
    try:
        settings = SteeringConfig(**saved)
    except TypeError as error:
        raise PolicyError(f"policy.json in {checkpoint} is damaged (steering: {error})", "take another one") from error
    found = steered(policy, settings, seed)
    others = [] if asked is None else [text for _, text in other_steering(saved, asked, policy.spec.chunk_size)]
    if others:
        raise PolicyError(f"algorithm.off_policy.steering: {'; '.join(others)}")
    found.load_steering(Path(str(checkpoint)))
    return found


def load_policy(
    name: str,
    *,
    checkpoint: str | Path,
    simulator: SimulatorSpec | None = None,
    chunk_size: int | None = None,
    **options: Any,
) -> Policy:
    """Load a trained policy in eval mode.

    Args:
        name: name of the model, as `embodyrl list models` shows it.
        checkpoint: folder of the weights, or their name on the hub (`hf://owner/name[@revision]`, as a text).
        simulator: spec of the simulator to act in; None: actions are returned in the units of the checkpoint's
            statistics, for models that have such (`ModelEntry.standalone`).
        chunk_size: actions per chunk; None: as saved with the policy, or as usual for the model's public checkpoints if
            it comes from elsewhere.
        options: the model's options, as in the `model:` section of a config. Others are as saved with the policy, or
            the model's defaults if it comes from elsewhere.

    Raises:
        UnknownNameError: no model has this name.
        MissingPackageError: it needs a package that is not installed.
        PolicyError: an option is unknown or wrong, the checkpoint does not fit, or the model needs `simulator`.
        HubError: the checkpoint cannot be had from the hub.
    """
    entry = SupportedModel.entry(name)
    if simulator is None and not entry.standalone:
        raise PolicyError(
            f"model {name!r} cannot be built without the spec of a simulator: pass simulator=envs.spec "
            f"(embodyrl.make_envs), or load a policy that was trained here with embodyrl.load_policy(run)"
        )
    entry.load()
    folder = fetch(parse(str(checkpoint), Kind.model)) if is_hub_name(checkpoint) else Path(checkpoint)
    saved, saved_chunk = read_description(folder, name)
    data = {**saved, "name": name, "checkpoint": str(folder), **options}
    faults = check_settings(Settings(data), ModelConfig, Location(f"load_policy({name!r})"), ())
    if faults:
        raise PolicyError("; ".join(map(str, faults)))
    if chunk_size is None:
        chunk_size = entry.usual_chunk if saved_chunk is None else saved_chunk
    policy = build_policy(build_section(ModelConfig, data), simulator, chunk_size=chunk_size, seed=0)
    return policy.eval()
