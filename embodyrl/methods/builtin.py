"""The methods that come with embodyrl, a registration each, and their stages with what each reads, writes and changes.

The stages of a method are in its folder, or its family's, and its settings in configs/algorithm/. Nothing here imports
torch.
"""

from __future__ import annotations

from embodyrl.registry import ALGORITHMS, STAGES, Requirement

HERE = "embodyrl.methods"
DEMONSTRATED = (Requirement(module="pyarrow", install="pip install 'embodyrl[data]'"),)


def declare_algorithms() -> None:
    """Methods, and the config rules about stages."""
    import embodyrl.pipelines.rules  # noqa: F401 - adds its rules; a simulator process with a stage of its own needs none

    _declare_newest()
    _declare_imitating()
    _declare_actor_critics()
    _declare_offline_first()


def _declare_newest() -> None:
    """Methods that learn from their newest rollout."""
    of_newest = f"{HERE}.on_policy.iteration"
    ALGORITHMS.register(
        "ppo", target=f"{of_newest}:ppo", critic=True, summary="proximal policy optimisation with a critic"
    )
    # The stages of GRPO, with another advantage (Hu 2025, Ahmadian et al. 2024), loss (Liu et al. 2025) or reward.
    for name, stages, summary in (
        ("grpo", "grpo", "group-relative policy optimisation, no critic"),
        ("dapo", "dapo", "grpo with dynamic sampling: groups without a learning signal are replaced"),
        ("reinforce_pp", "grpo", "REINFORCE++: returns normalised over the batch, no critic"),
        ("rloo", "grpo", "REINFORCE leave-one-out: each episode against the others of its group, no critic"),
        ("cpgd", "grpo", "clipped policy gradient with policy drift, no critic"),
    ):
        ALGORITHMS.register(name, target=f"{of_newest}:{stages}", critic=False, summary=summary)
    ALGORITHMS.register(
        "srpo",
        target=f"{of_newest}:grpo",
        options=f"{HERE}.on_policy.config:SRPOConfig",
        critic=False,
        summary="self-referential: failures get reward by their distance to the batch's own successes",
    )
    for name, kind, learner, summary in (
        ("nft", "NFTConfig", "NegativeAware", "negative-aware fine-tuning of flow policies, no log-probs"),
        ("fpo", "FPOConfig", "FlowPolicyOptimization", "flow policy optimisation: ratios of flow-matching errors"),
    ):
        ALGORITHMS.register(
            name,
            target=f"{of_newest}:grpo",
            options=f"{HERE}.{name}.config:{kind}",
            learner=f"{HERE}.{name}.learner:{learner}",
            critic=False,
            summary=summary,
        )


def _declare_imitating() -> None:
    """Methods that imitate, and those that judge."""
    ALGORITHMS.register(
        "sft",
        target=f"{HERE}.sft.iteration:sft",
        options=f"{HERE}.sft.config:SFTConfig",
        learner=f"{HERE}.sft.learner:SupervisedLearner",
        requires=DEMONSTRATED,
        demonstrations=True,
        summary="supervised fine-tuning on demonstrations (data.path), no rollouts",
    )
    ALGORITHMS.register(
        "reward_classifier",
        target=f"{HERE}.sft.iteration:sft",
        options=f"{HERE}.reward_classifier.config:RewardClassifierConfig",
        learner=f"{HERE}.reward_classifier.learner:ClassifierLearner",
        requires=DEMONSTRATED,
        demonstrations=True,
        summary="learns from demonstrations (data.path) to recognise success, for algorithm.reward: classifier",
    )
    ALGORITHMS.register(
        "reward_progress",
        target=f"{HERE}.sft.iteration:sft",
        options=f"{HERE}.reward_progress.config:RewardProgressConfig",
        learner=f"{HERE}.reward_progress.learner:ProgressLearner",
        requires=DEMONSTRATED,
        demonstrations=True,
        summary="learns from demonstrations (data.path) how far the task is, for algorithm.reward: progress",
    )
    ALGORITHMS.register(
        "dagger",
        target=f"{HERE}.replay.iteration:demonstrated",
        options=f"{HERE}.dagger.config:DAggerConfig",
        learner=f"{HERE}.dagger.learner:Aggregation",
        requires=DEMONSTRATED,
        demonstrations=None,
        summary="dataset aggregation: imitates an expert in the states that the policy gets into, and demonstrations",
    )


def _declare_actor_critics() -> None:
    """Soft actor-critic and its kin."""
    ALGORITHMS.register(
        "sac",
        target=f"{HERE}.replay.iteration:replayed",
        options=f"{HERE}.sac.config:SACConfig",
        learner=f"{HERE}.sac.learner:SoftActorCritic",
        summary="soft actor-critic: learns from a replay of past decisions, with critics of actions",
    )
    ALGORITHMS.register(
        "crossq",
        target=f"{HERE}.replay.iteration:replayed",
        options=f"{HERE}.crossq.config:CrossQConfig",
        learner=f"{HERE}.crossq.learner:CrossedActorCritic",
        summary="soft actor-critic without target networks: critics with batch renormalisation",
    )
    ALGORITHMS.register(
        "rlpd",
        target=f"{HERE}.replay.iteration:demonstrated",
        options=f"{HERE}.rlpd.config:RLPDConfig",
        learner=f"{HERE}.rlpd.learner:DemonstratedActorCritic",
        requires=DEMONSTRATED,
        demonstrations=True,
        summary="soft actor-critic with demonstrations (data.path) in every minibatch, after imitating them",
    )
    ALGORITHMS.register(
        "dsrl",
        target=f"{HERE}.dsrl.iteration:dsrl",
        options=f"{HERE}.dsrl.config:DSRLConfig",
        learner=f"{HERE}.sac.learner:SoftActorCritic",
        summary="soft actor-critic that steers a frozen flow policy by choosing its noise",
    )


def _declare_offline_first() -> None:
    """Methods that may begin with demonstrations alone."""
    ALGORITHMS.register(
        "td3",
        target=f"{HERE}.replay.iteration:offline_first",
        options=f"{HERE}.td3.config:TD3Config",
        learner=f"{HERE}.td3.learner:TwinDelayed",
        demonstrations=None,
        summary="twin delayed deterministic policy gradient: noise of a fixed size in place of an entropy; TD3+BC",
    )
    ALGORITHMS.register(
        "iql",
        target=f"{HERE}.replay.iteration:offline_first",
        options=f"{HERE}.iql.config:IQLConfig",
        learner=f"{HERE}.iql.learner:ImplicitQ",
        requires=DEMONSTRATED,
        demonstrations=True,
        summary="implicit Q-learning: from demonstrations (data.path) weighted by their advantage, then with rollouts",
    )
    ALGORITHMS.register(
        "qc",
        target=f"{HERE}.replay.iteration:offline_first",
        options=f"{HERE}.qc.config:QCConfig",
        learner=f"{HERE}.qc.learner:QChunking",
        requires=DEMONSTRATED,
        demonstrations=True,
        summary="Q-chunking: a flow policy imitates (data.path, replay), critics choose the best of its chunks",
    )
    ALGORITHMS.register(
        "qc_fql",
        target=f"{HERE}.replay.iteration:offline_first",
        options=f"{HERE}.qc_fql.config:QCFQLConfig",
        learner=f"{HERE}.qc_fql.learner:DistilledQChunking",
        requires=DEMONSTRATED,
        demonstrations=True,
        summary="Q-chunking with a policy of one step, distilled from the flow policy and taught by critics",
    )
    ALGORITHMS.register(
        "recap",
        target=f"{HERE}.recap.iteration:recap",
        options=f"{HERE}.recap.config:RecapConfig",
        learner=f"{HERE}.recap.learner:AdvantageConditioned",
        demonstrations=None,
        summary="advantage-conditioned flow policies: learns everything, told in its prompt what was better",
    )


# ---- stages

OBSERVATIONS = ("proprio?", "images?")
CORRECTIONS = ("source?", "labels?", "labelled?")
JUDGED = ("judged?", "progress?", "answers?")
EVERY_STEP = ("step_proprio?", "step_images?")
CRITIC = ("values?", "next_values?")
OUTCOME = ("rewards", "success", "terminated", "truncated", "steps", "valid")
ORIGIN = ("episode", "group", "start_state?", "seed?", "version", "address?")
TOKENS = ("counted?", "invalid_actions?")
ROLLOUT = (*OBSERVATIONS, *EVERY_STEP, "task_index", "actions", "logprobs", *TOKENS, "trace", *OUTCOME, *ORIGIN)


def declare_stages() -> None:
    """Stage functions."""
    STAGES.register(
        "collect",
        target="embodyrl.methods.stages:collect",
        reads=("policy",),
        writes=(*ROLLOUT, *CORRECTIONS, *JUDGED),
        changes=("simulators",),
        summary="run the policy in the simulators (random actions until a replay holds enough)",
    )
    STAGES.register(
        "remember",
        target="embodyrl.methods.replay.stages:remember",
        apart=True,
        reads=(*OBSERVATIONS, "task_index", "actions", *OUTCOME, "episode", *CORRECTIONS, *JUDGED),
        changes=("replay",),
        summary="add the rollout's decisions to the replay",
    )
    STAGES.register(
        "remember_noise",
        target="embodyrl.methods.replay.stages:remember",
        apart=True,
        reads=("trace", *OUTCOME, "episode", *JUDGED),
        changes=("replay",),
        summary="add the rollout's decisions to the replay: the noise of a frozen flow policy, and what it saw",
    )
    STAGES.register(
        "improve",
        target="embodyrl.methods.replay.stages:improve",
        reads=("replay",),
        changes=("policy",),
        summary="section algorithm.off_policy: learn from decisions drawn from the replay",
    )
    STAGES.register(
        "improve_offline",
        target="embodyrl.methods.replay.stages:improve_offline",
        reads=("demonstrations",),
        changes=("policy",),
        summary="section algorithm.off_policy: learn from demonstrations alone",
    )
    STAGES.register(
        "judge_and_learn",
        target="embodyrl.methods.recap.stages:judge_and_learn",
        reads=("replay", "demonstrations?"),
        changes=("policy",),
        summary="section algorithm.off_policy: judge all decisions, and learn them, told which were better",
    )
    STAGES.register(
        "filter_groups",
        target="embodyrl.methods.on_policy.filtering:filter_groups",
        apart=True,
        reads=("policy",),
        changes=("simulators", *ROLLOUT, *CRITIC),
        summary="algorithm.filter: keep groups worth learning from, and collect again until there are enough",
    )
    STAGES.register(
        "shape_rewards",
        target="embodyrl.methods.on_policy.stages:shape_rewards",
        apart=True,
        reads=(*OBSERVATIONS, "task_index", "actions", *OUTCOME, "episode", "group", "address?", *JUDGED),
        writes=("shaped_rewards",),
        summary="algorithm.reward: what is learned from",
    )
    STAGES.register(
        "estimate_advantages",
        target="embodyrl.methods.on_policy.stages:estimate_advantages",
        reads=("shaped_rewards", "rewards", "terminated", "truncated", "steps", "valid", *CRITIC),
        writes=("advantages", "returns"),
        summary="algorithm.advantage: from rewards to advantages and returns",
    )
    STAGES.register(
        "update",
        target="embodyrl.methods.on_policy.stages:update",
        apart=True,
        reads=(
            *OBSERVATIONS,
            *("task_index", "logprobs", "trace", "rewards", "steps", "valid", "episode", "version", "address?"),
            *("counted?", "values?", "advantages", "returns"),
        ),
        changes=("policy", "simulators"),
        summary="algorithm.loss: learn from the batch",
    )
    STAGES.register(
        "sft_step",
        target="embodyrl.methods.sft.stages:sft_step",
        reads=("demonstrations",),
        changes=("policy",),
        summary="section data: learn from demonstrations",
    )
