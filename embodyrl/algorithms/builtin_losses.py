"""Policy losses that come with embodyrl, declared by name."""

from __future__ import annotations

from embodyrl.registry import LOSSES

LOSSES.register(
    "ppo",
    target="embodyrl.algorithms.losses:ppo",
    summary="clipped surrogate (Schulman et al. 2017), with separate lower and upper clip",
)
