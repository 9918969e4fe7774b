"""The iterations that come with embodyrl, each as a list of stages.

What a stage reads, writes and changes is declared in `builtin_stages.py`, what it does is in `stages.py`, and with
which settings is in configs/algorithm/.
"""

from __future__ import annotations

import embodyrl.pipelines.rules  # noqa: F401 - adds its rules
from embodyrl.config.schema import Config
from embodyrl.pipelines.pipeline import Stage
from embodyrl.registry import ALGORITHMS, Requirement

COLLECT = Stage("rollout", "collect")
COLLECT_WITH_CRITIC = Stage("rollout", "collect", writes=("values", "next_values"))
FILTER = Stage("filter", "filter_groups")
REWARD = Stage("reward", "shape_rewards")
ADVANTAGE = Stage("advantage", "estimate_advantages")
UPDATE = Stage("update", "update")


def ppo(config: Config) -> list[Stage]:
    """Proximal policy optimisation with a critic (Schulman et al. 2017)."""
    return [COLLECT_WITH_CRITIC, REWARD, ADVANTAGE, UPDATE]


def grpo(config: Config) -> list[Stage]:
    """Group-relative policy optimisation, without a critic (Shao et al. 2024)."""
    return [COLLECT, REWARD, ADVANTAGE, UPDATE]


def dapo(config: Config) -> list[Stage]:
    """GRPO with dynamic sampling: groups that teach nothing are replaced by others (Yu et al. 2025)."""
    return [COLLECT, FILTER, REWARD, ADVANTAGE, UPDATE]


def sft(config: Config) -> list[Stage]:
    """Supervised fine-tuning on demonstrations."""
    return [Stage("update", "sft_step")]


for name, stages, critic, summary in (
    ("ppo", ppo, True, "proximal policy optimisation with a critic"),
    ("grpo", grpo, False, "group-relative policy optimisation, no critic"),
    ("dapo", dapo, False, "grpo with dynamic sampling: groups that teach nothing are replaced"),
    # The stages of GRPO, with another advantage (Hu 2025, Ahmadian et al. 2024), loss (Liu et al. 2025) or reward.
    ("reinforce_pp", grpo, False, "REINFORCE++: returns normalised over the batch, no critic"),
    ("rloo", grpo, False, "REINFORCE leave-one-out: each episode against the others of its group, no critic"),
    ("cpgd", grpo, False, "clipped policy gradient with policy drift, no critic"),
    ("srpo", grpo, False, "self-referential: failures are paid by their distance to the batch's own successes"),
):
    ALGORITHMS.register(name, target=stages, critic=critic, summary=summary)

ALGORITHMS.register(
    "sft",
    target=sft,
    requires=[Requirement(module="pyarrow", install="pip install 'embodyrl[data]'")],
    demonstrations=True,
    check="embodyrl.data.check:check",
    summary="supervised fine-tuning on demonstrations (data.path), no rollouts",
)
