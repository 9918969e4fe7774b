"""How much memory a policy takes while it rolls out and while it learns: arithmetic alone.

All sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

FLOAT32 = 4
MOMENTS = 2
"""Numbers that AdamW keeps for each weight that learns."""


@dataclass(frozen=True)
class Line:
    """A quantity that grows evenly with the number of samples."""

    base: float
    slope: float

    @classmethod
    def through(cls, one: tuple[int, float], other: tuple[int, float]) -> Line:
        """The line through two points, which never falls and never is negative."""
        slope = max((other[1] - one[1]) / (other[0] - one[0]), 0.0)
        return cls(max(one[1] - slope * one[0], 0.0), slope)

    def at(self, samples: int) -> int:
        """The value for so many samples; 0 for none."""
        return math.ceil(self.base + self.slope * samples) if samples else 0


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Most memory in use at once beside weights, optimiser and gradients, by the samples that are computed at once."""

    deciding: Line
    kept: Line
    """What the forward pass of learning keeps for its backward pass."""
    learning: Line
    """The fullest moment of both."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The numbers that a policy consists of."""

    parameters: int
    trainable: int
    """Parameters that learn."""
    weight_bytes: int
    """Of parameters and buffers, as they are held."""
    gradient_bytes: int
    """Of the parameters that learn, as they are held."""
    half_trainable: int
    """Parameters that learn and are held in 16 bits."""
    largest_block: int = 0
    """Bytes of the largest block of layers whose weights several ranks gather together."""
    outside_blocks: int = 0
    """Bytes of the weights in no such block."""
    gradients_of_block: int = 0
    """Bytes of the gradients of a block, at most, before the ranks add them up: as they are, and in float32."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Settings of the engine and the algorithm that decide about memory."""

    deciding_samples: int
    """Slots that the policy decides for at once."""
    minibatch: int
    """Samples of an optimiser step."""
    micro_batch: int
    """Samples that go through the model at once, <= minibatch."""
    reference: bool
    """A frozen copy of the policy scores every batch."""
    master_weights: bool
    """Weights that are held in 16 bits have float32 copies, which are stepped."""
    moment_bytes: float = FLOAT32
    """Bytes of one of AdamW's numbers where it is not of the type of what is stepped: 1 with 8 bits."""
    offload_optimizer: bool = False
    """Optimiser and gradients are away while the policy rolls out."""
    offload_reference: bool = False
    """The reference policy is there only while it scores."""
    ranks: int = 1
    """Processes that learn together. Samples and slots are those of one of them, and so is the memory."""
    sharded: bool = False
    """Each of several ranks holds its share of weights, gradients and optimiser state."""

    def share(self, size: float) -> int:
        """Return what one rank holds of something that is spread over all."""
        return math.ceil(size / self.ranks) if self.sharded else math.ceil(size)


@dataclass(frozen=True, kw_only=True)
class Need:
    """Memory at the fullest moment of a phase, by what it is for."""

    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All together."""
        return sum(self.parts.values())


def optimizer_bytes(weights: Weights, settings: Learning) -> int:
    """Return what AdamW keeps: two numbers for each weight that learns, of the type that is stepped, and float32
    copies; this rank's share of it."""
    half, full = weights.half_trainable, weights.trainable - weights.half_trainable
    copies = FLOAT32 * half if settings.master_weights else 0
    of_half = settings.moment_bytes if settings.master_weights else min(2.0, settings.moment_bytes)
    return settings.share(copies + math.ceil(MOMENTS * (full * settings.moment_bytes + half * of_half)))


def kept_away(weights: Weights, settings: Learning) -> int:
    """Return what is in main memory while it is not needed on the GPU."""
    optimizer = optimizer_bytes(weights, settings) if settings.offload_optimizer else 0
    reference = weights.weight_bytes if settings.reference and settings.offload_reference else 0
    return optimizer + settings.share(reference)


def rollout_need(weights: Weights, traced: Lines, cache: int, settings: Learning) -> Need:
    """While the policy decides; the optimiser is still there unless it is offloaded, gradients are not.

    Args:
        weights: of the policy.
        traced: what a decision needs, by slots.
        cache: bytes of it that a slot's keys and values take.
        settings: of the engine and the algorithm.
    """
    slots = settings.deciding_samples
    return Need(
        parts={
            "weights": settings.share(weights.weight_bytes),
            "weights of other ranks": _gathered(weights, settings, weights.weight_bytes),
            "reference policy": _reference(weights, settings, settings.offload_reference),
            "optimiser": 0 if settings.offload_optimizer else optimizer_bytes(weights, settings),
            "KV cache": cache * slots,
            "activations": max(traced.deciding.at(slots) - cache * slots, 0),
        }
    )


def train_need(weights: Weights, traced: Lines, settings: Learning, *, batch: int) -> Need:
    """While it learns: the fullest of the moments when the reference policy scores the batch, when gradients are
    computed, and when the optimiser steps.

    Args:
        weights: of the policy.
        traced: what deciding and learning need, by samples.
        settings: of the engine and the algorithm.
        batch: bytes of what is learned from, as far as it is on the device.
    """
    samples = settings.micro_batch
    peak = traced.learning.at(samples)
    if samples * settings.ranks >= settings.minibatch:  # gradients come while activations go
        peak = max(peak - settings.share(weights.gradient_bytes), peak - traced.kept.at(samples))
    always = {
        "weights": settings.share(weights.weight_bytes),
        "weights of other ranks": _gathered(weights, settings, weights.largest_block + weights.outside_blocks),
        "optimiser": optimizer_bytes(weights, settings),
        "batch": batch,
    }
    on_their_way = weights.gradients_of_block if settings.sharded else 0
    learning = always | {
        "reference policy": _reference(weights, settings, settings.offload_reference),
        "gradients": settings.share(weights.gradient_bytes),
    }
    moments = [learning | {"activations": peak, "gradients on their way": on_their_way}]
    if settings.ranks > 1 and not settings.sharded:
        moments.append(learning | {"gradients on their way": FLOAT32 * weights.trainable})
    if settings.master_weights:
        full = settings.share(FLOAT32 * (weights.trainable - weights.half_trainable))
        copies = settings.share(FLOAT32 * weights.half_trainable)
        moments.append(learning | {"gradients": full, "float32 gradients of the copies": copies})
    if settings.reference:
        scoring = {"reference policy": settings.share(weights.weight_bytes), "activations": traced.deciding.at(samples)}
        moments.append(always | scoring)
    return max((Need(parts=parts) for parts in moments), key=lambda need: need.total)


def _reference(weights: Weights, settings: Learning, away: bool) -> int:
    return settings.share(weights.weight_bytes) if settings.reference and not away else 0


def _gathered(weights: Weights, settings: Learning, used: int) -> int:
    """Return what is gathered of weights that are spread: those that are used, and a block that is on its way."""
    return used + weights.largest_block if settings.sharded else 0
