"""Rules between the settings of the engine and others; see `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.config.rules import Finding, fact, rule
from embodyrl.config.schema import Config, Precision
from embodyrl.registry import LOSSES


@rule
def weights_can_be_computed_with(config: Config) -> Iterator[Finding]:
    """Weights that are held in bfloat16 have no more digits to compute with."""
    held = getattr(config.model, "dtype", None)
    if held == Precision.bfloat16 and config.engine.precision is Precision.float32:
        yield Finding(
            ("engine.precision", "model.dtype"),
            "engine.precision = float32, but weights that are held in model.dtype = bfloat16 are computed with in that",
            "set engine.precision to auto, or model.dtype to float32",
        )


@rule
def micro_batches_hold_whole_episodes(config: Config) -> Iterator[Finding]:
    """Where a loss compares episodes, one of them fits into a micro-batch."""
    size, loss, chunks = config.engine.micro_batch_size, config.algorithm.loss, config.rollout.chunks
    if size is not None and fact(LOSSES, loss, "whole") and size < chunks:
        yield Finding(
            ("engine.micro_batch_size", "rollout.chunks", "algorithm.loss"),
            f"engine.micro_batch_size = {size}, but loss {loss!r} needs the up to rollout.chunks = {chunks} decisions "
            "of an episode at once",
            f"set engine.micro_batch_size to {chunks} or more, or algorithm.loss to one that does not compare episodes",
        )
