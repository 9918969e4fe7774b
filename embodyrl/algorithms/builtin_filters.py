"""Filters of groups that come with embodyrl, declared by name."""

from __future__ import annotations

from embodyrl.registry import FILTERS

FILTERS.register(
    "none",
    target="embodyrl.algorithms.filters:none",
    group=False,
    summary="learns from every group",
)
FILTERS.register(
    "zero_variance",
    target="embodyrl.algorithms.filters:zero_variance",
    options="embodyrl.algorithms.options:ZeroVarianceConfig",
    group=True,
    summary="drops groups whose episodes all came out the same (DAPO, Yu et al. 2025)",
)
FILTERS.register(
    "accuracy",
    target="embodyrl.algorithms.filters:accuracy",
    options="embodyrl.algorithms.options:AccuracyConfig",
    group=True,
    check="embodyrl.algorithms.check:check_accuracy",
    summary="keeps groups whose success rate lies within limits",
)
