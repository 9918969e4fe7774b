"""HybridEngine: one set of weights that rolls out and trains."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embodyrl.config.schema import EngineConfig, Offload
from embodyrl.engine.compute import (
    Blocks,
    Streams,
    choose_device,
    choose_precision,
    choose_threads,
    computing_in,
    recompute_blocks,
    set_up_torch,
)
from embodyrl.engine.distribution import full_state_dict, parallelize
from embodyrl.engine.exchange import Exchange
from embodyrl.engine.graphs import CudaGraph, Graphs
from embodyrl.engine.guard import Guard, NumericsError, explain_actions
from embodyrl.engine.lora import add_adapters, cast_once, load_weights_into
from embodyrl.engine.minibatch import ON_HOST, Columns, MicroBatches
from embodyrl.engine.offload import EngineOffload
from embodyrl.engine.optimizer import Optimizer
from embodyrl.engine.parallel import SINGLE_PROCESS, Ranks, is_sharded
from embodyrl.engine.reference import reference_of
from embodyrl.envs import Observation
from embodyrl.models.policy import ActOutput, Inputs, Policy, PolicyObservation, SoftPolicy
from embodyrl.models.products import use_onednn
from embodyrl.placement.ranks import shards_of
from embodyrl.tracking.clock import Clock, Phase

ALL = Blocks()
"""The only block of a run that is not divided."""


class HybridEngine:
    """Owns the policy, its optimiser, and the random streams of acting and learning. How the policy learns is the
    method's matter (`methods.learner.Learner`), which uses what is here.

    The policy is in evaluation mode for acting and learning: dropout would make an update's log-probs differ from the
    rollout's. Noise comes from generators of the engine's own, so that changing the mode changes no number.

    Shapes: `M` chunks of a minibatch, `C` actions of a chunk, `D` action dims.

    Args:
        policy: moved to the engine's device.
        config: device, threads, optimiser.
        iterations: length of the run, for the learning-rate schedule.
        seed: the run's seed.
        reference: keep the policy that the run began with, to be compared with.
        excluded: parameters of the policy that its optimiser leaves to others.
        saved: folder of a saved policy (`lora.save_policy`) to continue from; the reference policy stays the given one.
        ranks: those of the run; each has an engine for its share of minibatches.
        blocks: those that this process decides for.
        processes_here: processes that compute on this machine's cores at the same time.
        folder: of the run, for the guard's files and for what `engine.offload` moves to disk. None: the guard writes
            nothing, and the rest goes to the folder of temporary files.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        config: EngineConfig,
        iterations: int,
        seed: int,
        reference: bool = False,
        excluded: Collection[nn.Parameter] = (),
        saved: Path | None = None,
        folder: Path | None = None,
        ranks: Ranks = SINGLE_PROCESS,
        blocks: Blocks = ALL,
        processes_here: int = 1,
    ) -> None:
        self.config, self.seed, self.iterations = config, seed, iterations
        self.device = choose_device(config.device)
        torch.set_num_threads(choose_threads(config.threads, policy, max(ranks.local_size, processes_here)))
        set_up_torch(self.device, deterministic=config.deterministic)
        self.policy = policy.eval()
        # The order below matters: adapters before the reference policy is derived (with LoRA it is the same network
        # without them), the reference before saved weights are loaded (it is where the run began), sharding after
        # both, and the optimiser last, since it must hold the parameters that remain.
        if config.lora.rank:
            add_adapters(policy, config.lora, seed)
        if shards_of(config.parallel.backend, ranks.size, ranks.local_size) == 1:
            self.policy.to(self.device)  # else each block when it is sharded
        use_onednn(policy)
        self.clock = Clock(partial(torch.cuda.Event, enable_timing=True) if self.device.type == "cuda" else None)
        """Time by phase of the thread that made the engine."""
        self.modes = Modes(self.clock)
        self.reference = reference_of(policy, adapted=config.lora.rank > 0) if reference else None
        """The policy at the start of the run; None if nothing is compared with it."""
        if saved is not None:
            load_weights_into(policy, saved)
        if config.gradient_checkpointing is True:  # auto: nothing has found a need for it
            recompute_blocks(policy)
        self.ranks = ranks
        self.exchange = Exchange(ranks)
        """Large columns of the batches to learn from."""
        self.weights = parallelize(self.policy, ranks, config.parallel.backend, self.device)
        """Shards of the policy's weights over ranks."""
        if self.reference is not None and self.reference.weights is not None:
            parallelize(self.reference.weights, ranks, config.parallel.backend, self.device)
        self.modes.around[Mode.rollout].append(self.weights.unsharded)
        # FSDP exchanges weights from hooks of its own, which a graph would not repeat.
        suits = self.device.type == "cuda" and policy.acts_on_device and not any(map(is_sharded, policy.parameters()))
        self.graphs = Graphs(policy, CudaGraph if config.cuda_graphs and suits else None)
        """Decisions as CUDA graphs."""
        self.modes.around[Mode.rollout].append(self.graphs.kept)
        self.watch: Callable[[], None] = _see_nothing
        """Called after every optimiser step; raises an error if processes that the run needs have ended."""
        self.version = 0
        """Updates so far; every chunk is labelled with the version that produced it."""
        self.edition = 0
        """Changes of the policy in this process, of its weights and of its statistics: who keeps a copy compares it."""
        self.precision = choose_precision(config.precision, policy, self.device)
        """Data type of forward passes."""
        self.computing = computing_in(self.precision, self.device)
        """Context of forward passes."""
        if self.precision is not torch.float32:
            cast_once(policy)
        others = set(excluded)
        self.optimizer = Optimizer(
            (parameter for parameter in policy.parameters() if parameter not in others),
            config.optimizer,
            iterations,
            policy.critic_parameters(),
            keep_gradients=config.offload is Offload.none and not others,
        )
        self.guard = Guard(config.guard, folder if ranks.is_first else None)
        self.offload = EngineOffload(
            config.offload,
            policy=policy,
            optimizer=self.optimizer.inner,
            reference=None if self.reference is None else self.reference.weights,
            device=self.device,
            folder=Path(tempfile.gettempdir()) if folder is None else folder,
            clock=self.clock,
        )
        self._offloads = config.offload is not Offload.none
        if self._offloads:
            self.modes.around[Mode.train].append(self.offload.optimizer_here)
        self.on_host = ON_HOST | policy.reads_on_host
        """Columns that stay on the CPU."""
        self.micro_batches = MicroBatches(self.exchange, self.clock, self.device, self.on_host, config.micro_batch_size)
        """Parts of minibatches that go through the model at once."""
        self.blocks = blocks
        self.streams = Streams(seed, self.device, blocks.here)
        """Random numbers of acting and learning."""

    def rollout_mode(self) -> AbstractContextManager[None]:
        """Hold the weights ready to act for the length of a block. `act` enters it too, so a block around many calls
        saves the changes in between."""
        return self.modes.enter(Mode.rollout)

    def train_mode(self) -> AbstractContextManager[None]:
        """Hold weights and optimiser ready to learn for the length of a block."""
        return self.modes.enter(Mode.train)

    def memory_metrics(self) -> dict[str, float]:
        """Return the memory that `engine.offload` has freed on the device [MiB]; empty without it."""
        return self.offload.metrics() if self._offloads else {}

    def full_policy(self) -> Policy | None:
        """Return the policy with all of its weights, to be saved, on the first rank; None on the others. All ranks must
        call it."""
        return self.weights.full_policy()

    @property
    def noise(self) -> Sequence[torch.Generator]:
        """Random streams of the actions in training, of each block that this process decides for."""
        return [*self.streams.actions.values()]

    def act(
        self,
        observation: Observation,
        mode: Literal["train", "eval", "random"],
        noise: torch.Generator | None = None,
        further: Mapping[str, Tensor] | None = None,
    ) -> ActOutput:
        """Choose a chunk for each slot; see `Policy.act`, and for random ones `SoftPolicy.explore`. Without a stream of
        `noise`, that of the first block is used. `further` are inputs of `Policy.act` beside those of the
        observation."""
        noise = self.noise[0] if noise is None else noise
        with self.rollout_mode(), self.clock.measure(Phase.infer), torch.inference_mode():
            inputs = {**self.prepare(PolicyObservation.of(observation)), **(further or {})}
            with self.computing:
                if mode == "random":
                    assert isinstance(self.policy, SoftPolicy), "only replays begin with random actions"
                    return self.policy.explore(inputs, noise)
                return self.graphs.act(inputs, mode, noise)

    def preprocess(self, observation: Observation) -> Inputs:
        """Return network inputs `[B, ...]` of an observation; see `Policy.preprocess`."""
        with self.rollout_mode(), torch.inference_mode():
            return self.prepare(PolicyObservation.of(observation))

    def decide(self, inputs: Inputs) -> ActOutput:
        """Choose the most likely chunks for network inputs, without a CUDA graph: it would be captured for this one
        call."""
        with self.rollout_mode(), torch.inference_mode(), self.computing:
            return self.policy.act(inputs, "eval", None)

    def stored_features(self, observation: Observation) -> Tensor:
        """Return the features of observations that a replay keeps, on the CPU; see `Policy.keeps_features`."""
        with self.rollout_mode(), self.clock.measure(Phase.infer), torch.inference_mode():
            inputs = self.prepare(PolicyObservation.of(observation))
            with self.computing:
                return self.policy.stored_features(inputs).cpu()

    def actions_of(self, decision: ActOutput) -> NDArray[np.float32]:
        """Return the actions `[B, C, D]` of a decision on the CPU, for simulators.

        Raises:
            NumericsError: one is NaN or infinite.
        """
        actions: NDArray[np.float32] = decision.actions.cpu().numpy()
        if not np.isfinite(actions).all():
            raise NumericsError(explain_actions(actions, self.policy, self.version))
        return actions

    def prepare(self, observation: PolicyObservation) -> Inputs:
        """Return network inputs `[B, ...]` of an observation, within a mode; see `Policy.preprocess`."""
        with self.clock.measure(Phase.preprocess):
            return self.policy.preprocess(observation)

    def optimizer_step(self, loss: Tensor, minibatch: Columns, optimizer: Optimizer | None = None) -> Tensor | None:
        """Clip the gradients of a minibatch's loss and make an optimiser step; returns their norm before clipping, or
        None if loss or norm is not finite and the step was left out. `optimizer` is the policy's unless given."""
        optimizer = optimizer or self.optimizer
        norm = optimizer.clip()
        # One NaN in the weights would ruin everything after it, so both are checked before they reach the weights.
        if not self.guard.allows(loss, norm, minibatch, update=self.version + 1):
            return None
        optimizer.step()
        self.watch()
        return norm

    def end_update(self, rate: float) -> dict[str, float]:
        """Count an update and return the metrics that every kind of update has."""
        self.optimizer.clear()
        self.set_version(self.version + 1)
        return {"train/learning_rate": rate, "train/skipped_steps": float(self.guard.skipped)}

    def set_version(self, version: int) -> None:
        """Note that the weights are those of a version."""
        self.version = version
        self.note_change()
        self.graphs.forget()
        self.policy.set_progress(min(version / self.optimizer.updates, 1.0))

    def note_change(self) -> None:
        """Note that the policy acts otherwise now: copies of it have to be made anew."""
        self.edition += 1

    def scheduled(self, version: int, updates: int) -> dict[str, float]:
        """Return the settings that change over a run, with their values when a version of the policy acts and learns.

        Args:
            version: 0 .. updates.
            updates: iterations of the run.
        """
        config, share = self.optimizer.config, self.optimizer.share(version, updates)
        rates = {"lr": config.lr, "critic_lr": config.critic_lr}
        scheduled = {f"engine.optimizer.{name}": rate * share for name, rate in rates.items() if rate is not None}
        return {**scheduled, **self.policy.scheduled(min(version / updates, 1.0))}

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return optimiser, random streams of learning, version, and the weights of the reference policy, which nothing
        else keeps once the run has learned. The policy's own weights are not among them. Sharded tensors are whole on
        the first rank and empty on the others; all ranks must call it."""
        first = self.ranks.is_first
        reference = (
            {} if self.reference is None else {"reference": full_state_dict(self.reference.state_dict(), keep=first)}
        )
        return reference | {
            "optimizer": full_state_dict(self.optimizer.state_dict(), keep=first),
            "streams": self.streams.state_dict(),
            "version": self.version,
            "skipped": self.guard.skipped,
        }

    def noise_state(self) -> dict[str, Any]:
        """Return the state of `noise`; see `Streams`."""
        return self.streams.noise_state()

    def load_noise(self, state: Mapping[str, Any]) -> None:
        """Continue from the joint `noise_state` of all processes that decide; see `Streams`. The version must be known
        already."""
        self.streams.load_noise(state, self.version)

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Continue from `state_dict`; returns a warning if that cannot be exact, see `Streams.load_state_dict`."""
        with self.offload.optimizer_here():
            self.optimizer.load_state_dict(state["optimizer"])
        warning = self.streams.load_state_dict(state["streams"], state["version"])
        self.set_version(state["version"])
        self.guard.skipped = state["skipped"]
        if self.reference is not None:
            with self.offload.reference_here():
                self.reference.load_state_dict(state["reference"])
        self.offload.put_away()
        return warning


def _see_nothing() -> None:
    """Watch nobody."""


# ---- modes


Preparation = Callable[[], AbstractContextManager[object]]
"""A context to enter when a mode begins, and to leave when it ends."""


class Mode(StrEnum):
    """Use of the weights."""

    rollout = "rollout"
    train = "train"


class Modes:
    """Keeps the current mode and prepares the engine for it.

    `around` holds the preparations of each mode: state loaded back, shards gathered. They are entered in this order
    when the mode begins, and left in the opposite one. Entering the current mode again does nothing; a mode inside the
    other one lasts for its block.

    Args:
        clock: preparations count as `sync`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.around: dict[Mode, list[Preparation]] = {mode: [] for mode in Mode}
        self.current: Mode | None = None

    @contextmanager
    def enter(self, mode: Mode) -> Iterator[None]:
        """Be in a mode for the length of a block."""
        if self.current is mode:
            yield
            return
        before = self.current
        with ExitStack() as stack:
            with self._clock.measure(Phase.sync):
                for preparation in self.around[mode]:
                    stack.enter_context(preparation())
            self.current = mode
            try:
                yield
            finally:
                self.current = before
            with self._clock.measure(Phase.sync):
                stack.close()
