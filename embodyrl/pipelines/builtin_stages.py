"""The stages that come with embodyrl, declared by name: what each reads, writes and changes."""

from __future__ import annotations

from embodyrl.registry import STAGES

OBSERVATIONS = ("proprio?", "images?")
EVERY_STEP = ("step_proprio?", "step_images?")
CRITIC = ("values?", "next_values?")
OUTCOME = ("rewards", "success", "terminated", "truncated", "steps", "valid")
ORIGIN = ("episode", "group", "start_state?", "seed?", "version")
ROLLOUT = (*OBSERVATIONS, *EVERY_STEP, "task_index", "actions", "logprobs", "trace", *OUTCOME, *ORIGIN)

STAGES.register(
    "collect",
    target="embodyrl.pipelines.stages:collect",
    reads=("policy",),
    writes=ROLLOUT,
    changes=("simulators",),
    summary="run the policy in the simulators",
)
STAGES.register(
    "filter_groups",
    target="embodyrl.pipelines.stages:filter_groups",
    reads=("policy",),
    changes=("simulators", *ROLLOUT, *CRITIC),
    summary="algorithm.filter: keep groups worth learning from, and collect again until there are enough",
)
STAGES.register(
    "shape_rewards",
    target="embodyrl.pipelines.stages:shape_rewards",
    reads=(*OBSERVATIONS, "task_index", "actions", *OUTCOME, "episode", "group"),
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
    reads=(
        *OBSERVATIONS,
        *("task_index", "logprobs", "trace", "rewards", "steps", "valid", "episode", "version", "values?"),
        *("advantages", "returns"),
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
