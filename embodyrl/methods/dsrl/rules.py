"""Rules of steering a frozen flow policy (`algorithm: dsrl`); see `config.rules`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from embodyrl.config.infos import model_info
from embodyrl.config.issues import LEAVE_OUT, ConfigIssue
from embodyrl.config.schema import Config
from embodyrl.methods.dsrl.config import DSRLConfig
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import FlowInfo, flow_sizes, other_steering
from embodyrl.models.saved import read_steering
from embodyrl.registry import SupportedModel

OF_LEARNING = (
    *("noise_method", "noise_level", "noise_level_end", "noise_low", "noise_high", "joint_logprob"),
    *("frozen", "freeze_vision", "freeze_language", "detach_critic"),
)
"""Options of flow policies for learning their weights."""


def flow_models() -> list[str]:
    """Return the names of the models that can be steered."""
    return [name for name in SupportedModel.names() if isinstance(model_info(name), FlowInfo)]


def check(config: Config, algorithm: DSRLConfig) -> Iterator[ConfigIssue]:
    """Check the settings of an algorithm that steers a frozen flow policy."""
    name, model = config.algorithm.name, config.model
    if not isinstance(model_info(model.name), FlowInfo):
        if model.name in SupportedModel:
            yield ConfigIssue(
                ("algorithm.name", "model.name"),
                f"algorithm {name!r} chooses the noise that a flow policy turns into actions, and model "
                f"{model.name!r} is none",
                f"set model to {' or '.join(flow_models())}, or choose another algorithm",
            )
        return
    if model.checkpoint is None:
        yield ConfigIssue(
            ("model.checkpoint", "algorithm.name"),
            f"algorithm {name!r} leaves the model as it is, but model.checkpoint is null: weights would stay random",
            "name a checkpoint, for instance that of a run with algorithm: sft",
        )
    yield from _nothing_of_the_model_is_learned(config)
    yield from _steering(config, algorithm)


def _nothing_of_the_model_is_learned(config: Config) -> Iterator[ConfigIssue]:
    """Check that nothing is set for learning the weights of a model that stays as it is."""
    model, engine = config.model, config.engine
    usual = {each.name: each.default for each in dataclasses.fields(model) if each.name in OF_LEARNING}
    given = [f"model.{name}" for name, default in usual.items() if getattr(model, name) != default]
    given += ["engine.gradient_checkpointing"] if engine.gradient_checkpointing is True else []
    for name in (*given, *(["engine.lora.rank"] if engine.lora.rank else [])):
        yield ConfigIssue(
            (name, "algorithm.name"),
            f"{name} is set for learning the model, which algorithm {config.algorithm.name!r} leaves as it is",
            "leave it out",
            fix={name: LEAVE_OUT},
        )


def _steering(config: Config, algorithm: DSRLConfig) -> Iterator[ConfigIssue]:
    """Check that the network that steers fits the model, and that of its checkpoint if this has one."""
    steering, sizes, chunk_size = algorithm.off_policy.steering, flow_sizes(config), config.rollout.chunk_size
    if sizes is None:
        return
    if sizes.noise(steering, chunk_size)[0] > sizes.horizon:
        yield ConfigIssue(
            "algorithm.off_policy.steering.rows",
            f"algorithm.off_policy.steering.rows = {steering.rows}, but the checkpoint denoises {sizes.horizon} "
            "actions together",
            f"set it to {sizes.horizon} or less (null: {chunk_size}, those that are executed)",
        )
    try:
        saved = read_steering(Path(str(config.model.checkpoint)))
    except PolicyError as error:
        yield error.issue("model.checkpoint")
        return
    for option, text in other_steering(saved, steering, chunk_size) if saved is not None else ():
        yield ConfigIssue(
            (f"algorithm.off_policy.steering.{option}", "model.checkpoint"),
            f"algorithm.off_policy.steering.{text}",
            "set it to that, or name the checkpoint of a policy that nothing steers yet",
        )
