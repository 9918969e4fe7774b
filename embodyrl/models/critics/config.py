"""Sizes of critics of actions. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.config.schema import WIDEST_LAYER, setting


@dataclass(frozen=True, kw_only=True)
class CriticSizes:
    """Networks that value a chunk of actions in a state."""

    count: int = setting(2, low=1, high=100)
    """Number of critics (E)."""
    hidden_sizes: list[int] = setting([256, 256], low=1, high=WIDEST_LAYER)
    """Widths of their hidden layers."""
    layer_norm: bool = setting(True)
    """Normalise every hidden layer, which keeps values of actions that were never tried from growing."""


@dataclass(frozen=True, kw_only=True)
class CandidatesConfig(CriticSizes):
    """Critics by which a policy chooses one of several chunks, as they are described in a saved policy."""

    candidates: int = setting(1, low=1, high=1024)
    """Chunks that are sampled, of which that of the highest value is taken (N)."""
    mean: bool = setting(False)
    """Whether the value of a chunk is the mean of the critics, not the smallest."""
