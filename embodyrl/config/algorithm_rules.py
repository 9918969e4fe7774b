"""Rules between the settings of the learning algorithm, of the engine, and others; see `rules`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from embodyrl.config.issues import LEAVE_OUT, ConfigIssue
from embodyrl.config.needs import Learns
from embodyrl.config.rules import fact, learning_rule, needs_of_all
from embodyrl.config.schema import Config, Precision
from embodyrl.registry import (
    ADVANTAGES,
    ALGORITHMS,
    FILTERS,
    LOSSES,
    REWARDS,
    Registry,
    Requirement,
    SupportedModel,
    load_target,
)

PARTS: Mapping[str, Registry[Any]] = {"reward": REWARDS, "filter": FILTERS, "advantage": ADVANTAGES, "loss": LOSSES}
"""Registries of the functions that a method may choose."""


@learning_rule
def components_can_run_so(config: Config) -> Iterator[ConfigIssue]:
    """Run the checks of the chosen loss, advantage, reward and filter."""
    for kind, part in config.algorithm.parts().items():
        check = fact(PARTS[kind], part.name, "check")
        if check is not None:
            yield from load_target(check)(config)


@learning_rule
def demonstrations_are_learned_from(config: Config) -> Iterator[ConfigIssue]:
    """Check that demonstrations are named if the algorithm learns from them, and only then."""
    name, path = config.algorithm.name, config.data.path
    if name not in ALGORITHMS:
        return  # which has been reported
    learns = fact(ALGORITHMS, name, "demonstrations")
    if learns and path is None:
        yield ConfigIssue(
            ("data.path", "algorithm.name"),
            f"algorithm {name!r} learns from demonstrations, but data.path is null",
            "name the folder of a LeRobotDataset v3; `embodyrl collect CONFIG --out DIR --episodes N` records one",
        )
    if (
        path is not None
        and learns is False
        and ALGORITHMS.entry(name).source == "built-in"
        and not config.pipeline.insert
    ):
        others = _learning_from_demonstrations(config)
        yield ConfigIssue(
            ("data.path", "algorithm.name"),
            f"data.path is set, but algorithm {name!r} learns from rollouts alone",
            "set data.path to null" + (f", or algorithm to {' or '.join(others)}" if others else ""),
            fix={"data.path": LEAVE_OUT},
        )


def _learning_from_demonstrations(config: Config) -> list[str]:
    """Return the methods that a run could choose to learn from its demonstrations, too: of its own kind."""
    mine, every = config.algorithm.needs(config), needs_of_all(config)
    learning = {name: needs for name, needs in every.items() if fact(ALGORITHMS, name, "demonstrations")}
    if mine.learns is Learns.noise:
        return []
    if mine.replay is not None:
        return [name for name, needs in learning.items() if needs.replay is not None]
    return [name for name, needs in learning.items() if needs.imitates and needs.replay is None]


@learning_rule
def algorithm_can_run_so(config: Config) -> Iterator[ConfigIssue]:
    """Run the checks of the chosen method."""
    yield from config.algorithm.check(config)


PEFT = Requirement(module="peft", install="pip install 'embodyrl[vla]'")


@learning_rule
def weights_can_be_computed_with(config: Config) -> Iterator[ConfigIssue]:
    """Check that weights held in bfloat16 are not to be computed with in float32."""
    held = getattr(config.model, "dtype", None)
    if held == Precision.bfloat16 and config.engine.precision is Precision.float32:
        yield ConfigIssue(
            ("engine.precision", "model.dtype"),
            "engine.precision = float32, but weights held in model.dtype = bfloat16 are computed with in bfloat16",
            "set engine.precision to auto, or model.dtype to float32",
        )


@learning_rule
def warm_up_comes_to_an_end(config: Config) -> Iterator[ConfigIssue]:
    """Check that warm-up ends within the run."""
    warmup, iterations = config.engine.optimizer.warmup, config.run.iterations
    if warmup and warmup >= iterations:
        yield ConfigIssue(
            ("engine.optimizer.warmup", "run.iterations"),
            f"engine.optimizer.warmup = {warmup} iterations, but run.iterations = {iterations}: the learning rate "
            "never reaches engine.optimizer.lr",
            f"set engine.optimizer.warmup below {iterations}",
        )


@learning_rule
def model_consists_of_blocks(config: Config) -> Iterator[ConfigIssue]:
    """Check that adapters and checkpointing come with a model that consists of layers."""
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
            fix={"engine.lora.rank": LEAVE_OUT},
        )
    if engine.gradient_checkpointing is True:
        yield ConfigIssue(
            ("engine.gradient_checkpointing", "model.name"),
            f"engine.gradient_checkpointing is set, but model {name!r} is small and has no activations worth dropping",
            "set engine.gradient_checkpointing to false",
            fix={"engine.gradient_checkpointing": LEAVE_OUT},
        )
