"""Sizes that follow from the settings of learning from a replay. Imports no torch: configs are checked by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

MIB = 2**20


@dataclass(frozen=True)
class Field:
    """A column of a replay."""

    shape: tuple[int, ...]
    """Of an entry."""
    dtype: type[np.generic]

    @property
    def nbytes(self) -> int:
        """Size of an entry."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


def replay_fields(*, proprio_dim: int, action_dim: int, chunk_size: int) -> Mapping[str, Field]:
    """Return the columns of a replay."""
    return {
        "proprio": Field((proprio_dim,), np.float32),
        "actions": Field((chunk_size, action_dim), np.float32),
        "rewards": Field((chunk_size,), np.float32),
        "success": Field((chunk_size,), np.bool_),
        "steps": Field((), np.uint8),
        "terminated": Field((), np.bool_),
        "truncated": Field((), np.bool_),
    }


def replay_bytes(capacity: int, *, proprio_dim: int, action_dim: int, chunk_size: int) -> int:
    """Return the size of a replay with room for `capacity` decisions [bytes]."""
    fields = replay_fields(proprio_dim=proprio_dim, action_dim=action_dim, chunk_size=chunk_size)
    return capacity * row_bytes(fields)


def row_bytes(fields: Mapping[str, Field]) -> int:
    """Return the size of a decision in a replay [bytes]."""
    return sum(each.nbytes for each in fields.values())


def critic_weights(inputs: int, *, count: int, hidden_sizes: Sequence[int], layer_norm: bool) -> int:
    """Return the number of weights of all critics together (`engine.critics.Critics`)."""
    sizes = [inputs, *hidden_sizes, 1]
    of_one = sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(sizes))
    return count * (of_one + 2 * sum(hidden_sizes) * layer_norm)


def usual_target_entropy(size: int) -> float:
    """Return the target entropy for `size` numbers in -1 .. 1: minus half of it [nats], as in RLPD (Ball et al. 2023)
    and HIL-SERL (Luo et al. 2024). A uniform distribution has log 2 for each."""
    return -0.5 * size


def largest_entropy(size: int) -> float:
    """Return the entropy of the uniform distribution of `size` numbers in -1 .. 1, which no other exceeds [nats]."""
    return size * math.log(2.0)
