"""Every setting: its type, default, range and meaning. This file is the only owner of defaults.

A component's own options live in a subclass of `ModelConfig`, `EnvConfig`, `LossConfig`, `AdvantageConfig`,
`RewardConfig` or `FilterConfig` beside the component, named in its registry entry. The text below a field documents
it: `embodyrl run --print-config` writes it as a comment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import embodyrl.registry
from embodyrl.config.infos import MOST_EPISODE_STEPS, simulator_info
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Idleness, IterationSize, Needs
from embodyrl.errors import UserError


class OfTasks(StrEnum):
    """Severity of leaving a value that was written for other tasks."""

    fault = "fault"
    """It changes what success or a task is."""
    note = "note"
    """It may well be right for these tasks, too."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    words: tuple[str, ...] = (),
    registry: str | None = None,
    length: int | None = None,
    once: bool = False,
    alone: bool = False,
    of_tasks: OfTasks | None = None,
    only_with: Mapping[str, tuple[str, ...]] | None = None,
    resumable: bool = False,
) -> Any:
    """Return a dataclass field with its legal values.

    Its type is bool, int, float, str, a `StrEnum` (a config writes the values of its members), a `Literal` of texts, a
    frozen dataclass, or a list or a dict with text keys of one of these; each may be `| None`, which a config writes as
    null. `int | str`, `float | str` and `bool | str` take numbers or switches, and the words in `words`.

    Args:
        default: the default; without one the setting is required. Lists and maps are copied for every instance.
        low, high: inclusive bounds (for lists: of every entry).
        above, below: exclusive bounds.
        words: for `int | str`, `float | str` and `bool | str` fields, the strings that are legal.
        registry: name of the registry in `embodyrl.registry` whose names are legal (lists, maps: of every entry).
        length: entries that a list must have.
        once: whether a list may have no entry twice.
        alone: whether an entry by itself may stand for a list of it.
        of_tasks: for options of simulators whose value depends on the tasks: severity of leaving a value that a group
            file wrote for other tasks. None: the value does not depend on tasks.
        only_with: other settings, by name in this section or by full name, with the values that let this one do
            something; (): any but null, 0, false and []. With others only its default is legal.
        resumable: whether it may change when a run continues, because it does not change what is learned.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


MOST_START_STATES = 10**15
"""Start states that are distinguished; evaluation counts on from its first, and each has to fit into 64 bits."""
AUTO = "auto"
"""Value that is determined for the machine or the tasks."""
WIDEST_LAYER = 16_384
"""Most numbers of a layer whose width is an option; a checkpoint that says more is damaged."""
LONGEST_WAIT_S = 1.0e6
"""Longest wait for a process [s]; the system counts milliseconds in 32 bits."""
LEFT_OPEN = "<weights>"
"""Placeholder for a value that is given when the config runs."""
BROUGHT = ("checkpoint", "adapter", "statistics", "tokenizer", "action_tokenizer", "vlm", "pretrained")
"""Options of models that name files elsewhere; a saved policy has copies of them in its own folder."""


class Episodes(StrEnum):
    """Division of a rollout into episodes."""

    continuous = "continuous"
    whole = "whole"


class Bootstrap(StrEnum):
    """Cases in which the value of the last observation replaces the rewards that were cut off."""

    none = "none"
    truncation = "truncation"


class DiscountPer(StrEnum):
    """Unit that one factor of gamma covers."""

    action = "action"
    chunk = "chunk"


class Device(StrEnum):
    """Device on which the policy computes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Offload(StrEnum):
    """State that leaves the device while it is not needed."""

    none = "none"
    optimizer = "optimizer"
    all = "all"


class Precision(StrEnum):
    """Number format of forward passes."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Numa(StrEnum):
    """NUMA placement of simulator processes."""

    auto = "auto"
    off = "off"


class StartMethod(StrEnum):
    """Start method of simulator processes."""

    auto = "auto"
    fork = "fork"
    spawn = "spawn"


class OnWorkerDeath(StrEnum):
    """Reaction to a simulator process that dies or hangs."""

    fail = "fail"
    restart = "restart"


class Schedule(StrEnum):
    """Order of inference and simulation in a rollout."""

    lockstep = "lockstep"
    pipeline = "pipeline"
    ready_batch = "ready_batch"


class RolloutMode(StrEnum):
    """When rollouts happen: see `RolloutConfig.mode`."""

    sync = "sync"
    async_ = "async"


class Observe(StrEnum):
    """Observations that a rollout keeps."""

    chunk_end = "chunk_end"
    every_step = "every_step"


class ParallelBackend(StrEnum):
    """Share of the policy that each of several ranks holds."""

    auto = "auto"
    none = "none"
    fsdp = "fsdp"
    hsdp = "hsdp"


class LearningRate(StrEnum):
    """Learning-rate schedule."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Level(StrEnum):
    """Unit of a log-probability: a chunk, an action of the chunk, or an action dim or token."""

    chunk = "chunk"
    action = "action"
    token = "token"


class RewardLevel(StrEnum):
    """Unit of a reward and an advantage."""

    chunk = "chunk"
    action = "action"


class NormLevel(StrEnum):
    """Episodes over which a mean or a standard deviation is taken."""

    group = "group"
    batch = "batch"
    none = "none"


class Aggregation(StrEnum):
    """Reduction of the losses of a batch to one number."""

    token_mean = "token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_mean = "seq_mean_token_mean"
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"


class KLEstimator(StrEnum):
    """Estimator of the KL divergence from the reference policy."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class Proximal(StrEnum):
    """Source of decoupled PPO's proximal policy."""

    recompute = "recompute"
    loglinear = "loglinear"


class OldLogprobs(StrEnum):
    """Source of the old log-probs in probability ratios."""

    rollout = "rollout"
    recompute = "recompute"


class Excess(StrEnum):
    """Treatment of an importance weight beyond its cap."""

    mask = "mask"
    clamp = "clamp"


class FilterMetric(StrEnum):
    """Quantity by which the episodes of a group are compared."""

    success = "success"
    total_reward = "total_reward"


class AtEnd(StrEnum):
    """Treatment of a chunk that reaches beyond the end of its demonstration."""

    repeat = "repeat"
    drop = "drop"


class Compat(StrEnum):
    """Other implementation whose deviations are reproduced."""

    none = "none"
    siirl = "siirl"


class CriticUse(StrEnum):
    """The value of an action, given those of several critics."""

    min = "min"
    mean = "mean"


class KeepBest(StrEnum):
    """Metric of an evaluation by which checkpoints are compared."""

    none = "none"
    success_once = "eval/success_once"
    mean_return = "eval/return"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run as a whole: its name, folder and length."""

    name: str = setting("run")
    """Name of the run, legal as a folder name. The run directory is runs/<name>/<time> unless `run.dir` is set."""
    dir: str | None = setting(None)
    """Run directory; it must hold no results yet. null: runs/<name>/<time>."""
    iterations: int = setting(100, low=1)
    """Iterations; each is a rollout and an update."""
    eval_every: int = setting(20, low=0)
    """Evaluate after every so many iterations; 0: only at the end."""
    save_every: int = setting(50, low=0)
    """Save a checkpoint after every so many iterations; 0: only at the end and when stopped."""
    save_async: bool = setting(False)
    """Write checkpoints in the background. Takes memory for a copy of weights and optimizer state."""
    keep_last: int = setting(0, low=0)
    """Number of newest checkpoints to keep; 0: all."""
    keep_best: KeepBest = setting(KeepBest.none)
    """Metric that makes a checkpoint the best so far: the success rate (eval/success_once) or the mean return
    (eval/return) of its evaluation. The best one is saved at once and kept; `checkpoints/best` leads to it. none: no
    best checkpoint."""
    stop_at_success: float | None = setting(None, above=0.0, high=1.0)
    """Stop early once an evaluation's success rate reaches this, 0 .. 1; null: run all iterations."""


MOST_LEVEL = 5
"""Highest level of a perturbation."""


@dataclass(frozen=True, kw_only=True)
class PerturbationLevels:
    """Perturbations of episodes: a level 1 .. 5 for each kind, or the lowest and the highest that is drawn. An episode
    gets all kinds that are named."""

    camera: list[int] = setting([], low=1, high=MOST_LEVEL, alone=True)
    """Pose and field of view of the cameras."""
    light: list[int] = setting([], low=1, high=MOST_LEVEL, alone=True)
    """Direction, colour, strength and shadows of the light."""
    texture: list[int] = setting([], low=1, high=MOST_LEVEL, alone=True)
    """Textures and colours of table, walls, floor and objects."""
    layout: list[int] = setting([], low=1, high=MOST_LEVEL, alone=True)
    """Objects that have nothing to do with the task, and where the others begin."""
    robot: list[int] = setting([], low=1, high=MOST_LEVEL, alone=True)
    """Pose in which the robot begins."""
    noise: list[int] = setting([], low=1, high=MOST_LEVEL, alone=True)
    """Noise, blur, compression of the images, or loss of some; which of them is drawn for each episode."""
    words: list[int] = setting([], low=1, high=MOST_LEVEL, alone=True)
    """Paraphrases of the task description."""

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """Lowest and highest level of each kind that is named."""
        return {name: (levels[0], levels[-1]) for name, levels in self.named.items()}

    @property
    def named(self) -> dict[str, list[int]]:
        """Each kind that is named, as it is written."""
        return {name: getattr(self, name) for name in KINDS if getattr(self, name)}

    def __str__(self) -> str:
        levels = ((kind, low if low == high else f"{low} to {high}") for kind, (low, high) in self.ranges.items())
        return ", ".join(f"{kind} {level}" for kind, level in levels)


KINDS = tuple(each.name for each in dataclasses.fields(PerturbationLevels))
"""Kinds of perturbation."""


@dataclass(frozen=True, kw_only=True)
class TrainingPerturbations(PerturbationLevels):
    """Perturbations of training episodes."""

    share: float = setting(1.0, above=0.0, high=1.0)
    """Share of the episodes that are perturbed; the others are as without. Members of a group share theirs."""
    ramp: int = setting(0, low=0)
    """Iterations over which levels grow from 1 to those that are named; 0: they are these from the start."""

    @property
    def drawn_from(self) -> dict[str, Any]:
        """What an episode's kinds and levels are drawn from at the end of `ramp`, in types of JSON."""
        return {kind: list(levels) for kind, levels in self.ranges.items()} | {"share": self.share}

    def __str__(self) -> str:
        part = "" if self.share == 1.0 else f" in a share of {self.share:g}"
        return super().__str__() + part + (f", growing over iterations 0 to {self.ramp}" if self.ramp else "")


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The simulator. Backends add their own options."""

    name: str = setting(registry="SIMULATORS")
    """Simulator backend; `embodyrl list simulators` shows them."""
    tasks: list[str] = setting(once=True)
    """Task names of the backend. With several, each training episode draws one."""
    task_descriptions: dict[str, str] = setting({})
    """Task descriptions, the text that a policy gets: `{task: task_description}`. Tasks that are not listed here have
    the simulator's own."""
    num_envs: int = setting(8, low=1)
    """Parallel envs (B)."""
    workers: int | str = setting("auto", low=1, words=("auto",), resumable=True)
    """Simulator processes; num_envs must be a multiple. auto: the largest divisor of num_envs up to the number of
    usable cores."""
    numa: Numa = setting(Numa.auto, resumable=True)
    """auto: each simulator process is bound to the CPUs and the memory of one NUMA node; the node of the policy's GPU
    is filled first. On a machine of one node, as many processes as CPUs get one each. off: no binding."""
    start_method: StartMethod = setting(StartMethod.auto)
    """spawn: each simulator process starts a new interpreter. fork: they are forked from a process that has imported
    the simulator's packages, which is faster and shares memory. auto: fork where the simulator allows it, else
    spawn."""
    cameras: list[str] = setting([], once=True)
    """Cameras whose images the policy gets (V), by the backend's names, in this order; []: state observations only."""
    image_size: list[int] = setting([224, 224], low=16, high=2048, length=2)
    """Height and width of every camera's image [pixels]."""
    frames: int = setting(1, low=1, high=4)
    """Images of every camera that the policy gets: the newest, and those of the decisions before, which show motion. An
    episode begins with its first one repeated. Only for models that read them (cnn)."""
    max_episode_steps: int | str | None = setting(
        AUTO, low=1, high=MOST_EPISODE_STEPS, words=(AUTO,), of_tasks=OfTasks.note
    )
    """Control steps after which an episode is cut off (truncated). auto: the environment's own time limit, as its
    package registers it for the task (none, if it registers none); 100 for simulators that have no such limits. null:
    none, so that only the environment ends episodes."""
    start_states: int = setting(10000, low=1, high=MOST_START_STATES)
    """Number of start states for training: episodes draw from 0 .. start_states-1. Evaluation must use others
    (`eval.first_start_state`)."""
    startup_timeout_s: float = setting(180.0, low=5.0, high=LONGEST_WAIT_S)
    """Longest time for a simulator process to start [s]."""
    step_timeout_s: float = setting(60.0, low=1.0, high=LONGEST_WAIT_S)
    """Longest time for one reset or one chunk [s]; a process that takes longer counts as hung and is killed."""
    on_worker_death: OnWorkerDeath = setting(OnWorkerDeath.fail)
    """fail: a simulator process that dies or hangs ends the run. restart: the process is replaced; its current
    episodes become invalid and new ones begin."""
    max_restarts: int = setting(5, low=1, resumable=True)
    """restart: most replacements of simulator processes in a run, failed starts included; one more ends the run."""
    offload: bool = setting(False, resumable=True)
    """End the simulator processes during the update to free their memory, and restore them bit for bit."""
    perturb: TrainingPerturbations | None = setting(None)
    """Perturbations of training episodes, as in `{camera: 2, light: [1, 3], share: 0.5}`. null: none."""

    @property
    def sources(self) -> tuple[EnvSource, ...]:
        """The simulators that episodes are played in: this one, or those of a mix."""
        return (EnvSource(name="", share=1.0, env=self),)

    @property
    def paraphrases(self) -> bool:
        """Whether training episodes may show paraphrases of their task description."""
        return any(each.env.perturb is not None and bool(each.env.perturb.words) for each in self.sources)

    @property
    def known_time_limit(self) -> int | None:
        """Time limit of every episode [control steps], see `max_episode_steps`: `MOST_EPISODE_STEPS` if there is none;
        None if only the running simulator knows it."""
        if isinstance(self.max_episode_steps, int):
            return self.max_episode_steps
        if self.max_episode_steps is None:
            return MOST_EPISODE_STEPS
        return simulator_info(self.name).time_limit(self)

    @property
    def time_limit(self) -> int:
        """Time limit of every episode [control steps].

        Raises:
            UserError: it is not known in this process.
        """
        limit = self.known_time_limit
        if limit is None:
            raise UserError(
                f"env.max_episode_steps = auto: the time limit of {', '.join(self.tasks)} is not known here, where the "
                "packages of the simulator are missing: set env.max_episode_steps to a number"
            )
        return limit


@dataclass(frozen=True, kw_only=True)
class EnvSource:
    """A simulator in which a share of a run's episodes is played."""

    name: str
    """Its name in metrics and in front of its tasks; empty: it is the only one."""
    share: float
    """Share of the training episodes, above 0; shares of a run add up to 1."""
    env: EnvConfig
    """Its settings; `tasks` are as the simulator names them."""

    def task(self, own: str) -> str:
        """Return the run's name of a task, from the simulator's own."""
        return f"{self.name}/{own}" if self.name else own


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on start states that training never sees."""

    episodes: int = setting(100, low=1, high=1_000_000)
    """Episodes per evaluation."""
    first_start_state: int = setting(10000, low=0, high=MOST_START_STATES)
    """First start state of evaluation; training uses 0 .. env.start_states-1. Tasks take turns, each playing
    consecutive start states from here on."""
    sample: bool = setting(False)
    """false: the policy takes its most likely actions. true: it samples them as in training, from a random stream that
    is the same in every evaluation; for policies that do much better or worse when they sample."""
    actions: int | None = setting(None, low=1)
    """Actions of a chunk that are executed before the policy decides again (n_action_steps in LeRobot). For `embodyrl
    eval` and for learning from demonstrations; reinforcement learning executes whole chunks. null: all of them,
    rollout.chunk_size."""
    ensemble: float | None = setting(None)
    """Temporal ensembling: the policy decides before every action (or every `actions`), and executes the mean of what
    all of its chunks say about it, weighted by exp(-ensemble * i), where i = 0 is the oldest chunk; published for ACT
    with 0.01. Where `actions` is allowed. null: what the latest chunk says."""
    delay: int | None = setting(None, low=0)
    """Control steps from an observation to the first action of the chunk that is chosen for it, as inference takes them
    on a robot; meanwhile the chunk before goes on. The first chunk of an episode is waited for. The policy decides
    every `actions` steps, at least `delay`; null there: rollout.chunk_size - delay. null: rollout.delay."""
    perturb: PerturbationLevels | None = setting(None)
    """Perturbations of every evaluation episode, as in `{camera: 2}`. null: none, also where training has some."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy. Models add their own options."""

    name: str = setting(registry="SupportedModel")
    """Model; `embodyrl list models` shows them."""
    checkpoint: str | None = setting(None)
    """Folder of a saved policy to start from, or its name on the Hugging Face hub (hf://owner/name[@revision]); null:
    random weights. <weights>: left open until the run, so that a config can be checked and planned on a machine without
    the weights."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Collection of experience."""

    num_chunks: int = setting(128, low=1)
    """Action chunks per env in a rollout (K); with a chunk_size of 1, n_steps in SB3. With whole episodes, a rollout
    ends earlier once all envs are done."""
    chunk_size: int = setting(1, low=1)
    """Actions in a chunk (C). The policy predicts them from one observation; they are executed open-loop."""
    delay: int = setting(0, low=0)
    """Control steps from an observation to the first action of the chunk that is chosen for it, see `eval.delay`: a
    policy that will act late learns so. It decides every chunk_size - delay steps. For methods that learn from the
    probability of actions."""
    episodes: Episodes = setting(Episodes.continuous)
    """continuous: envs reset automatically and episodes continue in the next rollout. whole: each rollout consists of
    whole episodes, one per env."""
    schedule: Schedule = setting(Schedule.lockstep)
    """lockstep: the policy acts for all envs, then all are simulated. pipeline: the envs form two halves, and one is
    simulated while the policy acts for the other; use it where inference takes as long as simulation. ready_batch: the
    policy acts for the envs that are ready, so that a slow env delays no other; use it where each env has a process and
    steps differ in length. The batches of ready_batch depend on timing, and so does the noise that each env draws: runs
    do not repeat exactly."""
    mode: RolloutMode = setting(RolloutMode.sync)
    """sync: rollout and learning take turns. async: rollout workers collect the next rollouts while the ranks learn, so
    that an iteration takes the longer of both instead of their sum; needs `placement.rollout.workers`."""
    max_staleness: int = setting(1, low=0, only_with={"mode": ("async",)})
    """async: rollouts that are collected ahead of learning. Each acts with the newest weights at the moment when it is
    asked for, that many iterations before it is learned from; no time decides that, so runs repeat exactly. 0 gives the
    numbers of sync with as many blocks, see `blocks`."""
    blocks: int | str = setting("auto", low=1, words=("auto",), only_with={"schedule": ("lockstep", "pipeline")})
    """Equal parts of the envs for which the policy acts together, each with random numbers of its own. What is rolled
    out depends on their number, not on the number of processes that share them. auto: one for each process that rolls
    out."""
    ready_slots: int | str = setting("auto", low=1, words=("auto",))
    """ready_batch: envs that must be ready before the policy acts. auto: a quarter of num_envs."""
    observe: Observe = setting(Observe.chunk_end)
    """chunk_end: simulators return an observation at the end of a chunk. every_step: they return one after every
    action, which the batch keeps in `step_images` and `step_proprio`; the policy still acts on the last."""
    episodes_per_slot: int = setting(1, low=1, only_with={"episodes": ("whole",)})
    """Whole episodes per env in a rollout, one after the other without a pause. The batch has num_envs *
    episodes_per_slot trajectories."""
    group_size: int = setting(1, low=1)
    """Consecutive envs that play the same start state with the same seed (G), so that their episodes can be
    compared."""


def component(section: Any) -> Any:
    """Return a dataclass field for a section that holds only a component's name and options. Choosing another component
    resets it. Its default is the component that `section` has as the default of `name`."""

    def with_defaults() -> Any:
        [name] = dataclasses.fields(section)
        entry = getattr(embodyrl.registry, name.metadata["registry"]).entry(name.default)
        return (entry.load_options() or section)(name=name.default)

    return field(default_factory=with_defaults)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The reward to learn from. Rewards add their own options."""

    name: str = setting("dense", registry="REWARDS")
    """Reward; `embodyrl list algorithms` shows them."""

    @property
    def judged_ends(self) -> bool | None:
        """Whether an episode ends where this reward judges it solved; None: it judges nothing."""
        return None

    def fault_of(self, metrics: Mapping[str, float]) -> str | None:
        """Return why an iteration with these metrics must not be learned from; None: nothing speaks against it."""
        return None


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """The groups to learn from. Filters add their own options."""

    name: str = setting("none", registry="FILTERS")
    """Filter; `embodyrl list algorithms` shows them."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """The advantage estimator. Estimators add their own options."""

    name: str = setting("gae", registry="ADVANTAGES")
    """Advantage estimator; `embodyrl list algorithms` shows them."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss. Policy losses add their own options."""

    name: str = setting("ppo", registry="LOSSES")
    """Policy loss; `embodyrl list algorithms` shows them."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The learning algorithm. docs/algorithms.md lists the settings of the published algorithms.

    Each method has a subclass with its own settings, in its folder below `embodyrl/methods`. Besides, the subclass says
    what the method needs of the rest of the program, by the functions below, which import no torch.
    """

    name: str = setting(registry="ALGORITHMS")
    """Algorithm, the stages of an iteration; `embodyrl list algorithms` shows them."""

    @property
    def family(self) -> str:
        """Name of the settings that a config of such a method begins with, in the files `start.yaml`."""
        return ""

    def needs(self, config: Config) -> Needs:
        """Return what the method asks of models, simulators and the program in a run with this config."""
        return Needs()

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config with this method."""
        yield from ()

    def check_stages(self, config: Config, stages: Sequence[Any]) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of the stages (`pipelines.Stage`) of an iteration, as changed by the config."""
        yield from ()

    def notes(self, config: Config) -> list[str]:
        """Return notes that are no faults, for `embodyrl validate`."""
        return []

    def parts(self) -> Mapping[str, Any]:
        """Return the sections that choose a registered function, by the kind of its registry."""
        return {}

    def batches(self, config: Config) -> IterationSize:
        """Return how much a run learns from in an iteration."""
        return IterationSize(decisions=0, steps=0, minibatch=1)

    def describe(self, config: Config) -> str:
        """Return the row of the first screen: the method, and the size of its iterations."""
        return self.name

    def common(self, config: Config) -> Sequence[str]:
        """Return the settings that people change most, by full name."""
        return ()

    def smallest(self) -> Mapping[str, Any]:
        """Return the values of its settings, by full name, with which an iteration is as short as can be."""
        return {}

    def fields(self, config: Config, *, proprio_dim: int, action_dim: int, flow: Any = None) -> Mapping[str, Any]:
        """Return the columns of the replay that a method learns from, see `rollout.replay_fields`.

        Args:
            config: of the run.
            proprio_dim, action_dim: of the simulator.
            flow: sizes of a frozen flow policy whose noise is what is learned.
        """
        return {}

    def why_idle(self, metrics: Mapping[str, float]) -> Idleness | None:
        """Return why an iteration has made no optimiser step, as its metrics tell; None if nothing is known."""
        return None


@dataclass(frozen=True, kw_only=True)
class RewardedConfig(AlgorithmConfig):
    """A method that learns from rewards."""

    reward: RewardConfig = component(RewardConfig)
    """Reward to learn from: dense (the simulator's own), success (1 when the task is solved), difference (increase of
    the dense reward), srpo (success, and for failures the progress towards it)."""
    time_penalty: float = setting(0.0, low=0.0)
    """Subtracted from the reward of every executed action."""
    reward_scale: float = setting(1.0, above=0.0)
    """Factor of rewards for learning, so that the critic's targets are of order 1 .. 10. Metrics show unscaled
    rewards."""
    gamma: float = setting(0.99, low=0.0, high=1.0)
    """Discount factor."""
    discount_per: DiscountPer = setting(DiscountPer.chunk)
    """chunk: one factor of gamma per chunk. action: one per executed action, also inside a chunk."""
    bootstrap: Bootstrap = setting(Bootstrap.truncation)
    """truncation: an episode that the time limit cuts off is bootstrapped with the value of its last observation. none:
    it counts as terminated."""

    def parts(self) -> Mapping[str, Any]:
        """See `AlgorithmConfig`."""
        return {"reward": self.reward}


@dataclass(frozen=True, kw_only=True)
class FeatureNames:
    """Names that demonstrations give to what a policy reads and learns."""

    action: str = setting("action")
    """Feature with the actions."""
    state: str = setting("observation.state")
    """Feature with the state observations."""
    images: dict[str, str] = setting({})
    """Features with the images of cameras: `{camera: feature}`. Those of a camera that is not listed here are
    observation.images.<camera>."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Demonstrations to learn from (algorithm sft); `embodyrl collect` records them."""

    path: str | None = setting(None)
    """Folder of a LeRobotDataset v3.0 with the images, states and actions of the simulator, or its name on the Hugging
    Face hub (hf://datasets/owner/name[@revision])."""
    features: FeatureNames = field(default_factory=FeatureNames)
    """Names of its features, if they differ from LeRobot's."""
    batch_size: int = setting(64, low=1)
    """Action chunks per optimizer step."""
    steps: int = setting(100, low=1)
    """Optimizer steps per iteration."""
    at_end: AtEnd = setting(AtEnd.repeat)
    """Chunks that reach beyond the end of their episode. repeat: pad them with the last action. drop: leave them
    out."""
    shift_pixels: int = setting(0, low=0, high=64)
    """Random-shift augmentation: images of a minibatch move by up to this many pixels in both directions, padded with
    their edges. 0: off."""
    memory_mib: int = setting(1024, low=1)
    """Memory for demonstrations [MiB]. Chunks are drawn from as many whole episodes as fit, which are then exchanged
    for others."""


@dataclass(frozen=True, kw_only=True)
class InsertedStage:
    """A stage to add. It runs right after the last stage that writes or changes a column it declares."""

    name: str = setting()
    """Name of the stage in the iteration."""
    stage: str = setting(registry="STAGES")
    """Registered stage function; `embodyrl list stages` shows them. Each declares what it reads, writes and changes."""
    after: list[str] = setting([])
    """Further stages that must run before it."""
    before: list[str] = setting([])
    """Stages that must run after it, even if they change a column it declares."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Changes to the stages of an iteration; `embodyrl graph` draws them."""

    function: str | None = setting(None)
    """`module:function` that takes the config and returns the list of stages, in place of algorithm.name's. The module
    is imported from the config file's folder or from the installed packages, and runs with your rights."""
    drop: list[str] = setting([])
    """Names of stages to leave out."""
    replace: dict[str, str] = setting({}, registry="STAGES")
    """Other stage functions for stages of the iteration: `{name: stage}`."""
    insert: list[InsertedStage] = setting([])
    """Stages to add."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer."""

    name: str = setting("adamw", registry="OPTIMIZERS")
    """adamw, or adamw_8bit, whose moments take a quarter of the memory (package bitsandbytes)."""
    lr: float = setting(3.0e-4, above=0.0, high=10.0)
    """Learning rate at the start."""
    critic_lr: float | None = setting(None, above=0.0, high=10.0)
    """Learning rate of the critic at the start. null: the same as `lr`."""
    schedule: LearningRate = setting(LearningRate.constant)
    """Learning-rate schedule over run.iterations: constant, linear decay or cosine decay. A run that is made longer by
    `resume` is at an earlier point of the longer schedule, and says so."""
    lr_floor: float = setting(0.0, low=0.0, below=1.0, only_with={"schedule": ("linear", "cosine")})
    """linear, cosine: final learning rate as a share of the initial one."""
    warmup: int = setting(0, low=0)
    """Iterations of linear warm-up: the first learns with 1 / (warmup + 1) of the scheduled rate. Without it, Adam's
    first steps have full length whatever the gradients. 0: none."""
    betas: list[float] = setting([0.9, 0.999], low=0.0, below=1.0, length=2)
    """Decay rates of the first and second moment."""
    eps: float = setting(1.0e-5, above=0.0, high=1.0)
    """Added to the denominator."""
    weight_decay: float = setting(0.0, low=0.0, high=10.0)
    """Decoupled weight decay."""
    max_grad_norm: float = setting(0.5, above=0.0)
    """Largest norm of the gradients; larger ones are scaled down to it."""
    master_weights: bool = setting(True)
    """Keep float32 copies of trainable weights that the model holds in bfloat16, which would lose small steps. Costs 4
    bytes more per trainable weight, and moments twice as large."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Data parallelism over ranks: processes that share envs and minibatches, each with a GPU or a share of the
    CPUs."""

    world_size: int | str = setting("auto", low=1, words=("auto",))
    """Number of ranks. auto: as many as torchrun started, else one. A number: without torchrun the run starts them
    itself on this machine, connected through ports of the loopback device."""
    backend: ParallelBackend = setting(ParallelBackend.auto)
    """Share of the policy that each of several ranks holds during the update. none: a full copy (replicas), which
    exchanges the least. fsdp: a shard of weights, gradients and optimizer state. hsdp: the same among the ranks of a
    machine, which together hold a full copy. auto: the first of none, hsdp and fsdp that fits into memory, by the
    estimate of `embodyrl plan`."""
    timeout_s: float = setting(600.0, low=1.0, high=LONGEST_WAIT_S)
    """Longest time that ranks wait for each other [s]; a rank that takes longer counts as hung, and the run ends."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA, adapters in place of weight updates: W + alpha / rank * B A. Heads are trained in full; other weights are
    frozen."""

    rank: int = setting(0, low=0)
    """Rank of the adapters: rows of A and columns of B; 0: no adapters, the weights are trained."""
    alpha: int = setting(32, low=1)
    """Adapters are scaled by alpha / rank."""
    targets: list[str] = setting([])
    """Endings of the names of the layers that get adapters, as in [q_proj, v_proj]; []: all layers that the model
    declares, or those of them that are usual for it."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Guard against losses and gradients that are not finite: their optimizer step is skipped and counted."""

    max_skipped: int = setting(3, low=0)
    """Most skipped optimizer steps in a run; one more ends it. 0: the first ends it."""
    dumps: int = setting(1, low=0)
    """Number of skipped steps, from the first on, whose minibatch is written to the run's folder not_finite/."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Computation of the policy: device, precision, memory, optimizer, parallelism."""

    device: Device = setting(Device.auto)
    """Device of the policy. auto: CUDA where available, else the CPU."""
    threads: int | str = setting("auto", low=1, high=1024, words=("auto",))
    """Torch CPU threads of the main process. auto: 1 for less than 100 million weights, where more help little, else
    the usable cores, shared by the ranks of a machine. On the CPU results differ in the last digits between numbers of
    threads."""
    precision: Precision = setting(Precision.auto)
    """Number format of forward passes in rollouts and updates; log-probs, losses and values are always float32. auto:
    bfloat16 where the weights are held in it (`model.dtype`), and for large models on a GPU that supports it; else
    float32."""
    micro_batch_size: int | None = setting(None, low=1, resumable=True)
    """Chunks (in supervised learning: samples) in one forward and backward pass of the update. Gradients accumulate
    over a minibatch, which gives the same steps in less memory. null: a whole minibatch."""
    gradient_checkpointing: bool | str = setting("auto", words=("auto",), resumable=True)
    """Keep only the inputs of a large model's layers for the backward pass and recompute the rest: much less memory for
    a third more computation, with the same gradients. auto: only where the update would not fit into memory otherwise,
    by the estimate of `embodyrl plan`."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train adapters instead of weights."""
    offload: Offload = setting(Offload.none, resumable=True)
    """State that leaves the device while it is not needed, and is restored bit for bit: from a GPU to pinned memory,
    from the CPU to an unnamed file in the run's folder. optimizer: the optimizer state, outside updates. all: also the
    reference policy (`algorithm.kl_coef`), except while it scores a batch; with `lora` it has no weights of its own,
    and a sharded one stays. none: everything stays."""
    deterministic: bool = setting(False)
    """Let torch use only deterministic algorithms, which costs speed on a GPU, and raise an error where there is none.
    On the CPU runs repeat exactly without it."""
    cuda_graphs: bool = setting(True, resumable=True)
    """On a GPU, record the policy's decision for each number of slots as a CUDA graph in every rollout, and replay it:
    the same numbers in one launch instead of thousands. Models that cannot be recorded, and sharded ones, act as
    before."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Guard against losses and gradients that are not finite."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Data parallelism over several processes."""


_RAY = {"placement.backend": ("ray",)}


@dataclass(frozen=True, kw_only=True)
class MachinesConfig:
    """Machines for one kind of processes."""

    nodes: str | None = setting(None, only_with=_RAY)
    """Label of the machines, with `placement.backend: ray`: value of their Ray node label `embodyrl`. null: those that
    are not labelled for another kind of processes; of simulators: those of the processes that roll out."""


@dataclass(frozen=True, kw_only=True)
class RolloutWorkersConfig(MachinesConfig):
    """Processes that roll out and evaluate, and do not learn."""

    workers: int = setting(0, low=0)
    """Number of rollout workers, processes with a share of the envs and a copy of the policy. 0: the ranks roll out
    themselves. See also `rollout.mode`."""
    share_gpus: bool = setting(False, only_with={"workers": ()})
    """Compute on the GPUs of the ranks, whose memory then holds two copies of the policy. false: each worker has a GPU
    of its own."""
    timeout_s: float = setting(3600.0, low=10.0, high=LONGEST_WAIT_S)
    """Longest time for a worker to start, or for a rollout or an evaluation [s]; a worker that takes longer counts as
    hung, and the run ends."""


class PlacementBackend(StrEnum):
    """What starts the processes of a run."""

    local = "local"
    ray = "ray"


class OnLoss(StrEnum):
    """What follows when a machine is lost."""

    fail = "fail"
    resume = "resume"


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Placement of a run's parts in processes, and of these on machines."""

    backend: PlacementBackend = setting(PlacementBackend.local)
    """What starts the processes. local: the run itself, on this machine (or torchrun, which decides on its own). ray:
    a Ray cluster that is up, on all of its machines (`pip install 'embodyrl[ray]'`, and docs/scaling.md)."""
    address: str | None = setting(None, only_with=_RAY)
    """Address of the Ray cluster, `host:port` of its head."""
    ranks: MachinesConfig = field(default_factory=MachinesConfig)
    """The ranks; the first one is the process that was started, on its machine. Their number is
    `engine.parallel.world_size`."""
    rollout: RolloutWorkersConfig = field(default_factory=RolloutWorkersConfig)
    """Rollouts and evaluations."""
    simulators: MachinesConfig = field(default_factory=MachinesConfig)
    """Simulators, on machines of their own: one host of simulators for each process that rolls out."""
    on_loss: OnLoss = setting(OnLoss.fail, only_with=_RAY)
    """With ray, what follows when a machine is lost. fail: the run ends with an error. resume: it continues from its
    last checkpoint, or from the start if there is none yet, on the machines that are left; at the same numbers, as long
    as there are as many ranks."""
    start_timeout_s: float = setting(180.0, above=0.0, high=LONGEST_WAIT_S)
    """Longest time until the ranks that the run starts have started; with ray, also until the cluster answers and has
    room for the processes [s]."""


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Videos of evaluation episodes, in the run's folder videos/."""

    episodes: int = setting(0, low=0, high=64)
    """Episodes of an evaluation to record, side by side in one file; 0: none. Rendering them costs time."""
    every: int = setting(1, low=1)
    """Record every n-th evaluation, from the first on."""


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Tracking services: the sinks wandb, trackio, swanlab and mlflow."""

    project: str | None = setting(None)
    """Project (mlflow: experiment) of the run there; null: embodyrl."""
    online: bool = setting(False)
    """Send to the service during the run. false: the service's own files, on this machine, which it can upload
    later. mlflow follows `address` alone."""
    address: str | None = setting(None)
    """Where a service is that is not its maker's: a server of wandb, trackio or mlflow, a trackio Space (owner/name),
    or a store of mlflow (sqlite:////DIR/mlflow.db)."""
    artifacts: bool = setting(True)
    """Give it config.yaml, summary.json, report.html and the videos as well, at the end of the run."""
    timeout_s: float = setting(60.0, above=0.0, high=LONGEST_WAIT_S)
    """Longest wait for a service: at the beginning of the run, at its end, and for each hook that its library has
    registered for the end of the program [s]."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Metrics and videos of a run."""

    sinks: list[str] = setting(["console", "jsonl", "tensorboard"], registry="SINKS", once=True)
    """Destinations of metrics; `embodyrl list sinks` shows them."""
    report: bool = setting(True)
    """Whether a run ends with `report.html`, which takes about two seconds; `embodyrl report` writes it at any time."""
    service: ServiceConfig = field(default_factory=ServiceConfig)
    """Options of sinks that are tracking services."""
    video: VideoConfig = field(default_factory=VideoConfig)
    """Videos of evaluation episodes."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    seed: int = setting(1, low=0)
    """Seed of everything random; the same seed gives the same run."""
    plugins: list[str] = setting([])
    """Python modules to import first, from the config file's folder or from the installed packages. They run with your
    rights."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run as a whole."""
    env: EnvConfig = setting()
    """The simulator."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    model: ModelConfig = setting()
    """The policy."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Collection of experience."""
    algorithm: AlgorithmConfig = setting()
    """The learning algorithm."""
    data: DataConfig = field(default_factory=DataConfig)
    """Demonstrations to learn from."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Changes to the stages of an iteration."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Computation of the policy: device, precision, memory, optimizer, parallelism."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Placement in processes."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Metrics and videos of a run."""

    @property
    def delay(self) -> int:
        """Control steps by which chunks are late."""
        return self.rollout.delay if self.eval.delay is None else self.eval.delay

    @property
    def executed_actions(self) -> int:
        """Actions that simulators execute between two decisions."""
        if self.eval.actions is not None:
            return self.eval.actions
        return self.rollout.chunk_size - self.delay if self.eval.ensemble is None else max(1, self.delay)
