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

WITHOUT_USE = {
    **dict.fromkeys(
        ("noise_method", "noise_level", "noise_level_end", "noise_low", "noise_high", "joint_logprob"),
        "denoising has no random step",
    ),
    **dict.fromkeys(("frozen", "freeze_vision", "freeze_language"), "all of the model is frozen"),
    "detach_critic": "the model's own critic is not trained",
}
"""Options of flow policies that change nothing, and the reason."""


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
    yield from _settings_without_use(config)
    yield from _steering(config, algorithm)


def _settings_without_use(config: Config) -> Iterator[ConfigIssue]:
    """Check that nothing is set that a frozen model has no use for."""
    name, model, engine = config.algorithm.name, config.model, config.engine
    for each in dataclasses.fields(model):
        found = getattr(model, each.name)
        if each.name in WITHOUT_USE and found != each.default:
            yield ConfigIssue(
                (f"model.{each.name}", "algorithm.name"),
                f"model.{each.name} has no use: with algorithm {name!r} {WITHOUT_USE[each.name]}",
                "leave it out",
                fix={f"model.{each.name}": LEAVE_OUT},
            )
    if engine.lora.rank:
        yield ConfigIssue(
            ("engine.lora.rank", "algorithm.name"),
            f"engine.lora.rank = {engine.lora.rank} has no use: with algorithm {name!r} all of the model is frozen",
            "set engine.lora.rank to 0",
        )
    if engine.gradient_checkpointing is True:
        yield ConfigIssue(
            ("engine.gradient_checkpointing", "algorithm.name"),
            f"engine.gradient_checkpointing has no use: with algorithm {name!r} no gradient goes through the model",
            "leave it out",
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
