"""The iteration graphs that come with embodyrl, declared by name."""

from __future__ import annotations

import embodyrl.pipelines.rules  # noqa: F401 - adds its rules
from embodyrl.registry import ALGORITHMS, Requirement

for name, critic, summary in (
    ("ppo", True, "proximal policy optimisation with a critic"),
    ("grpo", False, "group-relative policy optimisation, no critic"),
    ("dapo", False, "grpo with dynamic sampling: groups that teach nothing are replaced"),
    ("reinforce_pp", False, "REINFORCE++: returns normalised over the batch, no critic"),
    ("rloo", False, "REINFORCE leave-one-out: each episode against the others of its group, no critic"),
    ("cpgd", False, "clipped policy gradient with policy drift, no critic"),
    ("srpo", False, "self-referential: failures are paid by their distance to the batch's own successes"),
):
    ALGORITHMS.register(
        name,
        target=f"embodyrl.pipelines.graphs:{name}",
        critic=critic,
        summary=summary,
    )

ALGORITHMS.register(
    "sft",
    target="embodyrl.pipelines.graphs:sft",
    requires=[Requirement(module="pyarrow", install="pip install 'embodyrl[data]'")],
    demonstrations=True,
    check="embodyrl.data.check:check",
    summary="supervised fine-tuning on demonstrations (data.path), no rollouts",
)
