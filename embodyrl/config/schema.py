"""Every setting, its type, default, range and meaning. This file is the only owner of defaults.

A component's own options live in a subclass of `ModelConfig`, `EnvConfig`, `LossConfig`, `AdvantageConfig`,
`RewardConfig` or `FilterConfig` beside the component and are named in its registry entry. The text below a field
documents it: `embodyrl run --print-config` writes it as a comment.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import embodyrl.registry


class OfTasks(StrEnum):
    """What it is if a value stays that was written for other tasks."""

    fault = "fault"
    """It changes what success or a task is."""
    note = "note"
    """It may well be right."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    words: tuple[str, ...] = (),
    registry: str | None = None,
    of_tasks: OfTasks | None = None,
) -> Any:
    """A dataclass field with its legal values.

    Args:
        default: the default; without one the setting is required. Lists and maps are copied for every instance.
        low, high: inclusive bounds (for lists: of every entry). above, below: exclusive bounds.
        words: for `int | str` fields, the strings that are legal.
        registry: name of the registry in `embodyrl.registry` whose names are legal (lists, maps: of every entry).
        of_tasks: for options of simulators, what it is if a value that was written for some tasks is left to others; by
            default it has nothing to do with tasks.
    """
    metadata = {"low": low, "high": high, "above": above, "below": below, "words": words, "registry": registry}
    metadata["of_tasks"] = of_tasks
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


LEFT_OPEN = "<weights>"
"""Stands for a value that is to be given when the config runs."""


class Episodes(StrEnum):
    """How episodes fill a rollout."""

    continuous = "continuous"
    whole = "whole"


class Bootstrap(StrEnum):
    """When the value of the last observation stands in for the rewards that were cut off."""

    none = "none"
    truncation = "truncation"


class DiscountPer(StrEnum):
    """What one factor of gamma covers."""

    action = "action"
    chunk = "chunk"


class Device(StrEnum):
    """Where the policy computes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Offload(StrEnum):
    """What is away from the device while the policy acts."""

    none = "none"
    optimizer = "optimizer"
    all = "all"


class Precision(StrEnum):
    """What forward passes compute in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Numa(StrEnum):
    """Whether simulator processes keep to one NUMA node each."""

    auto = "auto"
    off = "off"


class StartMethod(StrEnum):
    """How simulator processes come into being."""

    auto = "auto"
    fork = "fork"
    spawn = "spawn"


class OnWorkerDeath(StrEnum):
    """What follows when a simulator process dies or hangs."""

    fail = "fail"
    restart = "restart"


class Schedule(StrEnum):
    """How deciding and simulating take turns."""

    lockstep = "lockstep"
    pipeline = "pipeline"
    ready_batch = "ready_batch"


class Observe(StrEnum):
    """Which observations a rollout keeps."""

    chunk_end = "chunk_end"
    every_step = "every_step"


class ParallelBackend(StrEnum):
    """What each of several ranks holds of the policy."""

    auto = "auto"
    none = "none"
    fsdp = "fsdp"


class LearningRate(StrEnum):
    """How the learning rate changes over the run."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Level(StrEnum):
    """What one number is for: a decision, an action of its chunk, or an entry of an action."""

    chunk = "chunk"
    action = "action"
    token = "token"


class RewardLevel(StrEnum):
    """What a reward and an advantage are for."""

    chunk = "chunk"
    action = "action"


class NormLevel(StrEnum):
    """Over which episodes a mean or a standard deviation is taken."""

    group = "group"
    batch = "batch"
    none = "none"


class Aggregation(StrEnum):
    """How the losses of a batch become one number."""

    token_mean = "token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_mean = "seq_mean_token_mean"
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"


class KLEstimator(StrEnum):
    """How the distance to the reference policy is estimated."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class Proximal(StrEnum):
    """Where decoupled PPO's proximal policy comes from."""

    recompute = "recompute"
    loglinear = "loglinear"


class OldLogprobs(StrEnum):
    """Where the log-probs come from that ratios are taken to."""

    rollout = "rollout"
    recompute = "recompute"


class Excess(StrEnum):
    """What becomes of an importance weight beyond its cap."""

    mask = "mask"
    clamp = "clamp"


class FilterMetric(StrEnum):
    """What the episodes of a group are compared by."""

    success = "success"
    total_reward = "total_reward"


class AtEnd(StrEnum):
    """What becomes of a chunk that reaches beyond the end of its demonstration."""

    repeat = "repeat"
    drop = "drop"


class Compat(StrEnum):
    """Whose peculiarities are reproduced."""

    none = "none"
    siirl = "siirl"


class KeepBest(StrEnum):
    """The metric of an evaluation by which checkpoints are compared."""

    none = "none"
    success_once = "eval/success_once"
    mean_return = "eval/return"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run as a whole: its name, folder and length."""

    name: str = setting("run")
    """Name of the run, which can be that of a folder; its folder is runs/<name>/<time> unless `run.dir` is set."""
    dir: str | None = setting(None)
    """Run directory; it must not exist yet. null: runs/<name>/<time>."""
    iterations: int = setting(100, low=1)
    """Iterations (rollout + update)."""
    eval_every: int = setting(20, low=0)
    """Evaluate after every so many iterations; 0: only at the end."""
    save_every: int = setting(50, low=0)
    """Save a checkpoint after every so many iterations; 0: only at the end and when stopped."""
    save_async: bool = setting(False)
    """Copy what is to be saved and write it while the run goes on. Takes memory for a copy of weights and optimiser."""
    keep_last: int = setting(0, low=0)
    """Keep so many of the newest checkpoints; 0: all."""
    keep_best: KeepBest = setting(KeepBest.none)
    """What makes a checkpoint the best so far: the success rate (success_once) or the mean return (mean_return) of its
    evaluation. It is saved at once and kept, and `checkpoints/best` leads to it. none: nothing does."""
    stop_at_success: float | None = setting(None, above=0.0, high=1.0)
    """Stop early once an evaluation's success rate reaches this; null: run all iterations."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The simulator. Backends add their own options."""

    name: str = setting(registry="SIMULATORS")
    """Simulator backend; `embodyrl list simulators` shows them."""
    tasks: list[str] = setting()
    """Task names of the backend. With several, each episode draws one."""
    task_descriptions: dict[str, str] = setting({})
    """What the policy is told to do, by task: `{task: task_description}`. Tasks that are not named here have the
    simulator's own task description."""
    num_envs: int = setting(8, low=1)
    """Simulator slots that run side by side (B)."""
    workers: int | str = setting("auto", low=1, words=("auto",))
    """Simulator processes; num_envs must be a multiple. auto: num_envs' largest divisor up to the usable cores."""
    numa: Numa = setting(Numa.auto)
    """auto: each process keeps to the CPUs and the memory of one NUMA node, that of the policy's GPU while it has room.
    off: they run where the kernel puts them."""
    start_method: StartMethod = setting(StartMethod.auto)
    """spawn: each process is an interpreter of its own. fork: they are forked from one that has imported what the
    simulator needs, which is faster and shares memory. auto: fork where the simulator allows it, else spawn."""
    cameras: list[str] = setting([])
    """Cameras whose images the policy sees (V), in this order, by the backend's names; []: state observations."""
    image_size: list[int] = setting([224, 224], low=16, high=2048)
    """Height and width of every camera's image [pixels]."""
    max_episode_steps: int = setting(100, low=1, of_tasks=OfTasks.note)
    """Control steps after which an episode is cut off (truncated)."""
    start_states: int = setting(10000, low=1)
    """Training draws start states 0 .. start_states-1; evaluation must use others (`eval.first_start_state`)."""
    startup_timeout_s: float = setting(180.0, above=0.0)
    """Longest time for a simulator process to start [s]."""
    step_timeout_s: float = setting(60.0, above=0.0)
    """Longest time for one reset or one chunk [s]; after that the process counts as hung and is killed."""
    on_worker_death: OnWorkerDeath = setting(OnWorkerDeath.fail)
    """fail: a simulator process that dies or hangs ends the run. restart: it is replaced; the episodes it was playing
    are invalid and new ones begin."""
    max_restarts: int = setting(5, low=1)
    """restart: simulator processes that may be replaced in a run, those among them that die while they start; one more
    ends it."""
    offload: bool = setting(False)
    """End the simulator processes while the policy learns, to free their memory, and bring them back bit for bit."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on start states that training never sees."""

    episodes: int = setting(100, low=1)
    """Episodes per evaluation."""
    first_start_state: int = setting(10000, low=0)
    """First start-state id of evaluation. Tasks take turns and play one start state after the other from there on;
    training uses 0 .. env.start_states-1."""
    sample: bool = setting(False)
    """false: the policy takes its most likely actions. true: it draws them as in training, from a random stream that is
    the same in every evaluation; for policies whose likeliest actions are no good sign of how it does."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy. Models add their own options."""

    name: str = setting(registry="SupportedModel")
    """Model; `embodyrl list models` shows them."""
    checkpoint: str | None = setting(None)
    """Folder of a saved policy to start from; null: random weights. <weights>: left open, to be named when it runs, so
    that a config can be checked and planned where the weights are not."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How experience is collected."""

    num_chunks: int = setting(128, low=1)
    """Decisions per slot and rollout (K). Whole episodes end earlier where all slots are done."""
    chunk_size: int = setting(1, low=1)
    """Actions per decision (C), executed without looking in between."""
    episodes: Episodes = setting(Episodes.continuous)
    """continuous: slots reset themselves, episodes span rollouts. whole: each rollout is one whole episode per slot."""
    schedule: Schedule = setting(Schedule.lockstep)
    """lockstep: decide for all slots, then simulate all. pipeline: two halves of the slots take turns, one is simulated
    while the policy decides for the other; pays where deciding takes as long as simulating. ready_batch: decide for
    whichever slots are ready, so that a slow one delays nobody; pays where simulators have a process each and their
    steps differ in length. Which slots are decided on together then depends on the clock, and with it the noise that
    each of them draws: runs do not repeat exactly."""
    ready_slots: int | str = setting("auto", low=1, words=("auto",))
    """ready_batch: slots that must be ready before the policy decides. auto: a quarter of them."""
    observe: Observe = setting(Observe.chunk_end)
    """chunk_end: simulators look when a chunk is over. every_step: they look after every action, and the batch keeps
    that in `step_images` and `step_proprio`; the policy still decides on the last of them."""
    episodes_per_slot: int = setting(1, low=1)
    """Whole episodes that every slot plays in a rollout, one after the other; a slot that is done begins its next one
    at once. The batch has num_envs * episodes_per_slot columns."""
    group_size: int = setting(1, low=1)
    """Consecutive slots that play the same start state and seed (G), to be compared with each other."""


def component(section: Any) -> Any:
    """A dataclass field for a section that holds nothing but a component's name and options, so that choosing another
    component begins it anew. Without a value it is the component that the `name` of `section` has as default."""

    def with_defaults() -> Any:
        [name] = dataclasses.fields(section)
        entry = getattr(embodyrl.registry, name.metadata["registry"]).entry(name.default)
        return (entry.load_options() or section)(name=name.default)

    return field(default_factory=with_defaults)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What is learned from. Rewards add their own options."""

    name: str = setting("dense", registry="REWARDS")
    """Reward; `embodyrl list algorithms` shows them."""


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Which groups are learned from. Filters add their own options."""

    name: str = setting("none", registry="FILTERS")
    """Filter; `embodyrl list algorithms` shows them."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How good a decision was. Advantage estimators add their own options."""

    name: str = setting("gae", registry="ADVANTAGES")
    """Advantage estimator; `embodyrl list algorithms` shows them."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How the policy follows. Policy losses add their own options."""

    name: str = setting("ppo", registry="LOSSES")
    """Policy loss; `embodyrl list algorithms` shows them."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The learning algorithm. docs/algorithms.md says which settings make which published algorithm."""

    name: str = setting(registry="ALGORITHMS")
    """The stages of an iteration; `embodyrl list algorithms` shows them."""
    reward: RewardConfig = component(RewardConfig)
    """What is learned from: dense (the simulator's own reward), success (1 when the task is solved), difference (what
    the dense reward gained), srpo (success, and progress of failures)."""
    time_penalty: float = setting(0.0, low=0.0)
    """Subtracted from the reward of every executed action."""
    reward_scale: float = setting(1.0, above=0.0)
    """Rewards are multiplied by this for learning (metrics show them as they are), so that the critic's targets are of
    order 1 .. 10."""
    filter: FilterConfig = component(FilterConfig)
    """Which groups are learned from: none (all of them), zero_variance (drops groups whose episodes all came out the
    same), accuracy (keeps groups whose success rate lies within limits)."""
    max_collections: int = setting(1, low=1)
    """Rollouts per iteration at most (DAPO's dynamic sampling). It collects again until num_envs / group_size groups
    remain; what is left over waits for the next iteration. 1: learn from what remains of one rollout."""
    advantage: AdvantageConfig = component(AdvantageConfig)
    """How good a decision was: gae (with a critic), grpo (relative to other episodes), reinforce_pp (its return), raw
    (its reward)."""
    reward_level: RewardLevel = setting(RewardLevel.chunk)
    """chunk: a chunk's rewards are summed and its actions share one advantage. action: every action has its own
    (reinforce_pp and raw alone, since a critic values decisions)."""
    gamma: float = setting(0.99, low=0.0, high=1.0)
    """Discount factor."""
    discount_per: DiscountPer = setting(DiscountPer.chunk)
    """chunk: one factor of gamma per decision. action: one per executed action, also inside a chunk."""
    bootstrap: Bootstrap = setting(Bootstrap.truncation)
    """truncation: an episode that the time limit cuts off continues in its value estimate. none: it counts as ended."""
    normalize_advantages: bool = setting(True)
    """Scale the batch's advantages to mean 0 and standard deviation 1 before the update."""
    loss: LossConfig = component(LossConfig)
    """How the policy follows: ppo, decoupled_ppo (for decisions of an older policy), cpgd (without a ratio), gspo (the
    ratio of whole episodes)."""
    old_logprobs: OldLogprobs = setting(OldLogprobs.rollout)
    """What probability ratios are taken to. rollout: the log-probs with which decisions were taken. recompute: those of
    the same policy in another forward pass, in the micro-batches of the first pass over the rollout, so that its ratios
    start at exactly 1; for bfloat16, which rounds otherwise in a batch of another size. Decisions of earlier updates
    keep theirs."""
    logprob_level: Level = setting(Level.chunk)
    """What probability ratios, the KL penalty and the entropy bonus are taken of: whole decisions (chunk), the actions
    of a chunk, or the entries (tokens) of an action."""
    aggregation: Aggregation = setting(Aggregation.token_mean)
    """token_mean: mean over everything that counts. The others are means over episodes: of each one's sum, of each
    one's mean, or of each one's sum over the length of the longest possible episode."""
    epochs: int = setting(4, low=1)
    """Passes over each rollout."""
    minibatches: int = setting(4, low=1)
    """Optimiser steps per pass; num_envs * chunks must be a multiple."""
    proximal: Proximal = setting(Proximal.recompute)
    """For losses that clip ratios around a proximal policy (decoupled_ppo): that of the start of the update (recompute,
    a forward pass), or one between the policy that decided and the current one, by their versions (loglinear)."""
    value_coef: float = setting(0.5, low=0.0)
    """Weight of the value loss."""
    value_clip: float | None = setting(None, above=0.0)
    """Largest change of a value estimate per update that still has a gradient [return]; null: no clipping."""
    value_huber: float | None = setting(None, above=0.0)
    """Errors of a value estimate beyond this count linearly [return]; null: squared, whatever their size."""
    entropy_coef: float = setting(0.0, low=0.0)
    """Weight of the entropy bonus."""
    kl_coef: float = setting(0.0, low=0.0)
    """Weight of the KL divergence from a reference policy, the one that the run starts from. 0: there is none."""
    kl_estimator: KLEstimator = setting(KLEstimator.k3)
    """How that divergence is estimated; k1 has no gradient in the mean."""
    target_kl: float | None = setting(None, above=0.0)
    """Stop an update's epochs once the approximate KL to the rollout policy exceeds this [nats]; null: never."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Demonstrations to learn from (algorithm sft); `embodyrl collect` records some."""

    path: str | None = setting(None)
    """Folder of a LeRobotDataset v3.0 with images, states and actions as the simulator has them."""
    batch_size: int = setting(64, low=1)
    """Chunks of actions per optimiser step."""
    steps: int = setting(100, low=1)
    """Optimiser steps per iteration."""
    at_end: AtEnd = setting(AtEnd.repeat)
    """repeat: a chunk that reaches beyond the end of its episode goes on with the last action. drop: there are no such
    chunks."""
    shift_pixels: int = setting(0, low=0, high=64)
    """Images of a minibatch are moved by up to so many pixels, at random, in both directions; edges repeat."""
    memory_mib: int = setting(1024, low=1)
    """Memory for demonstrations [MiB]. Chunks are drawn from as many whole episodes as fit, which then make way for
    others."""


@dataclass(frozen=True, kw_only=True)
class InsertedStage:
    """A stage more in the iteration. It runs right after the last one that writes or changes a column it names."""

    name: str = setting()
    """Name of the stage."""
    stage: str = setting(registry="STAGES")
    """What it does; `embodyrl list stages` shows them, and each declares what it reads, writes and changes."""
    after: list[str] = setting([])
    """Stages that it must come after, besides."""
    before: list[str] = setting([])
    """Stages that it must come before, even if they change a column it names."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Changes to the stages of an iteration; `embodyrl graph` draws them."""

    function: str | None = setting(None)
    """`module:function` that takes the config and returns a list of stages, instead of that of algorithm.name. The
    module is imported from the config file's folder or installed, and runs with your rights."""
    drop: list[str] = setting([])
    """Stages to leave out."""
    replace: dict[str, str] = setting({}, registry="STAGES")
    """Something else to do for a stage: `{name: stage}`."""
    insert: list[InsertedStage] = setting([])
    """Stages to add."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimiser."""

    name: str = setting("adamw", registry="OPTIMIZERS")
    """adamw, or adamw_8bit, whose moments take a quarter of the memory (package bitsandbytes)."""
    lr: float = setting(3.0e-4, above=0.0, high=10.0)
    """Learning rate at the start."""
    critic_lr: float | None = setting(None, above=0.0, high=10.0)
    """Learning rate of the critic at the start. null: the same as `lr`."""
    schedule: LearningRate = setting(LearningRate.constant)
    """constant; linear: down over run.iterations; cosine: down, slowly at first and at the end."""
    lr_floor: float = setting(0.0, low=0.0, below=1.0)
    """linear, cosine: what learning rates end at, as a share of what they start at."""
    warmup: int = setting(0, low=0)
    """Iterations before learning rates are what the schedule says: the first one learns with 1 / (warmup + 1) of that,
    and the share rises evenly. Adam's first steps are as long as its longest, whatever the gradients. 0: none."""
    betas: list[float] = setting([0.9, 0.999], low=0.0, below=1.0)
    """Decay rates of the two moment averages."""
    eps: float = setting(1.0e-5, above=0.0, high=1.0)
    """Added to the denominator."""
    weight_decay: float = setting(0.0, low=0.0, high=10.0)
    """Decoupled weight decay."""
    max_grad_norm: float = setting(0.5, above=0.0)
    """Gradients are scaled down to this norm."""
    master_weights: bool = setting(True)
    """Step float32 copies of weights that the model holds in bfloat16, which would lose small steps; 4 bytes more for
    each weight that learns, and moments twice as large."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks: processes that share slots and minibatches, each on a GPU of its own or on some of the CPUs."""

    world_size: int | str = setting("auto", low=1, words=("auto",))
    """How many. auto: as many as torchrun started, else one. A number: without torchrun the run starts them itself on
    this machine, and they talk to each other through ports of the loopback device."""
    backend: ParallelBackend = setting(ParallelBackend.auto)
    """What each of several ranks holds while it learns. fsdp: its share of weights, gradients and optimiser state.
    none: all of them, which is faster for a small policy. auto: fsdp."""
    timeout_s: float = setting(600.0, above=0.0)
    """Longest time that ranks wait for each other; one that takes longer counts as hung, and the run ends [s]."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Learn adapters instead of weights: W + alpha / rank * B A. Heads learn in full; the rest stays as it is."""

    rank: int = setting(0, low=0)
    """Rows of A and columns of B; 0: no adapters, the weights themselves learn."""
    alpha: int = setting(32, low=1)
    """Over the rank, what adapters are multiplied by."""
    targets: list[str] = setting([])
    """Endings of the names of the layers that get adapters, as in [q_proj, v_proj]; []: all that the model offers."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What follows when a loss or a gradient is no finite number: the step is left out and counted."""

    max_skipped: int = setting(3, low=0)
    """Optimiser steps of a run that may be left out; one more ends it. 0: the first one ends it."""
    dumps: int = setting(1, low=0)
    """Write what the first so many of them were to learn from into the run's folder not_finite/."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Where and how the policy computes and learns."""

    device: Device = setting(Device.auto)
    """auto: CUDA where there is one, else the CPU."""
    threads: int | str = setting("auto", low=1, words=("auto",))
    """Torch CPU threads of the main process. auto: 1 for a small policy on the CPU, where more do not pay."""
    precision: Precision = setting(Precision.auto)
    """What forward passes compute in, in rollouts and in learning; log-probabilities, losses and values are float32
    always. auto: bfloat16 where the weights are held in it (`model.dtype`), and for large models on a GPU that can;
    else float32."""
    micro_batch_size: int | None = setting(None, low=1)
    """Decisions (in supervised learning: samples) that go through the model at once in learning. The gradients of a
    minibatch are added up from them, which gives the same steps in less memory. null: a whole minibatch."""
    gradient_checkpointing: bool = setting(False)
    """Keep only what goes into the layers of a large model for the backward pass and compute the rest again: much less
    memory for a third more computation; the same gradients."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Learn adapters instead of weights."""
    offload: Offload = setting(Offload.none)
    """What leaves the device while it is not needed, and comes back bit for bit: from a GPU to pinned memory, from the
    CPU to a file without a name in the run's folder. optimizer: the optimiser's state, which is there only while the
    policy learns. all: the reference policy as well (`algorithm.kl_coef`), which is there only while it scores a
    batch; with adapters (`lora`) it has no weights of its own, and one that is sharded stays. none: nothing
    leaves."""
    deterministic: bool = setting(False)
    """Let torch use only algorithms that give the same bits every time, which on a GPU costs speed, and raise an error
    where it has none. On the CPU runs repeat exactly without it."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """What follows when a loss or a gradient is no finite number."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimiser."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Several processes for one run."""


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Videos of evaluation episodes, in the run's folder videos/."""

    episodes: int = setting(0, low=0, high=64)
    """Episodes of an evaluation that are recorded, side by side in one file; 0: none. Drawing them costs time."""
    every: int = setting(1, low=1)
    """Record every so many evaluations, from the first one on."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """What is recorded, and where."""

    sinks: list[str] = setting(["console", "jsonl", "tensorboard"], registry="SINKS")
    """Where metrics go; `embodyrl list sinks` shows them."""
    video: VideoConfig = field(default_factory=VideoConfig)
    """Videos of evaluation episodes."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    seed: int = setting(1, low=0)
    """Seed of everything random; the same seed gives the same run."""
    plugins: list[str] = setting([])
    """Python modules to import first, from the config file's folder or installed. They run with your rights."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run as a whole."""
    env: EnvConfig = setting()
    """The simulator."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    model: ModelConfig = setting()
    """The policy."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How experience is collected."""
    algorithm: AlgorithmConfig = setting()
    """The learning algorithm."""
    data: DataConfig = field(default_factory=DataConfig)
    """Demonstrations to learn from."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Changes to the stages of an iteration."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Where and how the policy computes and learns."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """What is recorded, and where."""
