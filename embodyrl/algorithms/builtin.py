"""The built-in components, declared by name: one function for each registry, which calls it once.

Nothing here imports torch: a config is checked against these entries before anything else is loaded.
"""

from __future__ import annotations

from embodyrl.registry import ADVANTAGES, ENCODERS, FILTERS, LOSSES, REWARDS

COMPARES = "embodyrl.algorithms.options:compares_groups"


def declare_losses() -> None:
    """Policy losses."""
    LOSSES.register(
        "ppo",
        target="embodyrl.algorithms.losses:ppo",
        options="embodyrl.algorithms.options:PPOLossConfig",
        whole=False,
        corrects_staleness=True,
        summary="clipped surrogate (Schulman et al. 2017), with separate lower and upper clip and dual clip",
    )
    LOSSES.register(
        "decoupled_ppo",
        target="embodyrl.algorithms.variants:decoupled_ppo",
        options="embodyrl.algorithms.options:DecoupledPPOLossConfig",
        whole=False,
        corrects_staleness=True,
        summary="PPO for chunks of an older policy, clipped around a proximal one (Hilton et al. 2021)",
    )
    LOSSES.register(
        "cpgd",
        target="embodyrl.algorithms.variants:cpgd",
        options="embodyrl.algorithms.options:CPGDLossConfig",
        whole=False,
        summary="clipped policy gradient with policy drift (Liu et al. 2025); no probability ratio",
    )
    LOSSES.register(
        "gspo",
        target="embodyrl.algorithms.variants:gspo",
        options="embodyrl.algorithms.options:GSPOLossConfig",
        whole=True,
        corrects_staleness=True,
        summary="clipped ratio of whole episodes (Zheng et al. 2025)",
    )


def declare_advantages() -> None:
    """Advantage estimators."""
    ADVANTAGES.register(
        "gae",
        target="embodyrl.algorithms.advantages:gae",
        options="embodyrl.algorithms.options:GAEConfig",
        critic=True,
        whole=False,
        group=False,
        actions=False,
        summary="generalised advantage estimation (Schulman et al. 2016); needs a critic",
    )
    ADVANTAGES.register(
        "grpo",
        target="embodyrl.algorithms.critic_free:grpo",
        options="embodyrl.algorithms.options:GRPOConfig",
        critic=False,
        whole=True,
        group=COMPARES,
        actions=False,
        summary="return relative to a group's or the batch's: GRPO, Dr.GRPO, RLOO, REINFORCE++-baseline; no critic",
    )
    ADVANTAGES.register(
        "reinforce_pp",
        target="embodyrl.algorithms.critic_free:reinforce_pp",
        critic=False,
        whole=True,
        group=False,
        actions=True,
        summary="discounted return to the end of the episode (REINFORCE++, Hu et al. 2025); no critic",
    )
    ADVANTAGES.register(
        "raw",
        target="embodyrl.algorithms.critic_free:raw",
        critic=False,
        whole=False,
        group=False,
        actions=True,
        summary="the reward itself, for reward functions that assign credit",
    )


def declare_rewards() -> None:
    """Rewards."""
    REWARDS.register(
        "dense",
        target="embodyrl.algorithms.rewards:dense",
        whole=False,
        of_decisions=True,
        summary="the simulator's own reward",
    )
    REWARDS.register(
        "success",
        target="embodyrl.algorithms.rewards:success",
        whole=True,
        of_decisions=True,
        summary="1 for the action that first solves the task, else 0",
    )
    REWARDS.register(
        "classifier",
        target="embodyrl.algorithms.rewards:classifier",
        options="embodyrl.algorithms.options:ClassifierRewardConfig",
        whole=False,
        of_decisions=True,
        judge="embodyrl.rollout.judging:classifier_reward",
        judged="judged",
        check="embodyrl.methods.judges.rules:check_classifier_reward",
        summary="1 for the action after which a learned classifier takes the episode for solved, else 0",
    )
    REWARDS.register(
        "progress",
        target="embodyrl.algorithms.rewards:progress",
        options="embodyrl.algorithms.options:ProgressRewardConfig",
        whole=False,
        of_decisions=True,
        judge="embodyrl.rollout.judging:progress_reward",
        judged="progress",
        check="embodyrl.methods.judges.rules:check_progress_reward",
        summary="gain of the progress that a learned predictor sees (or its level)",
    )
    REWARDS.register(
        "vlm",
        target="embodyrl.algorithms.rewards:asked",
        options="embodyrl.algorithms.asked:VLMRewardConfig",
        whole=True,
        judge="embodyrl.rollout.asking:vlm_reward",
        judged="answers",
        check="embodyrl.algorithms.asked:check_vlm",
        notes="embodyrl.algorithms.asked:vlm_notes",
        summary="answer of a vision-language model (OpenAI's chat completions) that sees images of each episode",
    )
    REWARDS.register(
        "difference",
        target="embodyrl.algorithms.rewards:difference",
        whole=True,
        summary="gain of the simulator's own reward over the action before",
    )
    REWARDS.register(
        "srpo",
        target="embodyrl.algorithms.rewards:srpo",
        options="embodyrl.algorithms.options:SRPORewardConfig",
        whole=True,
        summary="1 for a success; failures by their distance to successes (self-referential, Fei et al. 2025)",
    )


def declare_filters() -> None:
    """Filters of groups."""
    FILTERS.register(
        "none",
        target="embodyrl.algorithms.rewards:none",
        group=False,
        summary="learns from every group",
    )
    FILTERS.register(
        "zero_variance",
        target="embodyrl.algorithms.rewards:zero_variance",
        options="embodyrl.algorithms.options:ZeroVarianceConfig",
        group=True,
        summary="drops groups whose episodes all came out the same (DAPO, Yu et al. 2025)",
    )
    FILTERS.register(
        "accuracy",
        target="embodyrl.algorithms.rewards:accuracy",
        options="embodyrl.algorithms.options:AccuracyConfig",
        group=True,
        check="embodyrl.algorithms.options:check_accuracy",
        summary="keeps groups whose success rate lies within limits",
    )


def declare_encoders() -> None:
    """Encoders of episodes."""
    ENCODERS.register(
        "random_projection",
        target="embodyrl.algorithms.rewards:random_projection",
        summary="fixed random projection of state observations and of small images; nothing to download",
    )
