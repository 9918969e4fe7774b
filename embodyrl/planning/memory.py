"""Arithmetic of the memory that a policy takes in rollouts and in training.

All sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FLOAT32 = 4
MOMENTS = 2
"""Moments that AdamW stores for each trainable weight."""


@dataclass(frozen=True)
class Line:
    """A quantity that grows linearly with the number of samples."""

    base: float
    slope: float

    @classmethod
    def through(cls, one: tuple[int, float], other: tuple[int, float]) -> Line:
        """Return the line through two points, with slope and base of at least 0."""
        slope = max((other[1] - one[1]) / (other[0] - one[0]), 0.0)
        return cls(max(one[1] - slope * one[0], 0.0), slope)

    def at(self, samples: int) -> int:
        """Return the value for a number of samples; 0 for none."""
        return math.ceil(self.base + self.slope * samples) if samples else 0


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Peak memory beside weights, optimiser and gradients, by the samples that are computed at once."""

    deciding: Line
    kept: Line
    """Activations that the forward pass of training keeps for the backward pass."""
    learning: Line
    """Peak of forward and backward pass of training."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Sizes of a policy's weights."""

    parameters: int
    trainable: int
    """Trainable parameters."""
    weight_bytes: int
    """Bytes of parameters and buffers in their own types."""
    gradient_bytes: int
    """Bytes of gradients of trainable parameters, in the parameters' types."""
    half_trainable: int
    """Trainable parameters that are stored in 16 bits."""
    head_bytes: int = 0
    """Bytes of the heads, which learn in full beside adapters."""
    largest_block: int = 0
    """Bytes of the largest block, which ranks gather as one unit if weights are sharded."""
    outside_blocks: int = 0
    """Bytes of the weights in no such block."""
    gradients_of_block: int = 0
    """Largest bytes of a block's gradients before ranks reduce them: in their own type and in float32."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Settings of the engine and the algorithm that determine memory."""

    deciding_samples: int
    """Envs that the policy acts for at once."""
    minibatch: int
    """Samples of an optimiser step."""
    micro_batch: int
    """Samples that go through the model at once, <= minibatch."""
    reference: bool
    """Whether a frozen copy of the policy scores every batch."""
    initial_heads: bool = False
    """Whether, with adapters, copies of the heads make the policy its own reference: the initial ones always, and the
    present ones while it scores."""
    master_weights: bool
    """Whether 16-bit weights have float32 copies that the optimiser steps."""
    moment_bytes: float = FLOAT32
    """Bytes of one of AdamW's moments: 4, or 1 with 8 bits."""
    offload_optimizer: bool = False
    """Whether optimiser and gradients are offloaded during rollouts."""
    offload_reference: bool = False
    """Whether the reference policy is offloaded except while it scores."""
    ranks: int = 1
    """Number of ranks. Samples, envs and memory are those of one rank."""
    graphs: Sequence[int] = ()
    """CUDA graphs of decisions at a time, each by the samples that it decides for. It holds their memory in a pool of
    its own, which nothing else uses."""
    shards: int = 1
    """Number of ranks over which weights, gradients and optimiser state are sharded; 1: each has all of them."""

    @property
    def sharded(self) -> bool:
        """Whether a rank has a part only."""
        return self.shards > 1

    def share(self, size: float) -> int:
        """Return one rank's share of a size [bytes] if state is sharded, else the size."""
        return math.ceil(size / self.shards)


@dataclass(frozen=True, kw_only=True)
class Need:
    """Memory at the peak of a phase, by purpose."""

    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())


def optimizer_bytes(weights: Weights, settings: Learning) -> int:
    """Return this rank's share of AdamW's state: two moments for each trainable weight, in the type that is stepped,
    and float32 copies."""
    half, full = weights.half_trainable, weights.trainable - weights.half_trainable
    copies = FLOAT32 * half if settings.master_weights else 0
    of_half = settings.moment_bytes if settings.master_weights else min(2.0, settings.moment_bytes)
    return settings.share(copies + math.ceil(MOMENTS * (full * settings.moment_bytes + half * of_half)))


def kept_away(weights: Weights, settings: Learning) -> int:
    """Return the bytes that are offloaded to main memory."""
    optimizer = optimizer_bytes(weights, settings) if settings.offload_optimizer else 0
    reference = weights.weight_bytes if settings.reference and settings.offload_reference else 0
    return optimizer + settings.share(reference)


def copied_to_save(weights: Weights, settings: Learning) -> int:
    """Return the bytes of what learned and its optimiser state, which the first rank copies whole into main memory if
    the run continues while it saves."""
    return weights.gradient_bytes + settings.shards * optimizer_bytes(weights, settings)


def rollout_need(weights: Weights, traced: Lines, cache: int, settings: Learning) -> Need:
    """Return the memory of rollouts; it includes the optimiser unless that is offloaded, but no gradients.

    Args:
        weights: sizes of the policy's weights.
        traced: activations, by samples.
        cache: part of them that is the KV cache of one env [bytes].
        settings: settings of the engine and the algorithm.
    """
    return Need(
        parts={
            **waiting_need(weights, settings).parts,
            "weights of other ranks": _gathered(weights, settings, weights.weight_bytes),
            **_deciding(traced, cache, settings),
        }
    )


def waiting_need(weights: Weights, settings: Learning) -> Need:
    """Return the memory of a rank while rollout workers roll out for it."""
    return Need(
        parts={
            "weights": settings.share(weights.weight_bytes),
            "reference policy": _reference(weights, settings),
            "optimiser": 0 if settings.offload_optimizer else optimizer_bytes(weights, settings),
        }
    )


def acting_need(weights: Weights, traced: Lines, cache: int, settings: Learning) -> Need:
    """Return the memory of a rollout worker, which has all weights and does not learn; see `rollout_need`."""
    return Need(parts={"weights": weights.weight_bytes, **_deciding(traced, cache, settings)})


def _deciding(traced: Lines, cache: int, settings: Learning) -> dict[str, int]:
    """Return the memory of a decision for all envs, beside the weights, and of the graphs of decisions."""
    slots = settings.deciding_samples
    return {
        "KV cache": cache * slots,
        "activations": max(traced.deciding.at(slots) - cache * slots, 0),
        "CUDA graphs": sum(map(traced.deciding.at, settings.graphs)),
    }


def train_need(weights: Weights, traced: Lines, settings: Learning, *, batch: int) -> Need:
    """Return the memory of training at its peak: when the reference policy scores the batch, when gradients are
    computed, or when the optimiser steps.

    Args:
        weights: sizes of the policy's weights.
        traced: activations, by samples.
        settings: settings of the engine and the algorithm.
        batch: bytes of the batch on the device.
    """
    samples = settings.micro_batch
    peak = traced.learning.at(samples)
    if samples * settings.ranks >= settings.minibatch:  # gradients are allocated while activations are freed
        peak = max(peak - settings.share(weights.gradient_bytes), peak - traced.kept.at(samples))
    always = {
        "weights": settings.share(weights.weight_bytes),
        "weights of other ranks": _gathered(weights, settings, weights.largest_block + weights.outside_blocks),
        "optimiser": optimizer_bytes(weights, settings),
        "batch": batch,
    }
    on_their_way = weights.gradients_of_block if settings.sharded else 0
    learning = always | {
        "reference policy": _reference(weights, settings),
        "gradients": settings.share(weights.gradient_bytes),
    }
    moments = [learning | {"activations": peak, "gradients on their way": on_their_way}]
    if settings.ranks > 1 and not settings.sharded:
        moments.append(learning | {"gradients on their way": FLOAT32 * weights.trainable})
    if settings.master_weights:
        full = settings.share(FLOAT32 * (weights.trainable - weights.half_trainable))
        copies = settings.share(FLOAT32 * weights.half_trainable)
        moments.append(learning | {"gradients": full, "float32 gradients of the copies": copies})
    if settings.reference or settings.initial_heads:
        reference = weights.weight_bytes if settings.reference else 2 * weights.head_bytes
        scoring = {"reference policy": settings.share(reference), "activations": traced.deciding.at(samples)}
        moments.append(always | scoring)
    return max((Need(parts=parts) for parts in moments), key=lambda need: need.total)


def _reference(weights: Weights, settings: Learning) -> int:
    """Return the bytes of the reference policy while it does not score."""
    if settings.initial_heads:
        return settings.share(weights.head_bytes)
    return settings.share(weights.weight_bytes) if settings.reference and not settings.offload_reference else 0


def _gathered(weights: Weights, settings: Learning, used: int) -> int:
    """Return the bytes of gathered weights if they are sharded: those in use, and a block that is prefetched."""
    return used + weights.largest_block if settings.sharded else 0
