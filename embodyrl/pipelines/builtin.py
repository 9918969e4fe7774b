"""The iteration graphs that come with embodyrl, declared by name."""

from __future__ import annotations

from embodyrl.registry import ALGORITHMS

ALGORITHMS.register("ppo", target="embodyrl.pipelines.graphs:ppo", summary="proximal policy optimisation with a critic")
ALGORITHMS.register(
    "grpo", target="embodyrl.pipelines.graphs:grpo", summary="group-relative policy optimisation, no critic"
)
