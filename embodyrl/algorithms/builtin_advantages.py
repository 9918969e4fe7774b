"""Advantage estimators that come with embodyrl, declared by name."""

from __future__ import annotations

from embodyrl.registry import ADVANTAGES

ADVANTAGES.register(
    "gae",
    target="embodyrl.algorithms.advantages:gae",
    facts={"critic": True, "group": False},
    summary="generalised advantage estimation (Schulman et al. 2016); needs a critic",
)
ADVANTAGES.register(
    "grpo",
    target="embodyrl.algorithms.advantages:grpo",
    facts={"critic": False, "group": True},
    summary="group-relative return of whole episodes (Shao et al. 2024); no critic",
)
