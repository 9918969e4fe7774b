"""Encoders of episodes that come with embodyrl, declared by name."""

from __future__ import annotations

from embodyrl.registry import ENCODERS

ENCODERS.register(
    "random_projection",
    target="embodyrl.algorithms.encoders:random_projection",
    summary="fixed random projection of state observations and of small pictures; nothing to download",
)
