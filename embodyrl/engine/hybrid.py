"""HybridEngine: one set of weights that rolls out and trains."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.algorithms.columns import Bound, logprobs_at_level
from embodyrl.algorithms.losses import (
    LossOutput,
    kl_divergence,
    log_ratio,
    proximal_logprobs,
    require_entries,
    value_loss,
)
from embodyrl.algorithms.off_policy_options import imitation_steps
from embodyrl.config.schema import AlgorithmConfig, EngineConfig, Offload, OldLogprobs, Proximal
from embodyrl.data.batch import Batch
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
from embodyrl.engine.exchange import ADDRESS, Exchange
from embodyrl.engine.graphs import CudaGraph, Graphs
from embodyrl.engine.large import LEARNED_FROM
from embodyrl.engine.learners import learner_of, shows_critics
from embodyrl.engine.lora import add_adapters, cast_once, load_weights_into
from embodyrl.engine.minibatch import (
    ON_HOST,
    Columns,
    Drawn,
    Metrics,
    Step,
    Total,
    absent,
    action_weights,
    draw_minibatches,
    length,
    mean_kl,
    mean_metrics,
    merged,
    metrics_of,
    nested,
    nothing_of,
    numbered,
    observation_from,
    rows,
    split_minibatch,
    to_columns,
)
from embodyrl.engine.offload import EngineOffload
from embodyrl.engine.onlooker import Onlooker
from embodyrl.engine.optimizer import Guard, NumericsError, Optimizer, explain_actions
from embodyrl.engine.parallel import SINGLE_PROCESS, Ranks, is_sharded
from embodyrl.engine.reference import reference_of
from embodyrl.engine.soft import Minibatch
from embodyrl.envs import Observation
from embodyrl.models.flow.steering import SteeredPolicy
from embodyrl.models.normalizer import RunningNormalizer
from embodyrl.models.policy import (
    ACTION_WEIGHTS,
    SAMPLE_WEIGHTS,
    ActOutput,
    EvalOutput,
    Inputs,
    Policy,
    PolicyObservation,
    SoftPolicy,
)
from embodyrl.placement.ranks import shards_of
from embodyrl.screen import task
from embodyrl.tracking.clock import Clock, Phase

if TYPE_CHECKING:  # importing it takes a while, and an engine that only acts does without
    from tensordict import TensorDictBase

ALL = Blocks()
"""The only block of a run that is not divided."""


class HybridEngine:
    """Owns the policy, its optimiser, and the random streams of acting and learning.

    The policy is in evaluation mode for acting and learning: dropout would make an update's log-probs differ from the
    rollout's. Noise comes from generators of the engine's own, so that changing the mode changes no number.

    Shapes: `M` chunks of a minibatch, `C` actions of a chunk, `D` action dims.

    Args:
        policy: moved to the engine's device.
        config: device, threads, optimiser.
        algorithm: epochs, minibatches, loss weights, options of the policy loss.
        loss: policy loss from the registry.
        iterations: length of the run, for the learning-rate schedule.
        seed: the run's seed.
        onlooker: what critics of actions see with, if not with the policy; see `learners.onlooker_for`.
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
        algorithm: AlgorithmConfig,
        loss: Callable[..., LossOutput],
        iterations: int,
        seed: int,
        onlooker: Onlooker | None = None,
        saved: Path | None = None,
        folder: Path | None = None,
        ranks: Ranks = SINGLE_PROCESS,
        blocks: Blocks = ALL,
        processes_here: int = 1,
    ) -> None:
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
        self.clock = Clock(partial(torch.cuda.Event, enable_timing=True) if self.device.type == "cuda" else None)
        """Time by phase of the thread that made the engine."""
        self.modes = Modes(self.clock)
        self.algorithm = algorithm
        self.loss = Bound(loss, algorithm.loss)
        self.reference = reference_of(policy, adapted=config.lora.rank > 0) if algorithm.kl_coef > 0.0 else None
        """The policy at the start of the run; None if `algorithm.kl_coef` is 0."""
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
        self.precision = choose_precision(config.precision, policy, self.device)
        """Data type of forward passes."""
        self._computing = computing_in(self.precision, self.device)
        if self.precision is not torch.float32:
            cast_once(policy)
        # The encoder of a policy that learns from a replay is stepped with the critics (`SoftActorCritic`).
        beside = set(policy.encoder_parameters()) if shows_critics(policy, algorithm) else set()
        self.optimizer = Optimizer(
            (parameter for parameter in policy.parameters() if parameter not in beside),
            config.optimizer,
            iterations,
            policy.critic_parameters(),
            keep_gradients=config.offload is Offload.none and not beside,
        )
        self._imitator = self.optimizer
        """Learns from demonstrations: all of the policy, its encoder included."""
        if beside and imitation_steps(algorithm):
            self._imitator = Optimizer(policy.parameters(), config.optimizer, iterations)
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
        self._micro_batch_size = config.micro_batch_size
        self._whole_episodes = self.loss.takes("sequence")
        self.blocks = blocks
        self._streams = Streams(seed, self.device, blocks.here)
        self.soft = learner_of(
            policy,
            algorithm,
            onlooker=onlooker,
            imitate=self._imitate_weighted,
            actor=self.optimizer,
            config=config.optimizer,
            updates=iterations,
            seed=seed,
            weights=self.weights,
            guard=self.guard,
            watch=lambda: self.watch(),
        )
        """What learns from a replay beside the policy; None for other algorithms."""

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
        return [*self._streams.actions.values()]

    def act(
        self,
        observation: Observation,
        mode: Literal["train", "eval", "random"],
        noise: torch.Generator | None = None,
    ) -> ActOutput:
        """Choose a chunk for each slot; see `Policy.act`, and for random ones `SoftPolicy.explore`. Without a stream of
        `noise`, that of the first block is used."""
        noise = self.noise[0] if noise is None else noise
        with self.rollout_mode(), self.clock.measure(Phase.infer), torch.inference_mode():
            inputs = self._preprocess(PolicyObservation.of(observation))
            with self._computing:
                if mode == "random":
                    assert isinstance(self.policy, SoftPolicy), "only replays begin with random actions"
                    return self.policy.explore(inputs, noise)
                return self.graphs.act(inputs, mode, noise)

    def preprocess(self, observation: Observation) -> Inputs:
        """Return network inputs `[B, ...]` of an observation; see `Policy.preprocess`."""
        with self.rollout_mode(), torch.inference_mode():
            return self._preprocess(PolicyObservation.of(observation))

    def decide(self, inputs: Inputs) -> ActOutput:
        """Choose the most likely chunks for network inputs, without a CUDA graph: it would be captured for this one
        call."""
        with self.rollout_mode(), torch.inference_mode(), self._computing:
            return self.policy.act(inputs, "eval", None)

    @property
    def keeps_features(self) -> bool:
        """Whether replays keep features of observations, not observations."""
        return isinstance(self.policy, SteeredPolicy)

    def look(self, observation: Observation) -> Tensor:
        """Return the features of observations on the CPU; see `SteeredPolicy.look`."""
        assert isinstance(self.policy, SteeredPolicy), "see keeps_features"
        with self.rollout_mode(), self.clock.measure(Phase.infer), torch.inference_mode():
            inputs = self._preprocess(PolicyObservation.of(observation))
            with self._computing:
                return self.policy.look(inputs).cpu()

    def actions_of(self, decision: ActOutput) -> NDArray[np.float32]:
        """Return the actions `[B, C, D]` of a decision on the CPU, for simulators.

        Raises:
            NumericsError: one is NaN or infinite.
        """
        actions: NDArray[np.float32] = decision.actions.cpu().numpy()
        if not np.isfinite(actions).all():
            raise NumericsError(explain_actions(actions, self.policy, self.version))
        return actions

    def _preprocess(self, observation: PolicyObservation) -> Inputs:
        with self.clock.measure(Phase.preprocess):
            return self.policy.preprocess(observation)

    # ---- learning from rollouts

    def update(self, batch: TensorDictBase, task_descriptions: Sequence[str]) -> dict[str, float]:
        """Learn from a batch: `algorithm.epochs` passes over it in shuffled minibatches, an optimiser step for each.

        Args:
            batch: `[M]` chunks: observation columns, `task_index`, `trace`, `version`, `sequence` (number of the
                episode that each belongs to), `executed` `[M, C]`, and with a critic `returns` and `old_values`. At the
                level of `algorithm.logprob_level` (see `algorithms.columns`): `old_logprobs`, `advantages`, `valid`
                (the entries that count), `weights` (see `algorithms.losses.token_weights`).
            task_descriptions: those that the column `task_index` refers to.

        Returns:
            Metrics, each the mean over the optimiser steps taken.
        """
        target_kl = self.algorithm.target_kl
        history: list[Step] = []
        epochs, too_far = 0, False
        with self.train_mode(), self.clock.measure(Phase.train), ExitStack() as under_way:
            rate = self.optimizer.set_learning_rate(self.version)
            columns = to_columns(batch, self.device, ON_HOST | self.policy.reads_on_host)
            # States are preprocessed once for all epochs. Images are bytes here and floats afterwards, four times as
            # large and larger: they wait for their micro-batch.
            if "images" not in columns and not self._fetches(columns, "images"):
                columns["inputs"] = self._preprocess(observation_from(columns, task_descriptions))
            # The first epoch's minibatches are drawn early, because log-probs are recomputed in their parts.
            drawn = self._draw_minibatches(columns)
            self._add_logprobs(columns, task_descriptions, drawn)

            progress = under_way.enter_context(task("learning", self.algorithm.epochs * len(drawn), "minibatches"))
            for epoch in range(self.algorithm.epochs):
                if epoch > 0:
                    drawn = self._draw_minibatches(columns)
                for minibatch, share in self._minibatches(columns, drawn):
                    progress.advance()
                    step = self._backward(minibatch, task_descriptions, share)
                    # Early stopping as in OpenAI's Spinning Up: the KL divergence is that before this step, which
                    # would lead still farther away and is not made. The GPU is waited for only if a target is set.
                    if target_kl is not None and float(mean_kl(step, self.ranks)) > target_kl:
                        history.append(step)
                        too_far = True
                        break
                    step.grad_norm = self.optimizer_step(step.loss, minibatch)
                    # A step that the guard left out would put its NaN into every mean.
                    if step.grad_norm is not None:
                        history.append(step)
                if too_far:
                    break
                epochs += 1

            metrics = metrics_of(history, self.ranks, self.version) | self._end_update(rate)
            # Running statistics change what the policy computes. Updated any earlier, the first ratio would not be 1.
            if self.policy.keeps_statistics:
                self.policy.update_statistics(self._inputs(self._whole(columns), task_descriptions))
        return metrics | {"train/epochs": float(epochs)}

    def _add_logprobs(self, columns: Columns, task_descriptions: Sequence[str], drawn: Drawn) -> None:
        """Add the log-probs that the loss needs and the rollout did not record: under the reference policy, and under
        the policy that the update starts from."""
        settings = self.algorithm
        if self.reference is not None:
            with self.offload.reference_here(), self.reference.scoring() as reference:
                most = -(-length(columns) // settings.minibatches)  # no more memory than a minibatch needs
                parts = self._micro_batches(numbered(columns), whole=False, most=most)
                columns["reference_logprobs"] = self._score(reference, parts, columns, task_descriptions)
        if self.loss.takes("proximal_logprobs") and settings.proximal is Proximal.recompute:
            columns["proximal_logprobs"] = self._score_as_learned(columns, task_descriptions, drawn)
        if settings.old_logprobs is OldLogprobs.recompute:
            # Chunks of earlier policies keep the rollout's log-probs: the weights that chose them are gone.
            again = self._score_as_learned(columns, task_descriptions, drawn)
            columns["old_logprobs"] = torch.where(self._is_new(columns, again), again, columns["old_logprobs"])

    def _draw_minibatches(self, columns: Columns) -> Drawn:
        """Draw the minibatches of an epoch: chunk by chunk, or episode by episode for a loss that compares episodes."""
        count, whole = self.algorithm.minibatches, self._whole_episodes
        return [*draw_minibatches(columns["sequence"], count, whole, self._streams.shuffling)]

    def _minibatches(self, columns: Columns, drawn: Drawn) -> Iterator[tuple[Columns, float]]:
        """Yield the columns of the minibatches that were drawn, each with its share of the batch."""
        if "inputs" not in columns:  # images are too large for a second, shuffled batch
            yield from ((rows(columns, index), share) for index, share in drawn)
            return
        # One gather for the whole epoch; its minibatches are views of it.
        shuffled = rows(columns, torch.cat([index for index, _ in drawn]))
        end = 0
        for index, share in drawn:
            start, end = end, end + len(index)
            yield rows(shuffled, slice(start, end)), share

    def _micro_batches(
        self, minibatch: Columns, whole: bool, most: int | None = None
    ) -> Iterator[tuple[Columns, bool]]:
        """Yield this rank's micro-batches of a minibatch, and whether each counts; see `Ranks.scatter`."""
        size = self.ranks.part_size(length(minibatch), self._micro_batch_size or most)
        parts = list(split_minibatch(minibatch, size, whole))
        if ADDRESS not in minibatch:
            yield from self.ranks.scatter(parts)
            return
        # Large columns come for several parts at a time, at most a minibatch: each exchange waits for the slowest rank.
        dealt = [
            # Of a part that does not count, a row is enough.
            [(part if counts else rows(part, slice(0, 1)), counts) for part, counts in self.ranks.scatter(parts, rank)]
            for rank in range(self.ranks.size)
        ]
        at_once = math.ceil((most or length(minibatch)) / (size * self.ranks.size))
        for start in range(0, len(dealt[0]), at_once):
            yield from self._fetched([each[start : start + at_once] for each in dealt])

    def _fetched(self, dealt: Sequence[Sequence[tuple[Columns, bool]]]) -> Iterator[tuple[Columns, bool]]:
        """Yield this rank's parts with their large columns, given the parts of every rank."""
        own = dealt[self.ranks.rank]
        learned = (name for name in self.exchange.names if name.partition("/")[0] in LEARNED_FROM)
        names = absent(learned, own[0][0])
        addresses = [torch.cat([part[ADDRESS] for part, _ in parts]) for parts in dealt]
        with self.clock.measure(Phase.sync):
            fetched = self.exchange.fetch(addresses, names)
        on_host = ON_HOST | self.policy.reads_on_host
        end = 0
        for part, counts in own:
            start, end = end, end + length(part)
            large = nested({name: column[start:end] for name, column in fetched.items()})
            yield merged(part, to_columns(large, self.device, on_host)), counts

    def _fetches(self, columns: Columns, name: str) -> bool:
        """Return whether a column lies with the ranks that collected it."""
        return ADDRESS in columns and name in self.exchange.names

    def _whole(self, columns: Columns) -> Columns:
        """Return the columns of the whole batch with the large ones, on every rank."""
        if "inputs" in columns or ADDRESS not in columns:
            return columns
        return next(self._fetched([[(columns, True)]] * self.ranks.size))[0]

    def _backward(self, minibatch: Columns, task_descriptions: Sequence[str], share: float) -> Step:
        """Make the forward and backward passes of a minibatch, one micro-batch at a time, and leave its gradients on
        the parameters."""
        totals = []
        self.optimizer.clear()
        for part, counts in self._micro_batches(minibatch, self._whole_episodes):
            total = self._loss(part, task_descriptions, share, length(minibatch))
            # Every rank makes as many backward passes, since FSDP exchanges weights in each of them: a rank that ran
            # out of parts would let the others wait for ever. A part that only fills up has weight 0.
            scale = counts * self.weights.factor
            (total.loss if scale == 1.0 else total.loss * scale).backward()
            total.loss = total.loss.detach()  # drops the graph before the next micro-batch needs its memory
            totals.append(total if counts else nothing_of(total))
        self.weights.sum_gradients(self.optimizer.parameters)
        loss = torch.stack([total.loss for total in totals]).sum()
        return Step(totals=totals, loss=self.ranks.sum(loss))

    def _loss(self, part: Columns, task_descriptions: Sequence[str], share: float, decisions: int) -> Total:
        """Compute policy loss + KL penalty - entropy bonus + value loss (Schulman et al. 2017, eq. 9; the KL penalty as
        in Shao et al. 2024, eq. 3) of a minibatch or of a part of it.

        Args:
            part: some rows of the batch's columns.
            task_descriptions: see `update`.
            share: of the minibatch in the batch; `weights` are such that the sum over the whole batch is the loss.
            decisions: chunks in the minibatch.
        """
        settings = self.algorithm
        logprobs, evaluated = self._logprobs(self.policy, part, task_descriptions)
        entropy = logprobs_at_level(settings.logprob_level, evaluated.entropy, part["executed"])

        # The registered loss takes the columns that it names, besides options of its own.
        known = part | {"logprobs": logprobs}
        known |= {name: part[name].to(self.device) for name in self.policy.reads_on_host if self.loss.takes(name)}
        if self.loss.takes("proximal_logprobs") and "proximal_logprobs" not in part:
            known["proximal_logprobs"] = proximal_logprobs(
                logprobs, part["old_logprobs"], part["version"], self.version + 1, settings.proximal
            )
        output = self.loss(known)
        require_entries(output, self.loss.function, logprobs)

        # Logged entry by entry, since what counts and how many is known only once all parts are joined (`summarize`).
        logged = output.metrics | {"policy_loss": output.losses.detach(), "entropy": entropy.detach()}
        losses = output.losses
        if settings.entropy_coef > 0.0:
            losses = losses - settings.entropy_coef * entropy
        if self.reference is not None:
            divergence = kl_divergence(logprobs, part["reference_logprobs"], settings.kl_estimator)
            logged["reference_kl"] = divergence.detach()
            losses = losses + settings.kl_coef * divergence
        # Weights were made for the whole batch. Divided by the share, a minibatch's loss is as large as the batch's, so
        # the learning rate means the same for any number of minibatches.
        total = Total(
            loss=(part["weights"] * losses).sum() / share,
            log_ratio=log_ratio(logprobs.detach(), part["old_logprobs"]),
            entries=logged,
            valid=part["valid"],
            version=part["version"],
        )

        if settings.value_coef > 0.0:
            assert evaluated.values is not None, "the config rules ask for a critic"
            errors = value_loss(
                evaluated.values,
                part["old_values"],
                part["returns"],
                clip=settings.value_clip,
                huber=settings.value_huber,
            )
            total.value_losses = errors.detach()
            total.loss = total.loss + settings.value_coef * errors.sum() / decisions
        return total

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

    def _end_update(self, rate: float) -> dict[str, float]:
        """Count an update and return the metrics that every kind of update has."""
        self.optimizer.clear()
        self.set_version(self.version + 1)
        return {"train/learning_rate": rate, "train/skipped_steps": float(self.guard.skipped)}

    def set_version(self, version: int) -> None:
        """Note that the weights are those of a version."""
        self.version = version
        self.graphs.forget()
        self.policy.set_progress(min(version / self.optimizer.updates, 1.0))

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

    # ---- log-probs

    def _logprobs(self, policy: Policy, part: Columns, task_descriptions: Sequence[str]) -> tuple[Tensor, EvalOutput]:
        """Return the log-probs of chunks under a policy at the level of the loss, and all that the policy evaluated."""
        inputs = self._inputs(part, task_descriptions)
        with self._computing:
            evaluated = policy.evaluate(inputs, part["trace"])
        return logprobs_at_level(self.algorithm.logprob_level, evaluated.logprobs, part["executed"]), evaluated

    def _inputs(self, part: Columns, task_descriptions: Sequence[str]) -> Inputs:
        """Return the policy's inputs, preprocessed now unless they were for the whole batch."""
        inputs: Inputs | None = part.get("inputs")
        return self._preprocess(observation_from(part, task_descriptions)) if inputs is None else inputs

    @torch.no_grad()
    def _score(
        self, policy: Policy, parts: Iterable[tuple[Columns, bool]], columns: Columns, task_descriptions: Sequence[str]
    ) -> Tensor:
        """Return the log-probs of the batch's chunks under a policy, at the level of the loss.

        Args:
            policy: the one that scores.
            parts: of the numbered batch, see `_micro_batches`; every chunk once.
            columns: the batch.
            task_descriptions: see `update`.
        """
        found = torch.zeros_like(columns["old_logprobs"])
        for part, counts in parts:
            logprobs, _ = self._logprobs(policy, part, task_descriptions)
            if counts:
                found[part["number"]] = logprobs
        # Every rank has filled the rows of its own parts and left 0 in the others.
        return self.ranks.sum(found)

    def _score_as_learned(self, columns: Columns, task_descriptions: Sequence[str], drawn: Drawn) -> Tensor:
        """Return the log-probs under the policy that the update starts from, computed in the micro-batches of the first
        epoch. A forward pass rounds differently with another batch size; in the same one the ratio is exactly 1."""
        minibatches = self._minibatches(numbered(columns), drawn)
        parts = (part for minibatch, _ in minibatches for part in self._micro_batches(minibatch, self._whole_episodes))
        return self._score(self.policy, parts, columns, task_descriptions)

    def _is_new(self, part: Columns, like: Tensor) -> Tensor:
        """Return a mask of the chunks that this version of the policy chose; bool, with as many dimensions as
        `like`."""
        is_new: Tensor = part["version"] == self.version
        return is_new.view(-1, *[1] * (like.dim() - 1))

    # ---- learning from a replay

    @property
    def observers(self) -> dict[SoftPolicy | Onlooker, RunningNormalizer]:
        """The policy, and what the critics see with: those of them that scale what they see, and what scales it."""
        found = self.policy, None if self.soft is None else self.soft.onlooker
        there = [each for each in found if isinstance(each, SoftPolicy | Onlooker)]
        return {each: each.scaling for each in there if each.scaling is not None}

    @property
    def _sees_rollouts(self) -> bool:
        """Whether the policy's statistics come by `add_to_statistics`; others see what they imitate."""
        return isinstance(self.policy, SoftPolicy)

    def add_to_statistics(self, seen: Tensor, of: SoftPolicy | Onlooker) -> float:
        """Add what has been seen to the statistics of one of `observers`.

        They continue as long as rollouts do, as those of on-policy algorithms: what begins with random actions later
        sees what lies ten deviations away from all of it, where numbers are clipped and can no longer be
        distinguished.

        Args:
            seen: the column `scaled` of this rank's observations, `[M, ...]`.
            of: whose.

        Returns:
            The share of its numbers that were clipped by the statistics before; 0 if there were none.
        """
        scaling = self.observers[of]
        everyone = torch.cat(self.ranks.gather_rows(seen)).to(self.device)
        if not len(everyone):  # a rollout whose simulators all died; a mean of nothing would be NaN
            return 0.0
        clipped = float(scaling.clipped(everyone)) if scaling.count else 0.0
        of.update_statistics({of.scaled: everyone})
        return clipped

    def improve(self, minibatches: Iterable[Minibatch], task_descriptions: Sequence[str] = ()) -> dict[str, float]:
        """Learn from an iteration's minibatches of a replay, see `CriticLearner.learn`; returns metrics, each the mean
        over the optimiser steps."""
        assert self.soft is not None, "the config rules ask for it"
        with self.train_mode(), self.clock.measure(Phase.train):
            pulled = self.clock.pulling(Phase.preprocess, minibatches)
            metrics = self.soft.learn(pulled, self.version, task_descriptions)
        return metrics | self._end_update(self.optimizer.rate)

    # ---- learning from demonstrations

    def sft_step(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Learn from demonstrations, one optimiser step per minibatch.

        Returns:
            Metrics, each the mean over the optimiser steps.
        """
        rate = self._imitator.set_learning_rate(self.version)
        return self._imitate(batches, statistics=True) | self._end_update(rate)

    def imitate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Learn from demonstrations before the run's first update: `sft_step` that counts as no update, and leaves the
        policy's statistics as they are."""
        self._imitator.set_learning_rate(self.version)
        return self._imitate(batches, statistics=False)

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Forget after a block all that the policy has learned in it from demonstrations."""
        kept = copy.deepcopy((self.policy.state_dict(), self._imitator.state_dict()))
        noise, skipped = self._streams.imitation.get_state(), self.guard.skipped
        try:
            yield
        finally:
            self.policy.load_state_dict(kept[0])
            self._imitator.load_state_dict(kept[1])
            self._streams.imitation.set_state(noise)
            self.guard.skipped = skipped

    def imitation_errors(self, batches: Iterable[Batch]) -> tuple[float, float]:
        """Return how far the most likely actions of a `SoftPolicy` are from demonstrated ones, and how far the mean of
        these is: mean squared distances, in units of half the action range."""
        assert isinstance(self.policy, SoftPolicy), "the config rules ask for it"
        errors, wanted = [], []
        with self.rollout_mode(), torch.inference_mode():
            for batch in batches:
                inputs = self._preprocess(PolicyObservation.of(batch.observation))
                wanted.append(self.policy.to_unit(torch.from_numpy(batch.actions).to(self.device)).clamp(-1.0, 1.0))
                with self._computing:
                    chosen = self.policy.mode(self.policy.encode(inputs))
                errors.append((chosen.float() - wanted[-1]).square())
        shown = torch.cat(wanted)
        return float(torch.cat(errors).mean()), float((shown - shown.mean(0)).square().mean())

    def _imitate(self, batches: Iterable[Batch], *, statistics: bool) -> dict[str, float]:
        """Make an optimiser step per minibatch of demonstrations; returns the means of metrics.

        Args:
            batches: the minibatches.
            statistics: update those of a policy that else sees rollouts.
        """
        history: list[Metrics] = []
        with self.train_mode(), self.clock.measure(Phase.train):
            for batch in self.clock.pulling(Phase.preprocess, batches):
                inputs = self._preprocess(PolicyObservation.of(batch.observation))
                if statistics or not self._sees_rollouts:
                    self.policy.update_statistics(inputs)
                wanted = torch.from_numpy(batch.actions).to(self.device)
                inputs = inputs | {ACTION_WEIGHTS: torch.from_numpy(action_weights(batch)).to(self.device)}
                loss = self._sft_backward(inputs, wanted)
                grad_norm = self.optimizer_step(loss, {"inputs": inputs, "actions": wanted}, self._imitator)
                if grad_norm is not None:
                    history.append({"loss": loss, "grad_norm": grad_norm})
        self._imitator.clear()
        return mean_metrics(history)

    def imitate_labels(self, minibatches: Iterable[Minibatch], task_descriptions: Sequence[str]) -> dict[str, float]:
        """Learn from what an expert would have done, one optimiser step per minibatch. Decisions for which that is not
        known do not count.

        Args:
            minibatches: the same ones on all ranks, each with its own decisions of them.
            task_descriptions: those that the column `task_index` refers to.

        Returns:
            Metrics, each the mean over the optimiser steps.
        """
        rate = self.optimizer.set_learning_rate(self.version)
        history: list[Metrics] = []
        with self.train_mode(), self.clock.measure(Phase.train):
            for minibatch in self.clock.pulling(Phase.preprocess, minibatches):
                loss, grad_norm = self._imitate_decisions(minibatch, minibatch.columns["labelled"], task_descriptions)
                if grad_norm is not None:
                    history.append({"loss": loss, "grad_norm": grad_norm})
        return mean_metrics(history) | self._end_update(rate)

    def _imitate_weighted(
        self, minibatch: Minibatch, wanted: Tensor, weights: Tensor, task_descriptions: Sequence[str]
    ) -> Tensor | None:
        """Make an optimiser step towards chunks, each as far as it weighs; see `implicit.Imitate`."""
        columns = minibatch.columns | {"labels": wanted, SAMPLE_WEIGHTS: weights}
        every = torch.ones(len(weights), dtype=torch.bool)
        loss, grad_norm = self._imitate_decisions(replace(minibatch, columns=columns), every, task_descriptions)
        return None if grad_norm is None else loss

    def _imitate_decisions(
        self, minibatch: Minibatch, chosen: Tensor, task_descriptions: Sequence[str]
    ) -> tuple[Tensor, Tensor | None]:
        """Make an optimiser step towards the `labels` of decisions; returns the loss, a mean over those that are chosen
        on all ranks, and the norm of its gradients, None if the step was not finite and left out.

        Args:
            minibatch: with the column `labels`, and `sample_weights` if they weigh differently.
            chosen: bool `[M]`, on the CPU.
            task_descriptions: see `imitate_labels`.
        """
        count, any_here = int(self.ranks.sum(chosen.sum())), bool(chosen.any())
        draws = self.policy.imitation_draws(minibatch.size, self._streams.imitation)
        # A rank without a row makes a backward pass, too, of weight 0, so that all have the same gradients.
        own = torch.nonzero(chosen).squeeze(1) if any_here else torch.zeros(1, dtype=torch.int64)
        columns = rows(minibatch.columns if len(chosen) else _one_row(minibatch.columns), own)
        places = minibatch.places[own] if len(chosen) else own
        columns = to_columns(columns, self.device, ON_HOST | self.policy.reads_on_host)
        wanted = columns["labels"]
        inputs = self._preprocess(observation_from(columns, task_descriptions))
        if self.policy.keeps_statistics and not self._sees_rollouts:
            everyone = {name: torch.cat(self.ranks.gather_rows(column)) for name, column in inputs.items()}
            self.policy.update_statistics({name: column.to(self.device) for name, column in everyone.items()})
        inputs = inputs | {ACTION_WEIGHTS: torch.ones(wanted.shape[:2], device=self.device)}
        if SAMPLE_WEIGHTS in columns:
            inputs[SAMPLE_WEIGHTS] = columns[SAMPLE_WEIGHTS]
        drawn = {name: column[places.to(self.device)] for name, column in draws.items()}
        dealt = self._parts(len(own), self._micro_batch_size or len(own))
        parts = [(part, any_here * (part.stop - part.start) / max(count, 1)) for part in dealt]
        loss = self._imitation_backward(inputs, wanted, drawn, parts)
        return loss, self.optimizer_step(loss, {"inputs": inputs, "actions": wanted})

    @staticmethod
    def _parts(count: int, size: int) -> list[slice]:
        """Return the rows of each micro-batch of `count` rows."""
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def _sft_backward(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """Make the forward and backward passes of a minibatch of demonstrations that all ranks have; see
        `_imitation_backward`."""
        count = len(actions)
        # Drawn for the whole minibatch at once, so that the size of micro-batches changes no number.
        draws = self.policy.imitation_draws(count, self._streams.imitation)
        dealt = self.ranks.scatter(self._parts(count, self.ranks.part_size(count, self._micro_batch_size)))
        parts = [(part, counts * (part.stop - part.start) / count) for part, counts in dealt]
        return self._imitation_backward(inputs, actions, draws, parts)

    def _imitation_backward(
        self, inputs: Inputs, actions: Tensor, draws: Inputs, parts: Iterable[tuple[slice, float]]
    ) -> Tensor:
        """Make the forward and backward passes of what is imitated, one micro-batch at a time; returns the loss of the
        minibatch, a mean over samples, and leaves its gradients on the parameters.

        Args:
            inputs, actions, draws: see `Policy.sft_loss`.
            parts: rows of each micro-batch of this rank, and their share of the minibatch; 0: they do not count.
        """
        self._imitator.clear()
        total = torch.zeros((), device=self.device)
        for part, share in parts:
            with self._computing:
                seen, drawn = ({name: column[part] for name, column in of.items()} for of in (inputs, draws))
                loss = self.policy.sft_loss(seen, actions[part], drawn)
            # The policy returns a mean over the part; the last part may be smaller and counts for less.
            loss = loss.float() * share
            (loss * self.weights.factor).backward()
            total += loss.detach()
        self.weights.sum_gradients(self._imitator.parameters)
        return self.ranks.sum(total)

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
            "streams": self._streams.state_dict(),
            "version": self.version,
            "skipped": self.guard.skipped,
            **({} if self.soft is None else {"soft": self.soft.state_dict()}),
            **({} if self._imitator is self.optimizer else {"imitator": self._imitator_state()}),
        }

    def _imitator_state(self) -> dict[str, Any]:
        """Return the state of what has learned from demonstrations; empty when the run does other things now."""
        return {} if self.version else self._imitator.state_dict()

    def noise_state(self) -> dict[str, Any]:
        """Return the state of `noise`; see `Streams`."""
        return self._streams.noise_state()

    def load_noise(self, state: Mapping[str, Any]) -> None:
        """Continue from the joint `noise_state` of all processes that decide; see `Streams`. The version must be known
        already."""
        self._streams.load_noise(state, self.version)

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Continue from `state_dict`; returns a warning if that cannot be exact, see `Streams.load_state_dict`."""
        with self.offload.optimizer_here():
            self.optimizer.load_state_dict(state["optimizer"])
        warning = self._streams.load_state_dict(state["streams"], state["version"])
        self.set_version(state["version"])
        self.guard.skipped = state["skipped"]
        if self.soft is not None:
            self.soft.load_state_dict(state["soft"])
        if state.get("imitator"):
            self._imitator.load_state_dict(state["imitator"])
        if self.reference is not None:
            with self.offload.reference_here():
                self.reference.load_state_dict(state["reference"])
        self.offload.put_away()
        return warning


def _one_row(columns: Columns) -> Columns:
    """Return columns of one row of zeros that look like these."""
    return {name: column.new_zeros(1, *column.shape[1:]) for name, column in columns.items()}


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
