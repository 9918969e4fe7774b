"""Columns of a replay, and what they take. Imports no torch: configs are checked by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np

from embodyrl.config.replay import REMAINING, SOLVED
from embodyrl.models.flow.config import FlowSizes, SteeringConfig

MIB = 2**20


JUDGED: Mapping[str, type[np.generic]] = {"judged": np.bool_, "progress": np.float32, "answers": np.float32}
"""Columns `[C]` of a decision in which hooks leave what rewards come from (`RewardEntry.judged`), with their types."""


@dataclass(frozen=True)
class Field:
    """A column of a replay."""

    shape: tuple[int, ...]
    """Of an entry."""
    dtype: type[np.generic]
    observed: bool = False
    """Whether it is part of what is observed at a moment; else it belongs to the decision that is made there."""

    @property
    def nbytes(self) -> int:
        """Size of an entry."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


def replay_fields(
    *,
    proprio_dim: int,
    action_dim: int,
    chunk_size: int,
    images: tuple[int, ...] | None = None,
    corrected: bool = False,
    tasks: bool = False,
    judged: str | None = None,
    whole_episodes: bool = False,
) -> Mapping[str, Field]:
    """Return the columns of a replay.

    Args:
        proprio_dim: `S`; 0: there are no states.
        action_dim: `D`.
        chunk_size: `C`.
        images: shape `(V, H, W, 3)` of the images of a moment; None: none are kept.
        corrected: whether an expert acts beside the policy, so that it is kept who decided and what the expert wanted.
        tasks: whether it is kept what the task was.
        judged: column of what rewards come from, see `JUDGED`; None: there is none.
        whole_episodes: whether it is kept what came of the episode.
    """
    observed = {
        "proprio": Field((proprio_dim,), np.float32, observed=True) if proprio_dim else None,
        "images": Field(images, np.uint8, observed=True) if images else None,
    }
    corrections = {
        "source": Field((), np.uint8),
        "labels": Field((chunk_size, action_dim), np.float32),
        "labelled": Field((), np.bool_),
    }
    return {
        **{name: each for name, each in observed.items() if each is not None},
        "actions": Field((chunk_size, action_dim), np.float32),
        **({"task_index": Field((), np.int64)} if tasks or corrected else {}),
        **_outcome(chunk_size, judged=judged),
        **(corrections if corrected else {}),
        **({REMAINING: Field((), np.int32), SOLVED: Field((), np.bool_)} if whole_episodes else {}),
    }


def steered_fields(
    flow: FlowSizes, steering: SteeringConfig, *, action_dim: int, chunk_size: int, judged: str | None = None
) -> Mapping[str, Field]:
    """Return the columns of a replay of noise that was chosen for a frozen flow policy, whose features take the place
    of observations; for the sizes see `replay_fields`."""
    return {
        "features": Field((flow.features(chunk_size, action_dim),), np.float16, observed=True),
        "noise": Field(flow.noise(steering, chunk_size), np.float32),
        **_outcome(chunk_size, judged=judged),
    }


def _outcome(chunk_size: int, *, judged: str | None) -> Mapping[str, Field]:
    """Return the columns of what a decision led to."""
    return {
        "rewards": Field((chunk_size,), np.float32),
        "success": Field((chunk_size,), np.bool_),
        "steps": Field((), np.uint8),
        "terminated": Field((), np.bool_),
        "truncated": Field((), np.bool_),
        **({} if judged is None else {judged: Field((chunk_size,), JUDGED[judged])}),
    }


def row_bytes(fields: Mapping[str, Field]) -> int:
    """Return the size of a decision in a replay [bytes]."""
    return sum(each.nbytes for each in fields.values())


def held_in_memory(fields: Mapping[str, Field], *, capacity: int, memory: int) -> frozenset[str]:
    """Return the columns of a replay that are held in memory; the others lie in files. Small ones are read byte by
    byte, so that they come first.

    Args:
        fields: of the replay.
        capacity: decisions.
        memory: most bytes. If not all columns fit, half of it is left for those parts of files that are being read.
    """
    if capacity * row_bytes(fields) <= memory:
        return frozenset(fields)
    names = sorted(fields, key=lambda name: fields[name].nbytes)
    totals = accumulate(capacity * fields[name].nbytes for name in names)
    return frozenset(name for name, total in zip(names, totals, strict=True) if total <= memory // 2)
