"""The Policy protocol: what a model must do to be trained.

Shapes: `B` slots (or samples), `C` actions in a chunk, `D` action dims, `N` log-prob entries (`C*D` for most), `S`
proprio dims.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
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
from embodyrl.models.saved import write_description
from embodyrl.models.weights import read_tensors

Inputs = dict[str, Tensor]
"""What `preprocess` makes of an observation; every tensor is `[B, ...]`."""

PUBLISHED = "<published>"
"""As a config's checkpoint: a model of the size that was published, for looking at without weights."""
WEIGHTS_FILE = "model.safetensors"


@dataclass(kw_only=True)
class PolicyObservation:
    """What `Policy.preprocess` gets, in rollouts and in learning alike: tensors of `B` envs or samples.

    They lie where the engine has them: on the CPU in rollouts, on the policy's device in learning.
    """

    images: Tensor | None = None
    """uint8 `[B, V, H, W, 3]`, or None without cameras."""
    proprio: Tensor | None = None
    """float32 `[B, S]`, or None if S is 0."""
    task_descriptions: list[str]
    """Task description of each, length `B`."""

    @classmethod
    def of(cls, observation: Observation) -> PolicyObservation:
        """Return a simulator's observation as tensors, which share its memory where that may be written to."""
        return cls(
            images=None if observation.images is None else _tensor(observation.images),
            proprio=None if observation.proprio is None else _tensor(observation.proprio),
            task_descriptions=observation.task_descriptions,
        )


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """What a policy produces."""

    kind: str
    """gaussian | categorical | ar_token | parallel_token | flow"""
    chunk_size: int
    """`C`, actions in one decision."""
    action_dim: int
    """`D`, entries of one action."""
    proprio_dim: int
    """`S`, numbers in the state observation that it expects."""


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Which parts of a policy the engine may treat on their own; names as in `named_modules`."""

    blocks: tuple[str, ...] = ()
    """Large parts that follow one another (transformer layers): each is sharded, and with gradient checkpointing
    computed again in the backward pass, as one."""
    adaptable: tuple[str, ...] = ()
    """Linear layers that a LoRA adapter may change."""
    heads: tuple[str, ...] = ()
    """Small parts that learn in full beside adapters: value head, action head, ..."""
    root: str = ""
    """The part that the public checkpoint is of: adapter files name layers from there on. Empty: the whole policy."""


@dataclass(kw_only=True)
class ActOutput:
    """One decision for each of `B` slots."""

    actions: Tensor
    """`[B, C, D]` float32 in the simulator's units."""
    logprobs: Tensor
    """`[B, N]` log-probabilities of what was sampled [nats]."""
    values: Tensor | None
    """`[B]` value estimates, or None without a critic."""
    trace: Inputs = field(default_factory=dict)
    """What `evaluate` needs to score this decision again; every tensor is `[B, ...]`."""


@dataclass(kw_only=True)
class EvalOutput:
    """The same decisions under the current weights, differentiable."""

    logprobs: Tensor
    """`[B, N]`"""
    entropy: Tensor
    """`[B, N]` [nats]"""
    values: Tensor | None
    """`[B]`"""


class Policy(nn.Module, ABC):
    """Base class of all policies. A subclass sets `spec` and writes `act` and `evaluate`; the rest has working
    defaults.

    The engine may run a policy under autocast (`engine.precision`), where products of matrices are bfloat16: what comes
    out of the network goes through `.float()` before it becomes a distribution, a value, a loss or an action.

    Args:
        config: the model's options (its dataclass from the registry).
        simulator: what the simulator offers.
        chunk_size: `C`.
    """

    name: str = ""
    """Name in the registry."""
    spec: PolicySpec

    @abstractmethod
    def __init__(self, config: Any, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__()

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """Turn an observation into the network's inputs on the policy's device, every tensor `[B, ...]`.

        The default passes the state observation on as `proprio`.
        """
        device = next(self.parameters()).device
        return {"proprio": torch.as_tensor(observation.proprio, dtype=torch.float32, device=device)}

    @abstractmethod
    def act(
        self, inputs: Inputs, mode: Literal["train", "eval"], generator: torch.Generator | None = None
    ) -> ActOutput:
        """Decide. `train` samples with `generator`; `eval` takes the most likely action and draws nothing."""

    @abstractmethod
    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """Score stored decisions; at equal weights the log-probs equal those of `act`."""

    def imitation_draws(self, samples: int, generator: torch.Generator) -> Inputs:
        """The random numbers that `sft_loss` is estimated with (the noise of flow matching), `[samples, ...]`. They are
        drawn for a whole minibatch, so that it has the same loss in parts, and on several ranks. The default: none.

        Args:
            samples: how many demonstrations.
            generator: on the policy's device.
        """
        return {}

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """Return how far the policy is from doing what was demonstrated; a scalar to descend, a mean over samples.

        Args:
            inputs: what was seen, from `preprocess`.
            actions: `[B, C, D]` in the simulator's units, within its range.
            draws: of these samples, from `imitation_draws`.
        """
        raise PolicyError(f"model {self.name!r} cannot learn from demonstrations: it has no sft_loss")

    def parallel_plan(self) -> ParallelPlan:
        """Return how the engine may shard, recompute and adapt the policy. The default: as one, and with no adapter."""
        return ParallelPlan()

    def parts_beside(self, *parts: str) -> tuple[str, ...]:
        """Names of the largest parts with weights that lie outside of `parts`, which are named as in `named_modules`:
        what learns in full while adapters are around those."""
        return tuple(_outside(self, "", parts))

    def modules_named(self, pattern: str) -> tuple[str, ...]:
        """Return the names of modules that a regular expression matches as a whole."""
        return tuple(name for name, _ in self.named_modules() if re.fullmatch(pattern, name))

    def linear_layers(self, prefix: str) -> tuple[str, ...]:
        """Return the names of linear layers that begin with `prefix`."""
        return tuple(
            name for name, module in self.named_modules() if name.startswith(prefix) and isinstance(module, nn.Linear)
        )

    def head_tensors(self) -> dict[str, Tensor]:
        """Return what learns in full beside adapters (the heads of `parallel_plan`), and the buffers there, by name;
        they share memory with the policy."""
        return {
            f"{head}.{name}": tensor.detach()
            for head in self.parallel_plan().heads
            for name, tensor in self.get_submodule(head).state_dict().items()
        }

    def critic_parameters(self) -> list[nn.Parameter]:
        """The parameters of the critic alone, which may learn at a rate of their own. The default: those of modules
        called `critic` or `value_head`."""
        return [parameter for name, parameter in self.named_parameters() if name.startswith(("critic.", "value_head."))]

    def set_progress(self, done: float) -> None:
        """Be told which share of the run's updates is done, 0 .. 1, whenever that changes: some explore less and less.
        What a decision was drawn with belongs into its trace. The default does not care."""

    def tokens_per_observation(self, task: str) -> int:
        """Positions that the policy's largest transformer reads for a decision about `task`, its answer included. The
        default: 0, there is none."""
        return 0

    def cache_bytes(self, task: str) -> int:
        """Bytes that a slot's decision keeps between its parts (keys and values of attention). The default: 0."""
        return 0

    def update_statistics(self, inputs: Inputs) -> None:
        """Take note of an iteration's observations `[M, ...]` (running normalisation). Called once after each
        update, so
        that rollout and training of one iteration see the same normalisation. The default keeps no statistics."""

    @property
    def keeps_statistics(self) -> bool:
        """Whether `update_statistics` does anything; else nobody needs to preprocess a whole batch for it."""
        return type(self).update_statistics is not Policy.update_statistics

    def options_to_save(self, config: ModelConfig) -> ModelConfig:
        """The options that a saved policy remembers: those of `config`, and what was found where it leaves open (null)
        what belongs to the policy from then on (the model's fact `kept`). The default: those of `config`."""
        return config

    def save(self, folder: Path, config: ModelConfig) -> None:
        """Write weights and description into an existing folder."""
        save_file({key: value.contiguous() for key, value in self.state_dict().items()}, folder / WEIGHTS_FILE)
        write_description(folder, config, self.spec)

    def start_from(self, folder: Path) -> None:
        """Take the weights that a config names, which need not come from `save`. The default is `load`."""
        self.load(folder)

    def load(self, folder: Path) -> None:
        """Read weights written by `save`.

        Raises:
            PolicyError: files are missing, or names or shapes of weights differ (each is named).
        """
        path = folder / WEIGHTS_FILE
        if not path.is_file():
            raise PolicyError(f"{folder} holds no {WEIGHTS_FILE}: give the `policy` folder of a checkpoint")
        weights, own = read_tensors(path), self.state_dict()
        faults = [f"missing {key}" for key in own.keys() - weights.keys()]
        faults += [f"unexpected {key}" for key in weights.keys() - own.keys()]
        faults += [
            f"{key} has shape {tuple(weights[key].shape)}, expected {tuple(own[key].shape)}"
            for key in own.keys() & weights.keys()
            if weights[key].shape != own[key].shape
        ]
        if faults:
            raise PolicyError(f"weights in {path} do not fit model {self.name!r}: {'; '.join(sorted(faults))}")
        self.load_state_dict(weights)


def _outside(module: nn.Module, prefix: str, parts: tuple[str, ...]) -> Iterator[str]:
    for child, part in module.named_children():
        name = f"{prefix}{child}"
        if any(other.startswith(f"{name}.") for other in parts):
            yield from _outside(part, f"{name}.", parts)
        elif name not in parts and any(True for _ in part.parameters()):
            yield name
