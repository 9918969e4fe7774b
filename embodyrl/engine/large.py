"""Which columns of a batch are large. With several ranks they stay with the rank that collected them, see `exchange`.
Imports no torch, since plans ask for it too."""

from __future__ import annotations

APART = ("images", "step_images", "step_proprio", "trace")
"""Columns that may be large."""
LEARNED_FROM = ("images", "trace")
"""Those of them that an update reads."""
LARGE_ROW = 512
"""A row of a large column has more bytes than this: about as many as all other columns have together."""
