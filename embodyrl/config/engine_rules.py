"""Rules between the settings of the engine and others; see `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import fact, rule
from embodyrl.config.schema import Config, LearningRate, Precision
from embodyrl.registry import LOSSES, Requirement, SupportedModel

PEFT = Requirement(module="peft", install="pip install 'embodyrl[vla]'")


@rule
def weights_can_be_computed_with(config: Config) -> Iterator[ConfigIssue]:
    """Weights that are held in bfloat16 have no more digits to compute with."""
    held = getattr(config.model, "dtype", None)
    if held == Precision.bfloat16 and config.engine.precision is Precision.float32:
        yield ConfigIssue(
            ("engine.precision", "model.dtype"),
            "engine.precision = float32, but weights that are held in model.dtype = bfloat16 are computed with in that",
            "set engine.precision to auto, or model.dtype to float32",
        )


@rule
def only_rates_that_fall_have_a_floor(config: Config) -> Iterator[ConfigIssue]:
    """A learning rate that does not fall does not come down to anything."""
    settings = config.engine.optimizer
    if settings.lr_floor > 0.0 and settings.schedule is LearningRate.constant:
        yield ConfigIssue(
            ("engine.optimizer.lr_floor", "engine.optimizer.schedule"),
            f"engine.optimizer.lr_floor = {settings.lr_floor} has no use: engine.optimizer.schedule is constant",
            "set engine.optimizer.lr_floor to 0, or engine.optimizer.schedule to linear or cosine",
        )


@rule
def warm_up_comes_to_an_end(config: Config) -> Iterator[ConfigIssue]:
    """A learning rate that rises comes to what it is to be within the run."""
    warmup, iterations = config.engine.optimizer.warmup, config.run.iterations
    if warmup and warmup >= iterations:
        yield ConfigIssue(
            ("engine.optimizer.warmup", "run.iterations"),
            f"engine.optimizer.warmup = {warmup} iterations, but run.iterations = {iterations}: the learning rate "
            "never gets to engine.optimizer.lr",
            f"set engine.optimizer.warmup below {iterations}",
        )


@rule
def micro_batches_hold_whole_episodes(config: Config) -> Iterator[ConfigIssue]:
    """Where a loss compares episodes, one of them fits into a micro-batch."""
    size, loss, chunks = config.engine.micro_batch_size, config.algorithm.loss.name, config.rollout.chunks
    if size is not None and fact(LOSSES, loss, "whole") and size < chunks:
        yield ConfigIssue(
            ("engine.micro_batch_size", "rollout.chunks", "algorithm.loss.name"),
            f"engine.micro_batch_size = {size}, but loss {loss!r} needs the up to rollout.chunks = {chunks} decisions "
            "of an episode at once",
            f"set engine.micro_batch_size to {chunks} or more, or algorithm.loss to one that does not compare episodes",
        )


@rule
def model_consists_of_blocks(config: Config) -> Iterator[ConfigIssue]:
    """What is done layer by layer needs a model that has them."""
    engine, name = config.engine, config.model.name
    if engine.lora.rank and not PEFT.is_met():
        yield ConfigIssue(
            ("engine.lora.rank",),
            f"engine.lora.rank = {engine.lora.rank} needs package {PEFT.module!r}, which is not installed",
            f"run: {PEFT.install}",
        )
    if fact(SupportedModel, name, "blocks") is not False:
        return
    if engine.lora.rank:
        yield ConfigIssue(
            ("engine.lora.rank", "model.name"),
            f"engine.lora.rank = {engine.lora.rank}, but model {name!r} is small and has no layers for adapters",
            "set engine.lora.rank to 0",
        )
    if engine.gradient_checkpointing:
        yield ConfigIssue(
            ("engine.gradient_checkpointing", "model.name"),
            f"engine.gradient_checkpointing is set, but model {name!r} is small and keeps next to nothing",
            "set engine.gradient_checkpointing to false",
        )
