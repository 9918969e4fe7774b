"""The interface of a model: `Policy` and the data that it takes and returns.

Shapes: `B` envs (or samples), `V` cameras, `C` actions in a chunk, `D` action dims, `N` log-probs per chunk (`C*D` for
most models), `S` proprio dims.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.config.schema import ModelConfig
from embodyrl.envs import Observation, SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.normalizer import DEMONSTRATED, RunningNormalizer
from embodyrl.models.saved import refuse_other_weights, write_description
from embodyrl.models.weights import differences, read_tensors, shapes_of

Mode = Literal["train", "eval"]
"""`train` samples; `eval` takes the most likely action."""
Inputs = dict[str, Tensor]
"""Network inputs, as `preprocess` returns them; every tensor is `[B, ...]`."""

PLAN, PLAN_WEIGHTS = "plan", "plan_weights"
"""Names of further inputs of `act`: what was planned for the steps to come, and how much each step is held to it; see
`Policy.plan_shape`."""
ACTION_WEIGHTS = "action_weights"
"""Name of a further input of `sft_loss`."""
SAMPLE_WEIGHTS = "sample_weights"
"""Name of another one, `[B]`: how much each sample counts; see `mean_over_samples`."""
WEIGHTS_FILE = "model.safetensors"


@dataclass(kw_only=True)
class PolicyObservation:
    """Input of `Policy.preprocess`, in rollouts, evaluation and learning alike: tensors of `B` envs or samples.

    Tensors are on the CPU in rollouts and on the policy's device in learning, but for `Policy.reads_on_host`.
    """

    images: Tensor | None = None
    """uint8 `[B, V, H, W, 3]`, or None without cameras."""
    proprio: Tensor | None = None
    """float32 `[B, S]`, or None if S is 0."""
    task_descriptions: list[str]
    """Task description of each env or sample, length `B`."""
    better: Tensor | None = None
    """int8 `[B]`, whether the actions to be learned are better than usual (1), or not (0), or it is not told (-1), for
    policies that are told so; None: whatever such a policy is told when it acts."""

    @classmethod
    def of(cls, observation: Observation) -> PolicyObservation:
        """Return a simulator's observation as tensors, which share its memory unless that is read-only."""
        return cls(
            images=None if observation.images is None else _tensor(observation.images),
            proprio=None if observation.proprio is None else _tensor(observation.proprio),
            task_descriptions=observation.task_descriptions,
        )


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def check_tensor(given: object, name: str) -> Tensor:
    """Return `given`, part `name` of a `PolicyObservation`.

    Raises:
        PolicyError: it is something else than a tensor, such as the numpy array of a simulator's `Observation`.
    """
    if isinstance(given, Tensor):
        return given
    raise PolicyError(
        f"{name} of the observation is a {type(given).__name__}, want a tensor: a policy reads a PolicyObservation; "
        "PolicyObservation.of(observation) makes one from a simulator's Observation"
    )


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Shapes of a policy's outputs, and of the state that it reads."""

    kind: str
    """gaussian | squashed | categorical | ar_token | parallel_token | regression | flow | remote"""
    chunk_size: int
    """`C`, actions in a chunk."""
    action_dim: int
    """`D`, numbers in an action."""
    proprio_dim: int
    """`S`, numbers in the state observation that the policy expects."""


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Parts of a policy that the engine may treat separately; names as in `named_modules`."""

    blocks: tuple[str, ...] = ()
    """Large parts that run one after the other (transformer layers). Each is sharded as one unit, and recomputed as one
    unit with gradient checkpointing."""
    adaptable: tuple[str, ...] = ()
    """Linear layers that LoRA adapters may be added to."""
    adapted: tuple[str, ...] = ()
    """Those of them that get adapters where `engine.lora.targets` names none; empty: all."""
    heads: tuple[str, ...] = ()
    """Small parts that are trained in full beside adapters: value head, action head, ..."""
    root: str = ""
    """The module that public checkpoints contain; adapter files name layers relative to it. Empty: the whole policy."""


@dataclass(kw_only=True)
class ActOutput:
    """A chunk of actions for each of `B` envs."""

    actions: Tensor
    """`[B, C, D]` float32 in the simulator's units; NaN where they were drawn from NaN (see `sampling.known`): then
    the run ends before they are executed."""
    logprobs: Tensor
    """`[B, N]` log-probabilities of what was sampled [nats]."""
    values: Tensor | None
    """`[B]` value estimates, or None without a critic."""
    trace: Inputs = field(default_factory=dict)
    """Tensors `[B, ...]` that `evaluate` needs to score this chunk again."""
    counted: Tensor | None = None
    """Bool `[B, N]`, log-probs that the chunk has, where chunks have different numbers of them and none belongs to one
    action, as with compressed tokens; the others are 0. None: each belongs to one of the `C` actions."""
    invalid: Tensor | None = None
    """Bool `[B]`, True where what was chosen means no chunk; `actions` are then the nearest one that there is. None:
    whatever is chosen means one."""
    plan: Tensor | None = None
    """The chunk as the network has it, `[B, *Policy.plan_shape]`; None where the next one cannot go on from it."""


@dataclass(kw_only=True)
class EvalOutput:
    """Scores of stored chunks under the current weights, differentiable."""

    logprobs: Tensor
    """`[B, N]`"""
    entropy: Tensor
    """`[B, N]` [nats]"""
    values: Tensor | None
    """`[B]`"""


class Policy(nn.Module, ABC):
    """Base class of all policies. A subclass sets `spec` and implements `act` and `evaluate`; all other methods have
    defaults.

    The engine may run a policy under autocast (`engine.precision`), where matrix products are bfloat16. Outputs of the
    network must pass `.float()` before they become a distribution, a value, a loss or an action.

    Args:
        config: the model's options (its dataclass from the registry).
        simulator: the simulator's spec; None, where a model has a checkpoint: actions are in the units of its
            statistics.
        chunk_size: `C`, at most what a checkpoint predicts.
    """

    name: str = ""
    """Name in the registry."""
    spec: PolicySpec
    acts_on_device: bool = False
    """True if `act` neither waits for a GPU nor copies from or to the CPU, so that it can be a CUDA graph."""
    memory_stays: bool = True
    """False where weights are sharded: their memory is let go of between uses, so that nothing may share it."""
    has_likelihood: bool = True
    """Whether the log-probs of `evaluate` depend on the weights, so that methods can learn by them."""
    keeps_features: bool = False
    """Whether replays keep `stored_features` of observations, not observations."""
    reads_on_host: frozenset[str] = frozenset()
    """Parts of observations, `images` or `proprio`, that `preprocess` reads on the CPU; they stay there in learning."""

    plan_shape: tuple[int, int] | None = None
    """Shape `[H, A]` of plans, for a policy that can choose a chunk that goes on from the one before: `act` then
    returns its `plan`, and may be given `plan [B, H, A]` and `plan_weights [B, H]`, 0 .. 1, among its inputs. None: it
    cannot."""
    remarks: tuple[str, ...] = ()
    """What people should know of it before it acts."""
    trace_holds_images: bool = False
    """True if traces of `act` have all that `evaluate` needs of images: rollouts then keep none for learning, and
    `preprocess` gets none."""

    @abstractmethod
    def __init__(self, config: Any, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__()

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """Convert an observation into network inputs on the policy's device, every tensor `[B, ...]`.

        The default returns the state observation as `proprio`.

        Raises:
            PolicyError: a part is missing, or is no tensor.
        """
        # `self.parameters` would look for weights that are shared, which takes as long as a product for 8 envs.
        weights = (weight for part in self.modules() for weight in part._parameters.values() if weight is not None)
        device = next(weights).device
        return {"proprio": check_tensor(observation.proprio, "proprio").to(device, torch.float32)}

    @abstractmethod
    def act(self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None) -> ActOutput:
        """Choose a chunk of actions for each env.

        Args:
            inputs: from `preprocess`.
            mode: `train` samples with `generator`; `eval` takes the most likely action and draws no random numbers.
            generator: on the policy's device; None: torch's own.
        """

    @abstractmethod
    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """Score stored chunks under the current weights; at equal weights the log-probs equal those of `act`.

        Args:
            inputs: from `preprocess`.
            trace: `ActOutput.trace` of these chunks.
        """

    def imitation_draws(self, samples: int, generator: torch.Generator) -> Inputs:
        """Return random numbers `[samples, ...]` for `sft_loss`, such as the noise of flow matching. The default: none.

        They are drawn for a whole minibatch, so that its loss does not depend on micro-batches or ranks.

        Args:
            samples: number of demonstrations.
            generator: on the policy's device.
        """
        return {}

    def sample_sizes(self, inputs: Inputs, actions: Tensor) -> Tensor | None:
        """Return how much each sample `[B]` counts in the supervised loss, such as the number of its tokens; the
        default, None: all alike.

        Asked for a whole minibatch. `sample_weights` are then multiplied by them, relative to their mean over it, so
        that its loss does not depend on micro-batches or ranks.

        Args:
            inputs, actions: see `sft_loss`.
        """
        return None

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """Return the supervised loss, a scalar: a mean over samples.

        Args:
            inputs: from `preprocess`; beside them `action_weights [B, C]`, for models that do not learn actions beyond
                the end of an episode, which repeat its last one: 0 for these, and equal for all others, such that the
                mean over a minibatch is 1. Where some demonstrations are worth more than others also
                `sample_weights [B]`, for models registered with `weighs=True`: the loss is the mean over samples of the
                loss of each times its weight (`mean_over_samples`).
            actions: `[B, C, D]` in the simulator's units, within its range.
            draws: of these samples, from `imitation_draws`.

        Raises:
            PolicyError: the model cannot learn from demonstrations.
        """
        raise PolicyError(f"model {self.name!r} cannot learn from demonstrations: it has no sft_loss")

    def parallel_plan(self) -> ParallelPlan:
        """Return the parts that the engine may shard, recompute and adapt. The default: one unit, no adapters."""
        return ParallelPlan()

    def parts_beside(self, *parts: str) -> tuple[str, ...]:
        """Return the names of the largest modules with weights outside of `parts`. These are trained in full where
        `parts` get adapters; names as in `named_modules`."""
        return tuple(_outside(self, "", parts))

    def modules_named(self, pattern: str) -> tuple[str, ...]:
        """Return the names of modules that fully match a regular expression."""
        return tuple(name for name, _ in self.named_modules() if re.fullmatch(pattern, name))

    def linear_layers(self, prefix: str) -> tuple[str, ...]:
        """Return the names of linear layers that begin with `prefix`."""
        return tuple(
            name for name, module in self.named_modules() if name.startswith(prefix) and isinstance(module, nn.Linear)
        )

    def head_tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the heads of `parallel_plan` by name; they share memory with the policy."""
        return {
            f"{head}.{name}": tensor.detach()
            for head in self.parallel_plan().heads
            for name, tensor in self.get_submodule(head).state_dict().items()
        }

    def critic_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the critic, which may have a learning rate of their own (`critic_lr`). The default:
        those of modules called `critic` or `value_head`."""
        return [parameter for name, parameter in self.named_parameters() if name.startswith(("critic.", "value_head."))]

    def set_progress(self, done: float) -> None:
        """Set the share of the run's updates that is done, 0 .. 1, for schedules such as decaying noise. Called
        whenever it changes; the default does nothing.

        Values that a chunk was sampled with belong in its trace, because they may differ when it is scored.
        """

    def weights_replaced(self) -> None:
        """Derive again what depends on weights and buffers, whose contents were replaced from outside, as in a rollout
        worker. The default: nothing does."""

    def scheduled(self, done: float) -> Mapping[str, float]:
        """Return the settings that `set_progress` changes, such as `model.noise_level`, with their values when a share
        of the updates is done. The default: none."""
        return {}

    def tokens_per_observation(self, task: str) -> int:
        """Return the sequence length of the policy's largest transformer for a chunk of `task`, its output included.
        A policy that was built without a simulator may have to `preprocess` an observation first, which shows how many
        images there are. The default: 0, no transformer."""
        return 0

    def cache_bytes(self, task: str) -> int:
        """Return the bytes of the KV cache of one env while it samples a chunk. The default: 0."""
        return 0

    def abridged(self) -> AbstractContextManager[object]:
        """Return a block in which `act` may leave out steps that repeat what others do, if it takes as much memory and
        its output has the same shapes: it is only planned with. The default: nothing is left out."""
        return nullcontext()

    def update_statistics(self, inputs: Inputs) -> None:
        """Update running statistics (normalisation) with an iteration's observations `[M, ...]`. The default keeps
        none.

        Called once after each update, so that rollout and training of an iteration use the same normalisation.
        """

    def stored_features(self, inputs: Inputs) -> Tensor:
        """Return the features of observations that a replay keeps, `[B, F]`, if the policy `keeps_features`."""
        raise NotImplementedError("only policies that keep features have them")

    @property
    def scaling(self) -> RunningNormalizer | None:
        """What scales the states that it sees by running statistics; None: nothing does."""
        return None

    @property
    def keeps_statistics(self) -> bool:
        """True if the class overrides `update_statistics`; if not, preprocessing a whole batch for it is skipped."""
        return type(self).update_statistics is not Policy.update_statistics

    def close(self) -> None:
        """Let go of what it holds beside its weights, such as connections; it may act again. The default: nothing."""

    def options_to_save(self, config: ModelConfig) -> ModelConfig:
        """Return the options to store with a saved policy. The default: `config`.

        Options of the registry entry's `kept` that `config` leaves null are stored with the values found here.
        """
        return config

    def save(self, folder: Path, config: ModelConfig) -> None:
        """Write weights and `policy.json` into an existing folder."""
        save_file({key: value.contiguous() for key, value in self.state_dict().items()}, folder / WEIGHTS_FILE)
        write_description(folder, config, self.spec)

    def start_from(self, folder: Path) -> None:
        """Read the weights of `model.checkpoint`, which need not come from `save`. The default is `load`."""
        self.load(folder)

    def load(self, folder: Path) -> None:
        """Read weights written by `save`.

        Raises:
            PolicyError: files are missing, or names or shapes of weights differ (each is named).
        """
        path = folder / WEIGHTS_FILE
        refuse_other_weights(folder)
        if not path.is_file():
            raise PolicyError(f"{folder} holds no {WEIGHTS_FILE}", "give the `policy` folder of a checkpoint")
        own, weights = self.state_dict(), read_tensors(path)
        weights |= {name: own[name] for name in own.keys() - weights.keys() if name.endswith(f".{DEMONSTRATED}")}
        if faults := differences(shapes_of(own), shapes_of(weights), kind=tuple):
            raise PolicyError(f"weights in {path} do not fit model {self.name!r}: {'; '.join(sorted(faults))}")
        self.load_state_dict(weights)


class SoftPolicy(Policy):
    """Base class of policies that can learn from a replay (`engine.soft`): their actions are differentiable functions
    of noise, and they show what they see to critics.

    Shapes: `F` features of an observation, `N` numbers of a decision.
    """

    feature_dim: int
    """`F`."""
    decided: str = "actions"
    """Column of a replay with what the policy decides and the critics value: a column of rollouts, or of their
    traces."""
    scaled: str = "proprio"
    """Column of a replay whose statistics scale what the policy sees."""

    @property
    def decision_size(self) -> int:
        """`N`, numbers of a decision: `C*D` actions, unless a subclass decides something else."""
        return self.spec.chunk_size * self.spec.action_dim

    @abstractmethod
    def explore(self, inputs: Inputs, generator: torch.Generator) -> ActOutput:
        """Choose chunks before anything is learned: of random actions, spread evenly over the simulator's range,
        whatever is seen."""

    @abstractmethod
    def encode(self, inputs: Inputs) -> Tensor:
        """Return what the critics see of observations, float32 `[B, F]`; `inputs` are from `preprocess`. Differentiable
        in `encoder_parameters`."""

    def encoder_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of `encode`, which learn from the loss of the critics alone and are stepped with them
        (Yarats et al. 2021, arXiv:2107.09645). The default: none."""
        return []

    def encode_stored(self, stored: Inputs) -> Tensor:
        """Return what the critics see of observations in a replay, float32 `[B, F]`; `stored` has their columns, on the
        policy's device."""
        descriptions = [""] * len(next(iter(stored.values())))
        observation = PolicyObservation(
            images=stored.get("images"), proprio=stored.get("proprio"), task_descriptions=descriptions
        )
        return self.encode(self.preprocess(observation))

    @abstractmethod
    def draw(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return decisions in -1 .. 1 `[B, N]` and their log-probabilities `[B]` [nats], differentiable.

        Args:
            features: `[B, F]`.
            noise: standard normal, `[B, N]`.
        """

    @abstractmethod
    def mode(self, features: Tensor) -> Tensor:
        """Return the most likely decisions in -1 .. 1, `[B, N]`."""

    @abstractmethod
    def errors(self, features: Tensor, actions: Tensor) -> Tensor:
        """Return the errors `[B]` of the most likely chunks, differentiable: the supervised loss of each decision.

        Args:
            features: `[B, F]`.
            actions: demonstrated ones, `[B, C, D]` in the simulator's units.
        """

    @abstractmethod
    def to_unit(self, decided: Tensor) -> Tensor:
        """Convert decisions, such as actions `[B, C, D]` in the simulator's units, to the range -1 .. 1, `[B, N]`."""

    @property
    @abstractmethod
    def learns_from_replay(self) -> bool:
        """Whether the policy was built with a head for it."""


def mean_over_samples(losses: Tensor, inputs: Inputs) -> Tensor:
    """Return the mean of losses `[B, ...]`, those of each sample times its `sample_weights`, if there are any.

    Args:
        losses: those that `sft_loss` is the mean of, as many for each sample.
        inputs: of `sft_loss`.
    """
    weights = inputs.get(SAMPLE_WEIGHTS)
    return (losses if weights is None else losses * weights.view(-1, *[1] * (losses.dim() - 1))).mean()


def _outside(module: nn.Module, prefix: str, parts: tuple[str, ...]) -> Iterator[str]:
    for child, part in module.named_children():
        name = f"{prefix}{child}"
        if any(other.startswith(f"{name}.") for other in parts):
            yield from _outside(part, f"{name}.", parts)
        elif name not in parts and any(True for _ in part.parameters()):
            yield name
