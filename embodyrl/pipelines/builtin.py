"""The iterations that come with embodyrl, each as a list of stages, and the stages, each with what it reads, writes and
changes.

What a stage does is in `stages.py`, and with which settings is in configs/algorithm/. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from embodyrl.algorithms.off_policy_options import IQLConfig
from embodyrl.config.schema import Config
from embodyrl.pipelines.pipeline import Iteration, Stage
from embodyrl.registry import ALGORITHMS, STAGES, Requirement

COLLECT = Stage("rollout", "collect")
COLLECT_WITH_CRITIC = Stage("rollout", "collect", writes=("values", "next_values"))
REMEMBER = Stage("remember", "remember")
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
    """GRPO with dynamic sampling: groups without a learning signal are replaced by others (Yu et al. 2025)."""
    return [COLLECT, FILTER, REWARD, ADVANTAGE, UPDATE]


def sac(config: Config) -> list[Stage]:
    """Soft actor-critic (Haarnoja et al. 2018)."""
    return [COLLECT, REMEMBER, Stage("improve", "improve")]


def dagger(config: Config) -> list[Stage]:
    """Dataset aggregation (Ross et al. 2011)."""
    shown = () if config.data.path is None else ("demonstrations",)
    return [COLLECT, REMEMBER, Stage("improve", "learn_corrections", reads=shown)]


def rlpd(config: Config) -> list[Stage]:
    """Soft actor-critic with demonstrations in every minibatch (Ball et al. 2023)."""
    *before, improve = sac(config)
    return [*before, replace(improve, reads=("demonstrations",))]


def iql(config: Config) -> list[Stage]:
    """Implicit Q-learning: offline, then with rollouts (Kostrikov et al. 2021)."""
    assert isinstance(config.algorithm, IQLConfig), "its registration says so"
    offline = config.algorithm.off_policy.offline_iterations

    def is_offline(iteration: Iteration) -> bool:
        return iteration.number <= offline

    def is_online(iteration: Iteration) -> bool:
        return not is_offline(iteration)

    alone = Stage("offline", "improve_offline", when=is_offline)
    if not config.algorithm.rolls_out(config.run.iterations):
        return [alone]
    return [
        *([alone] if offline else []),
        replace(COLLECT, when=is_online),
        Stage("remember", "remember", when=is_online),
        Stage("improve", "improve", reads=("demonstrations",), when=is_online),
    ]


def dsrl(config: Config) -> list[Stage]:
    """Soft actor-critic over the noise of a frozen flow policy (Wagenmakers et al. 2025)."""
    return [COLLECT, Stage("remember", "remember_noise"), Stage("improve", "improve")]


def sft(config: Config) -> list[Stage]:
    """Supervised fine-tuning on demonstrations."""
    return [Stage("update", "sft_step")]


def declare_algorithms() -> None:
    """Iterations, and the config rules about them."""
    import embodyrl.pipelines.rules  # noqa: F401 - adds its rules; a simulator process with a stage of its own needs none

    for name, stages, critic, summary in (
        ("ppo", ppo, True, "proximal policy optimisation with a critic"),
        ("grpo", grpo, False, "group-relative policy optimisation, no critic"),
        ("dapo", dapo, False, "grpo with dynamic sampling: groups without a learning signal are replaced"),
        # The stages of GRPO, with another advantage (Hu 2025, Ahmadian et al. 2024), loss (Liu et al. 2025) or reward.
        ("reinforce_pp", grpo, False, "REINFORCE++: returns normalised over the batch, no critic"),
        ("rloo", grpo, False, "REINFORCE leave-one-out: each episode against the others of its group, no critic"),
        ("cpgd", grpo, False, "clipped policy gradient with policy drift, no critic"),
        ("srpo", grpo, False, "self-referential: failures get reward by their distance to the batch's own successes"),
    ):
        ALGORITHMS.register(name, target=stages, critic=critic, summary=summary)
    demonstrated = Requirement(module="pyarrow", install="pip install 'embodyrl[data]'")
    from_replay: dict[str, Any] = {
        "off_policy": True,
        "check": "embodyrl.pipelines.replay_rules:check",
        "notes": "embodyrl.pipelines.replay_rules:notes",
    }
    ALGORITHMS.register(
        "sft",
        target=sft,
        requires=[demonstrated],
        demonstrations=True,
        imitates=True,
        check="embodyrl.data.check:check_to_imitate",
        summary="supervised fine-tuning on demonstrations (data.path), no rollouts",
    )
    ALGORITHMS.register(
        "reward_classifier",
        target=sft,
        options="embodyrl.algorithms.options:RewardClassifierConfig",
        requires=[demonstrated],
        demonstrations=True,
        imitates=True,
        judges=True,
        check="embodyrl.pipelines.judging_rules:check",
        summary="learns from demonstrations (data.path) to recognise success, for algorithm.reward: classifier",
    )
    ALGORITHMS.register(
        "sac",
        target=sac,
        options="embodyrl.algorithms.off_policy_options:SACConfig",
        summary="soft actor-critic: learns from a replay of past decisions, with critics of actions",
        **from_replay,
    )
    ALGORITHMS.register(
        "iql",
        target=iql,
        requires=[demonstrated],
        options="embodyrl.algorithms.off_policy_options:IQLConfig",
        demonstrations=True,
        weighs=True,
        summary="implicit Q-learning: from demonstrations (data.path) weighted by their advantage, then with rollouts",
        **from_replay,
    )
    ALGORITHMS.register(
        "rlpd",
        target=rlpd,
        requires=[demonstrated],
        options="embodyrl.algorithms.off_policy_options:RLPDConfig",
        demonstrations=True,
        summary="soft actor-critic with demonstrations (data.path) in every minibatch, after imitating them",
        **from_replay,
    )
    ALGORITHMS.register(
        "dagger",
        target=dagger,
        requires=[demonstrated],
        options="embodyrl.algorithms.off_policy_options:DAggerConfig",
        demonstrations=None,
        imitates=True,
        summary="dataset aggregation: imitates an expert in the states that the policy gets into, and demonstrations",
        **from_replay,
    )
    ALGORITHMS.register(
        "dsrl",
        target=dsrl,
        options="embodyrl.algorithms.off_policy_options:DSRLConfig",
        steers=True,
        summary="soft actor-critic that steers a frozen flow policy by choosing its noise",
        **from_replay,
    )


# ---- stages

OBSERVATIONS = ("proprio?", "images?")
CORRECTIONS = ("source?", "labels?", "labelled?")
JUDGED = ("judged?",)
EVERY_STEP = ("step_proprio?", "step_images?")
CRITIC = ("values?", "next_values?")
OUTCOME = ("rewards", "success", "terminated", "truncated", "steps", "valid")
ORIGIN = ("episode", "group", "start_state?", "seed?", "version", "address?")
ROLLOUT = (*OBSERVATIONS, *EVERY_STEP, "task_index", "actions", "logprobs", "trace", *OUTCOME, *ORIGIN)


def declare_stages() -> None:
    """Stage functions."""
    STAGES.register(
        "collect",
        target="embodyrl.pipelines.stages:collect",
        reads=("policy",),
        writes=(*ROLLOUT, *CORRECTIONS, *JUDGED),
        changes=("simulators",),
        summary="run the policy in the simulators (random actions until a replay holds enough)",
    )
    STAGES.register(
        "remember",
        target="embodyrl.pipelines.stages:remember",
        apart=True,
        reads=(*OBSERVATIONS, "task_index", "actions", *OUTCOME, "episode", *CORRECTIONS, *JUDGED),
        changes=("replay",),
        summary="add the rollout's decisions to the replay",
    )
    STAGES.register(
        "remember_noise",
        target="embodyrl.pipelines.stages:remember",
        apart=True,
        reads=("trace", *OUTCOME, "episode", *JUDGED),
        changes=("replay",),
        summary="add the rollout's decisions to the replay: the noise of a frozen flow policy, and what it saw",
    )
    STAGES.register(
        "improve",
        target="embodyrl.pipelines.stages:improve",
        reads=("replay",),
        changes=("policy",),
        summary="section algorithm.off_policy: learn from decisions drawn from the replay",
    )
    STAGES.register(
        "improve_offline",
        target="embodyrl.pipelines.stages:improve_offline",
        reads=("demonstrations",),
        changes=("policy",),
        summary="section algorithm.off_policy: learn from demonstrations alone",
    )
    STAGES.register(
        "learn_corrections",
        target="embodyrl.pipelines.stages:learn_corrections",
        reads=("replay",),
        changes=("policy",),
        summary="section algorithm.off_policy: imitate what an expert says about decisions drawn from the replay",
    )
    STAGES.register(
        "filter_groups",
        target="embodyrl.pipelines.stages:filter_groups",
        apart=True,
        reads=("policy",),
        changes=("simulators", *ROLLOUT, *CRITIC),
        summary="algorithm.filter: keep groups worth learning from, and collect again until there are enough",
    )
    STAGES.register(
        "shape_rewards",
        target="embodyrl.pipelines.stages:shape_rewards",
        apart=True,
        reads=(*OBSERVATIONS, "task_index", "actions", *OUTCOME, "episode", "group", "address?", *JUDGED),
        writes=("shaped_rewards",),
        summary="algorithm.reward: what is learned from",
    )
    STAGES.register(
        "estimate_advantages",
        target="embodyrl.pipelines.stages:estimate_advantages",
        reads=("shaped_rewards", "rewards", "terminated", "truncated", "steps", "valid", *CRITIC),
        writes=("advantages", "returns"),
        summary="algorithm.advantage: from rewards to advantages and returns",
    )
    STAGES.register(
        "update",
        target="embodyrl.pipelines.stages:update",
        apart=True,
        reads=(
            *OBSERVATIONS,
            *("task_index", "logprobs", "trace", "rewards", "steps", "valid", "episode", "version", "address?"),
            *("values?", "advantages", "returns"),
        ),
        changes=("policy", "simulators"),
        summary="algorithm.loss: learn from the batch",
    )
    STAGES.register(
        "sft_step",
        target="embodyrl.pipelines.stages:sft_step",
        reads=("demonstrations",),
        changes=("policy",),
        summary="section data: learn from demonstrations",
    )
