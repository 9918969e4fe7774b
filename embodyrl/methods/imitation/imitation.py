"""Imitation: steps along a policy's own supervised loss, towards demonstrated actions or an expert's labels.

Shapes: `M` samples of a minibatch, `C` actions of a chunk, `D` action dims.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.data.layout import Batch
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.minibatch import Columns, observation_from, rows, to_columns
from embodyrl.engine.optimizer import Optimizer
from embodyrl.engine.update_metrics import Metrics, mean_metrics
from embodyrl.models.policy import ACTION_WEIGHTS, SAMPLE_WEIGHTS, Inputs, PolicyObservation, SoftPolicy
from embodyrl.rollout.replay import Minibatch
from embodyrl.tracking.clock import Phase


def action_weights(batch: Batch) -> NDArray[np.float32]:
    """Return the weights `[M, C]` of demonstrated actions: 0 for repeated ones, and a mean of 1 over the minibatch."""
    if batch.repeated is None:
        return np.ones(batch.actions.shape[:2], np.float32)
    counts = ~batch.repeated
    weights: NDArray[np.float32] = np.divide(counts, counts.mean(), dtype=np.float32)
    return weights


class Imitation:
    """Makes optimiser steps of a policy along its supervised loss.

    Args:
        engine: holds the policy.
        optimizer: steps all that imitates; None: the engine's.
    """

    def __init__(self, engine: HybridEngine, optimizer: Optimizer | None = None) -> None:
        self.engine, self.policy = engine, engine.policy
        self.optimizer = engine.optimizer if optimizer is None else optimizer
        self._sees_rollouts = isinstance(self.policy, SoftPolicy)
        """Whether the policy's statistics are those of rollouts; others see what they imitate."""

    def learn(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Learn from demonstrations, one optimiser step per minibatch.

        Returns:
            Metrics, each the mean over the optimiser steps.
        """
        rate = self.optimizer.set_learning_rate(self.engine.version)
        return self._imitate(batches, statistics=True) | self.engine.end_update(rate)

    def learn_first(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Learn from demonstrations before the run's first update: `learn` that counts as no update, and leaves the
        policy's statistics as they are."""
        self.optimizer.set_learning_rate(self.engine.version)
        return self._imitate(batches, statistics=False)

    @contextmanager
    def rolled_back(self) -> Iterator[None]:
        """Restore at the end of a block the policy that it began with."""
        kept = copy.deepcopy((self.policy.state_dict(), self.optimizer.state_dict()))
        noise, skipped = self.engine.streams.imitation.get_state(), self.engine.guard.skipped
        try:
            yield
        finally:
            self.policy.load_state_dict(kept[0])
            self.optimizer.load_state_dict(kept[1])
            self.engine.streams.imitation.set_state(noise)
            self.engine.guard.skipped = skipped

    def errors(self, batches: Iterable[Batch]) -> tuple[float, float]:
        """Return how far the most likely actions of a `SoftPolicy` are from demonstrated ones, and how far the mean of
        these is: mean squared distances, in units of half the action range."""
        assert isinstance(self.policy, SoftPolicy), "the config rules ask for it"
        errors, wanted = [], []
        with self.engine.rollout_mode(), torch.inference_mode():
            for batch in batches:
                inputs = self.engine.prepare(PolicyObservation.of(batch.observation))
                wanted.append(
                    self.policy.to_unit(torch.from_numpy(batch.actions).to(self.engine.device)).clamp(-1.0, 1.0)
                )
                with self.engine.computing:
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
        if statistics and self.policy.scaling is not None:
            self.policy.scaling.begin_demonstrations()
        with self.engine.train_mode(), self.engine.clock.measure(Phase.train):
            for batch in self.engine.clock.pulling(Phase.preprocess, batches):
                inputs = self.engine.prepare(PolicyObservation.of(batch.observation))
                if statistics or not self._sees_rollouts:
                    self.policy.update_statistics(inputs)
                wanted = torch.from_numpy(batch.actions).to(self.engine.device)
                inputs = inputs | {ACTION_WEIGHTS: torch.from_numpy(action_weights(batch)).to(self.engine.device)}
                loss = self._sft_backward(inputs, wanted)
                grad_norm = self.engine.optimizer_step(loss, {"inputs": inputs, "actions": wanted}, self.optimizer)
                if grad_norm is not None:
                    history.append({"loss": loss, "grad_norm": grad_norm})
        self.optimizer.clear()
        return mean_metrics(history)

    def learn_labels(self, minibatches: Iterable[Minibatch], task_descriptions: Sequence[str]) -> dict[str, float]:
        """Learn from what an expert would have done, one optimiser step per minibatch. Decisions for which that is not
        known do not count.

        Args:
            minibatches: the same ones on all ranks, each with its own decisions of them.
            task_descriptions: those that the column `task_index` refers to.

        Returns:
            Metrics, each the mean over the optimiser steps.
        """
        rate = self.optimizer.set_learning_rate(self.engine.version)
        history: list[Metrics] = []
        with self.engine.train_mode(), self.engine.clock.measure(Phase.train):
            for minibatch in self.engine.clock.pulling(Phase.preprocess, minibatches):
                loss, grad_norm = self._imitate_decisions(minibatch, minibatch.columns["labelled"], task_descriptions)
                if grad_norm is not None:
                    history.append({"loss": loss, "grad_norm": grad_norm})
        return mean_metrics(history) | self.engine.end_update(rate)

    def step_towards(
        self, minibatch: Minibatch, wanted: Tensor, task_descriptions: Sequence[str], weights: Tensor | None = None
    ) -> Tensor | None:
        """Make an optimiser step towards chunks, each as far as it weighs; None: all alike."""
        columns = minibatch.columns | {"labels": wanted} | ({} if weights is None else {SAMPLE_WEIGHTS: weights})
        every = torch.ones(len(wanted), dtype=torch.bool)
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
            task_descriptions: see `learn_labels`.
        """
        count, any_here = int(self.engine.ranks.sum(chosen.sum())), bool(chosen.any())
        draws = self.policy.imitation_draws(minibatch.size, self.engine.streams.imitation)
        # A rank without a row makes a backward pass, too, of weight 0, so that all have the same gradients.
        own = torch.nonzero(chosen).squeeze(1) if any_here else torch.zeros(1, dtype=torch.int64)
        columns = rows(minibatch.columns if len(chosen) else _one_row(minibatch.columns), own)
        places = minibatch.places[own] if len(chosen) else own
        columns = to_columns(columns, self.engine.device, self.engine.on_host)
        wanted = columns["labels"]
        inputs = self.engine.prepare(observation_from(columns, task_descriptions))
        if self.policy.keeps_statistics and not self._sees_rollouts:
            everyone = {name: torch.cat(self.engine.ranks.gather_rows(column)) for name, column in inputs.items()}
            self.policy.update_statistics({name: column.to(self.engine.device) for name, column in everyone.items()})
        inputs = inputs | {ACTION_WEIGHTS: torch.ones(wanted.shape[:2], device=self.engine.device)}
        if SAMPLE_WEIGHTS in columns:
            inputs[SAMPLE_WEIGHTS] = columns[SAMPLE_WEIGHTS]
        inputs = self._weighted(inputs, wanted, everywhere=False, any_here=any_here)
        drawn = {name: column[places.to(self.engine.device)] for name, column in draws.items()}
        dealt = self._parts(len(own), self.engine.micro_batches.size or len(own))
        parts = [(part, any_here * (part.stop - part.start) / max(count, 1)) for part in dealt]
        loss = self._imitation_backward(inputs, wanted, drawn, parts)
        return loss, self.engine.optimizer_step(loss, {"inputs": inputs, "actions": wanted})

    @staticmethod
    def _parts(count: int, size: int) -> list[slice]:
        """Return the rows of each micro-batch of `count` rows."""
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def _weighted(self, inputs: Inputs, actions: Tensor, *, everywhere: bool, any_here: bool = True) -> Inputs:
        """Return the inputs of a minibatch with what `Policy.sample_sizes` says in the weights of its samples.

        Args:
            inputs, actions: see `Policy.sft_loss`.
            everywhere: whether every rank has all samples; if not, each has its own.
            any_here: whether those of this rank count.
        """
        sizes = self.policy.sample_sizes(inputs, actions)
        if sizes is None:
            return inputs
        total = torch.stack([sizes.sum(), torch.ones_like(sizes).sum()]) * any_here
        total = total if everywhere else self.engine.ranks.sum(total).clamp(min=1.0)
        given = inputs.get(SAMPLE_WEIGHTS, torch.ones_like(sizes))
        return inputs | {SAMPLE_WEIGHTS: given * sizes * total[1] / total[0]}

    def _sft_backward(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """Make the forward and backward passes of a minibatch of demonstrations that all ranks have; see
        `_imitation_backward`."""
        count, inputs = len(actions), self._weighted(inputs, actions, everywhere=True)
        # Drawn for the whole minibatch at once, so that the size of micro-batches changes no number.
        draws = self.policy.imitation_draws(count, self.engine.streams.imitation)
        dealt = self.engine.ranks.scatter(
            self._parts(count, self.engine.ranks.part_size(count, self.engine.micro_batches.size))
        )
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
        self.optimizer.clear()
        total = torch.zeros((), device=self.engine.device)
        for part, share in parts:
            with self.engine.computing:
                seen, drawn = ({name: column[part] for name, column in of.items()} for of in (inputs, draws))
                loss = self.policy.sft_loss(seen, actions[part], drawn)
            # The policy returns a mean over the part; the last part may be smaller and counts for less.
            loss = loss.float() * share
            (loss * self.engine.weights.factor).backward()
            total += loss.detach()
        self.engine.weights.sum_gradients(self.optimizer.parameters)
        return self.engine.ranks.sum(total)


def _one_row(columns: Columns) -> Columns:
    """Return columns of one row of zeros that look like these."""
    return {name: column.new_zeros(1, *column.shape[1:]) for name, column in columns.items()}
