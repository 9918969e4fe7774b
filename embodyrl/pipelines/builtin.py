"""The iteration graphs that come with embodyrl, declared by name."""

from __future__ import annotations

from embodyrl.registry import ALGORITHMS

ALGORITHMS.register(
    "ppo",
    target="embodyrl.pipelines.graphs:ppo",
    facts={"critic": True},
    summary="proximal policy optimisation with a critic",
)
ALGORITHMS.register(
    "grpo",
    target="embodyrl.pipelines.graphs:grpo",
    facts={"critic": False},
    summary="group-relative policy optimisation, no critic",
)
