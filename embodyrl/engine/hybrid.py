"""HybridEngine: one set of weights that rolls out and trains."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from embodyrl.algorithms.aggregation import masked_mean
from embodyrl.algorithms.call import asks_for, call_with
from embodyrl.algorithms.levels import entries_at
from embodyrl.algorithms.losses import LossOutput, kl_divergence, log_ratio, proximal_logprobs, value_loss
from embodyrl.config.schema import AlgorithmConfig, Device, EngineConfig, LearningRate, OptimizerConfig, Proximal
from embodyrl.engine.modes import Mode, Modes
from embodyrl.engine.offload import EngineOffload
from embodyrl.engine.parallel import ALONE, Ranks
from embodyrl.engine.sharding import norm_of, place_moments, spread, whole
from embodyrl.engine.streams import Streams
from embodyrl.envs import Observation
from embodyrl.errors import RunError, UserError
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Policy
from embodyrl.tracking.clock import Clock, Phase

SETTINGS_FOR_LOSSES = ("clip_low", "clip_high", "dual_clip", "behaviour_cap", "behaviour_excess", "drift_coef")

Columns = dict[str, Any]
"""A batch by column: tensors `[M, ...]`, and `trace`, a table of its own."""


@dataclass(kw_only=True)
class Total:
    """What an optimiser step descends."""

    loss: Tensor
    """Scalar."""
    metrics: dict[str, Tensor]
    """Detached scalars."""


class NumericsError(RunError):
    """Raised when a loss or a gradient is not a finite number."""


def choose_device(device: Device) -> torch.device:
    """The torch device that `engine.device` stands for.

    Raises:
        UserError: CUDA is asked for and there is none.
    """
    if device is Device.cuda and not torch.cuda.is_available():
        raise UserError("engine.device is cuda, but torch finds no CUDA device here: set engine.device=auto or cpu")
    if device is Device.auto:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device.value)


def observation_from(columns: Columns, sentences: Sequence[str]) -> Observation:
    """The observations in a batch's columns `[M]`, as `Policy.preprocess` takes them."""
    return Observation(
        images=columns.get("images"),
        proprio=columns.get("proprio"),
        tasks=[sentences[index] for index in columns["task"].tolist()],
    )


class HybridEngine:
    """Owns the policy, its optimiser, and the random streams of acting and learning.

    The policy computes as in evaluation in both modes: dropout would make an update's log-probs others than the
    rollout's. Noise comes from generators of the engine's own, so that changing the mode changes no number.

    Args:
        policy: moved to the engine's device.
        config: device, threads, optimiser.
        algorithm: epochs, minibatches, loss weights.
        loss: policy loss from the registry.
        iterations: length of the run, for the learning-rate schedule.
        seed: the run's seed.
        ranks: those of the run; each has an engine for its share of slots and minibatches.
        folder: on a disk, for what `engine.offload` takes off the CPU; None: where temporary files go.
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
        folder: Path | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.device = choose_device(config.device)
        torch.set_num_threads(1 if config.threads == "auto" else int(config.threads))
        self.policy = policy.to(self.device).eval()
        self.clock = Clock(torch.cuda.synchronize if self.device.type == "cuda" else None)
        """Where the time goes of the thread that made the engine."""
        self.modes = Modes(self.clock)
        self.algorithm = algorithm
        self.loss = loss
        self.reference = frozen_copy(self.policy) if algorithm.kl_coef > 0.0 else None
        """The policy as it was when the run began; only where the loss holds the policy near it."""
        self.ranks = ranks
        self.weights = spread(self.policy, ranks, config.parallel.backend, self.device)
        """How the policy's weights are spread over ranks."""
        self.modes.around[Mode.rollout].append(self.weights.gathered)
        self.version = 0
        """Updates so far; every chunk is labelled with the version that produced it."""
        self._optimizer_config = config.optimizer
        self._iterations = iterations
        self._optimizer = build_optimizer(policy, config.optimizer)
        self.offload = EngineOffload(
            config.offload,
            policy=policy,
            optimizer=self._optimizer,
            reference=self.reference,
            device=self.device,
            folder=Path(tempfile.gettempdir()) if folder is None else folder,
            clock=self.clock,
        )
        self.modes.around[Mode.train].append(self.offload.optimizer_here)
        self._streams = Streams(seed, self.device, ranks)

    def rollout_mode(self) -> AbstractContextManager[None]:
        """Have the weights ready to decide for the length of a block; `act` alone enters and leaves it each time."""
        return self.modes.enter(Mode.rollout)

    def train_mode(self) -> AbstractContextManager[None]:
        """Have weights and optimiser ready to learn for the length of a block."""
        return self.modes.enter(Mode.train)

    def whole_policy(self) -> Policy | None:
        """The policy with all of its weights, to be saved; on the first rank alone. All ranks must ask."""
        return self.weights.whole_policy()

    def act(self, observation: Observation, mode: Literal["train", "eval"]) -> ActOutput:
        """Decide for each slot; see `Policy.act`."""
        with self.rollout_mode(), self.clock.measure(Phase.infer), torch.inference_mode():
            return self.policy.act(self._preprocess(self.policy, observation), mode, self._streams.actions)

    def _preprocess(self, policy: Policy, observation: Observation) -> Inputs:
        with self.clock.measure(Phase.preprocess):
            return policy.preprocess(observation)

    def update(self, batch: TensorDictBase, sentences: Sequence[str]) -> dict[str, float]:
        """Learn from a batch, `epochs` times over in shuffled minibatches.

        Args:
            batch: `[M]` decisions: observation columns, `task`, `trace`, `version`, `sequence` (number of the episode
                that each belongs to), `executed` `[M, C]`, and with a critic `returns` and `old_values`. At the
                level of `algorithm.logprob_level` (see `algorithms.levels`): `old_logprobs`, `advantages`, `valid`
                (what counts), `weights` (see `algorithms.aggregation`).
            sentences: task sentences that the column `task` indexes.

        Returns:
            Metrics, each the mean over the optimiser steps taken.
        """
        with self.train_mode(), self.clock.measure(Phase.train):
            return self._update(dict(batch.to(self.device).items()), sentences)

    def _update(self, columns: Columns, sentences: Sequence[str]) -> dict[str, float]:
        self._set_learning_rate()
        if self.reference is not None:
            with self.offload.reference_here():
                columns["reference_logprobs"] = self._score(self.reference, columns, sentences)
        if asks_for(self.loss, "proximal_logprobs") and self.algorithm.proximal is Proximal.recompute:
            columns["proximal_logprobs"] = self._score(self.policy, columns, sentences)
        history: list[dict[str, Tensor]] = []
        passes = 0
        for _ in range(self.algorithm.epochs):
            if not self._one_pass(columns, sentences, history):
                break
            passes += 1
        self._set_version(self.version + 1)
        if self.policy.keeps_statistics:
            self.policy.update_statistics(self._preprocess(self.policy, observation_from(columns, sentences)))
        return mean_metrics(history) | {
            "train/passes": float(passes),
            "train/learning_rate": self._optimizer.param_groups[0]["lr"],
        }

    def imitate(self, batches: Iterable[tuple[Observation, NDArray[np.float32]]]) -> dict[str, float]:
        """Learn from demonstrations, one optimiser step per minibatch.

        Args:
            batches: observations of `M` samples, and what was done then: `[M, C, D]` in the simulator's units.

        Returns:
            Metrics, each the mean over the optimiser steps.
        """
        self._set_learning_rate()
        history: list[dict[str, Tensor]] = []
        with self.train_mode(), self.clock.measure(Phase.train):
            for observation, actions in self.clock.pulling(Phase.preprocess, batches):
                inputs = self._preprocess(self.policy, observation)
                self.policy.update_statistics(inputs)
                wanted = torch.from_numpy(actions).to(self.device)
                loss = self.policy.sft_loss(inputs, wanted, self._streams.imitation)
                history.append({"loss": loss.detach(), "grad_norm": self._descend(loss)})
        self._set_version(self.version + 1)
        return mean_metrics(history) | {"train/learning_rate": self._optimizer.param_groups[0]["lr"]}

    def _set_version(self, version: int) -> None:
        self.version = version
        self.policy.set_progress(min(version / self._iterations, 1.0))

    def _one_pass(self, columns: Columns, sentences: Sequence[str], history: list[dict[str, Tensor]]) -> bool:
        """One epoch; False if the policy moved so far from the rollout's that it ended early."""
        for index, share in self._minibatches(columns):
            total = self._loss({name: column[index] for name, column in columns.items()}, sentences, share)
            history.append(total.metrics)
            target = self.algorithm.target_kl
            if target is not None and float(total.metrics["approx_kl"]) > target:
                return False
            total.metrics["grad_norm"] = self._descend(total.loss)
        return True

    def _minibatches(self, columns: Columns) -> Iterator[tuple[Tensor, float]]:
        """Numbers of the decisions of each minibatch, and the minibatch's share of the batch.

        Drawn decision by decision, or episode by episode for a loss that compares whole ones.
        """
        unit = torch.arange(len(columns["task"]), device=self.device)
        if asks_for(self.loss, "sequence"):
            unit = torch.unique(columns["sequence"], return_inverse=True)[1]
        count = int(unit.max()) + 1
        order = torch.randperm(count, generator=self._streams.shuffling).to(self.device)
        for chosen in order.tensor_split(min(self.algorithm.minibatches, count)):
            index = chosen if count == len(unit) else torch.nonzero(torch.isin(unit, chosen)).squeeze(1)
            yield index, len(chosen) / count

    @torch.no_grad()
    def _score(self, policy: Policy, columns: Columns, sentences: Sequence[str]) -> Tensor:
        """Log-probs of the batch's decisions under a policy, at the level of the loss; a minibatch at a time."""
        pieces = []
        for index in torch.arange(len(columns["task"])).tensor_split(self.algorithm.minibatches):
            piece = {name: column[index] for name, column in columns.items()}
            pieces.append(self._logprobs(policy, piece, sentences)[0])
        return torch.cat(pieces)

    def _logprobs(self, policy: Policy, piece: Columns, sentences: Sequence[str]) -> tuple[Tensor, EvalOutput]:
        """Log-probs of decisions under a policy at the level of the loss, and what else it says about them."""
        inputs = self._preprocess(policy, observation_from(piece, sentences))
        evaluated = policy.evaluate(inputs, dict(piece["trace"].items()))
        return entries_at(self.algorithm.logprob_level, evaluated.logprobs, piece["executed"]), evaluated

    def _loss(self, minibatch: Columns, sentences: Sequence[str], share: float) -> Total:
        """Policy loss + KL penalty - entropy bonus + value loss of one minibatch.

        Args:
            minibatch: the batch's columns, of some decisions.
            sentences: see `update`.
            share: of the batch; the weights of entries are such that the sum over the whole batch is the loss.
        """
        settings, valid = self.algorithm, minibatch["valid"]
        logprobs, evaluated = self._logprobs(self.policy, minibatch, sentences)
        output = self._policy_loss(logprobs, minibatch)
        entropy = entries_at(settings.logprob_level, evaluated.entropy, minibatch["executed"])
        difference = log_ratio(logprobs.detach(), minibatch["old_logprobs"])
        logged = output.metrics | {
            "policy_loss": output.losses.detach(),
            "entropy": entropy.detach(),
            "approx_kl": difference.exp() - 1.0 - difference,
        }
        losses = output.losses
        if settings.entropy_coef > 0.0:
            losses = losses - settings.entropy_coef * entropy
        if self.reference is not None:
            divergence = kl_divergence(logprobs, minibatch["reference_logprobs"], settings.kl_estimator)
            logged["reference_kl"] = divergence.detach()
            losses = losses + settings.kl_coef * divergence
        metrics = {name: masked_mean(column, valid) for name, column in logged.items()}
        total = Total(loss=(minibatch["weights"] * losses).sum() / share, metrics=metrics)
        if settings.value_coef > 0.0:
            error = self._value_loss(evaluated.values, minibatch)
            metrics["value_loss"] = error.detach()
            total.loss = total.loss + settings.value_coef * error
        return total

    def _policy_loss(self, logprobs: Tensor, minibatch: Columns) -> LossOutput:
        """The registered loss, with the columns and settings that it names."""
        settings = self.algorithm
        available: dict[str, Any] = {name: getattr(settings, name) for name in SETTINGS_FOR_LOSSES}
        available |= minibatch | {"logprobs": logprobs}
        if asks_for(self.loss, "proximal_logprobs") and "proximal_logprobs" not in minibatch:
            available["proximal_logprobs"] = proximal_logprobs(
                logprobs, minibatch["old_logprobs"], minibatch["version"], self.version + 1, settings.proximal
            )
        return call_with(self.loss, available)

    def _value_loss(self, values: Tensor | None, minibatch: Columns) -> Tensor:
        """Mean over decisions, each counting once."""
        assert values is not None, "the config rules ask for a critic"
        settings = self.algorithm
        return value_loss(
            values,
            minibatch["old_values"],
            minibatch["returns"],
            clip=settings.value_clip,
            huber=settings.value_huber,
        ).mean()

    def _descend(self, loss: Tensor) -> Tensor:
        """One optimiser step; returns the gradient norm before clipping."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = norm_of(torch.nn.utils.clip_grad_norm_(self._trainable(), self._optimizer_config.max_grad_norm))
        if not torch.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {float(norm)} in update {self.version + 1} (loss {float(loss.detach())}); "
                "weights were left as they were. Lower engine.optimizer.lr, or look at the rewards and observations"
            )
        self._optimizer.step()
        return norm.detach()

    def _trainable(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _set_learning_rate(self) -> None:
        config = self._optimizer_config
        done = min(self.version / self._iterations, 1.0)
        share = {
            LearningRate.constant: 1.0,
            LearningRate.linear: 1.0 - done,
            LearningRate.cosine: 0.5 * (1.0 + math.cos(math.pi * done)),
        }
        for group in self._optimizer.param_groups:
            group["lr"] = config.lr * share[config.schedule]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights: optimiser, random streams, version; and the weights of the reference policy,
        which the run cannot make again once it has learned."""
        reference = {} if self.reference is None else {"reference": self.reference.state_dict()}
        return reference | {
            "optimizer": whole(self._optimizer.state_dict(), keep=self.ranks.is_first),
            "streams": self._streams.state_dict(),
            "version": self.version,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._optimizer.load_state_dict(place_moments(state["optimizer"], self._optimizer))
        self._streams.load_state_dict(state["streams"], state["version"])
        self._set_version(state["version"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        self.offload.put_away()


def frozen_copy(policy: Policy) -> Policy:
    """The same policy, which never changes again."""
    return copy.deepcopy(policy).requires_grad_(False)


def mean_metrics(history: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Mean of each metric over the rows that have it, under `train/`."""
    names = dict.fromkeys(name for row in history for name in row)
    return {f"train/{name}": float(torch.stack([row[name] for row in history if name in row]).mean()) for name in names}


def build_optimizer(policy: Policy, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that require gradients."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    beta1, beta2 = config.betas
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=(beta1, beta2), eps=config.eps, weight_decay=config.weight_decay, fused=True
    )
