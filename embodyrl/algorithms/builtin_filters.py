"""Filters of groups that come with embodyrl, declared by name."""

from __future__ import annotations

from embodyrl.registry import FILTERS

FILTERS.register(
    "none",
    target="embodyrl.algorithms.filters:none",
    facts={"group": False},
    summary="learns from every group",
)
FILTERS.register(
    "zero_variance",
    target="embodyrl.algorithms.filters:zero_variance",
    facts={"group": True},
    summary="drops groups whose episodes all came out the same (DAPO, Yu et al. 2025)",
)
FILTERS.register(
    "accuracy",
    target="embodyrl.algorithms.filters:accuracy",
    facts={"group": True},
    summary="keeps groups whose success rate lies within limits",
)
