"""On-policy learning: PPO, GRPO and their kin learn from their newest rollout, a few epochs long.

An iteration is `stages.py`: rollout, reward, advantage, and the update below, which follows the papers line by line.

Shapes: `M` chunks of a minibatch, `C` actions of a chunk.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from embodyrl.algorithms.columns import Bound, logprobs_at_level
from embodyrl.algorithms.losses import LossOutput, kl_divergence, log_ratio, require_entries, value_loss
from embodyrl.algorithms.options import EncodingRewardConfig
from embodyrl.algorithms.variants import proximal_logprobs
from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.minibatch import (
    Columns,
    Drawn,
    draw_minibatches,
    length,
    observation_from,
    rows,
    to_columns,
)
from embodyrl.engine.update_metrics import Step, Total, mean_kl, metrics_of, nothing_of
from embodyrl.envs import SimulatorSpec
from embodyrl.methods.learner import Learner
from embodyrl.methods.on_policy.config import NewestConfig, OnPolicyConfig
from embodyrl.methods.on_policy.scoring import add_logprobs
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Policy
from embodyrl.registry import ADVANTAGES, ENCODERS, FILTERS, LOSSES
from embodyrl.screen import task
from embodyrl.tracking.clock import Phase

if TYPE_CHECKING:
    from embodyrl.rollout.batch import TrajectoryBatch


class NewestLearner(Learner):
    """Learns from a batch of the newest rollout, by the advantage, reward and filter that the config names. A subclass
    adds the loss.

    Args:
        engine, simulator: see `Learner`.
        algorithm: the method's settings.
    """

    algorithm: NewestConfig
    whole_episodes = False
    """Whether the loss compares episodes, so that none may be cut."""

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        assert isinstance(algorithm, NewestConfig), "its registration says so"
        reward = algorithm.reward
        self.encoder: Callable[..., Tensor] | None = None
        """Of episodes, for a reward that names `embeddings`."""
        if isinstance(reward, EncodingRewardConfig):
            self.encoder = ENCODERS.load(reward.encoder)
        self.filter: Bound[Tensor] = Bound(FILTERS.load(algorithm.filter.name), algorithm.filter)
        """Says which of `P` groups to keep, bool `[P]`."""
        self.advantage: Bound[tuple[Tensor, Tensor]] = Bound(
            ADVANTAGES.load(algorithm.advantage.name), algorithm.advantage
        )
        """Estimates advantages and returns, `[K, B]`, or `[K*C, B]` with `algorithm.reward_level: action`."""

    def learns_without_advantages(self, batch: TrajectoryBatch) -> bool:
        """Return whether a batch in which all advantages are 0 has a gradient all the same."""
        return False

    def begin(self, columns: Columns, task_descriptions: Sequence[str], drawn: Drawn) -> None:
        """Add columns that every epoch needs, such as what the policy at the start of the update says.

        Args:
            columns: of the batch `[M, ...]`.
            task_descriptions: see `update`.
            drawn: minibatches of the first epoch.
        """

    def is_too_far(self, step: Step) -> bool:
        """Return whether the policy has moved so far that a step is not made, and ends the update."""
        return False

    def update(self, batch: Columns, task_descriptions: Sequence[str]) -> dict[str, float]:
        """Learn from a batch: `algorithm.epochs` passes over it in shuffled minibatches, an optimiser step for each.

        Args:
            batch: `[M]` chunks: observation columns, `task_index`, `trace`, `version`, `sequence` (number of the
                episode that each belongs to), `executed` `[M, C]`, and with a critic `returns` and `old_values`. At the
                level of `algorithm.logprob_level` (see `algorithms.columns`): `old_logprobs`, `advantages`, `valid`
                (the entries that count), `weights` (see `algorithms.aggregation.token_weights`).
            task_descriptions: those that the column `task_index` refers to.

        Returns:
            Metrics, each the mean over the optimiser steps taken.
        """
        engine = self.engine
        history: list[Step] = []
        epochs, too_far = 0, False
        with engine.train_mode(), engine.clock.measure(Phase.train), ExitStack() as under_way:
            rate = engine.optimizer.set_learning_rate(engine.version)
            columns = to_columns(batch, self.device, engine.on_host)
            # States are preprocessed once for all epochs. Images are bytes here and floats afterwards, four times as
            # large and larger: they wait for their micro-batch.
            if "images" not in columns and not engine.micro_batches.fetches(columns, "images"):
                columns["inputs"] = engine.prepare(observation_from(columns, task_descriptions))
            # The first epoch's minibatches are drawn early, because some things are computed in their parts.
            drawn = self._draw_minibatches(columns)
            self.begin(columns, task_descriptions, drawn)

            progress = under_way.enter_context(task("learning", self.algorithm.epochs * len(drawn), "minibatches"))
            for epoch in range(self.algorithm.epochs):
                if epoch > 0:
                    drawn = self._draw_minibatches(columns)
                for minibatch, share in self.minibatches(columns, drawn):
                    progress.advance()
                    step = self._backward(minibatch, task_descriptions, share)
                    if self.is_too_far(step):
                        history.append(step)
                        too_far = True
                        break
                    step.grad_norm = engine.optimizer_step(step.loss, minibatch)
                    # A step that the guard left out would put its NaN into every mean.
                    if step.grad_norm is not None:
                        history.append(step)
                if too_far:
                    break
                epochs += 1

            metrics = metrics_of(history, self.ranks, engine.version) | engine.end_update(rate)
            # Running statistics change what the policy computes. Updated any earlier, the first ratio would not be 1.
            scaling = self.policy.scaling
            if self.policy.keeps_statistics and not (scaling is not None and scaling.of_demonstrations):
                self.policy.update_statistics(self._inputs(engine.micro_batches.whole(columns), task_descriptions))
        return metrics | {"train/epochs": float(epochs)}

    def _draw_minibatches(self, columns: Columns) -> Drawn:
        """Draw the minibatches of an epoch: chunk by chunk, or episode by episode for a loss that compares episodes."""
        count, whole = self.algorithm.minibatches, self.whole_episodes
        return [*draw_minibatches(columns["sequence"], count, whole, self.engine.streams.shuffling)]

    def minibatches(self, columns: Columns, drawn: Drawn) -> Iterator[tuple[Columns, float]]:
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

    def _backward(self, minibatch: Columns, task_descriptions: Sequence[str], share: float) -> Step:
        """Make the forward and backward passes of a minibatch, one micro-batch at a time, and leave its gradients on
        the parameters."""
        engine = self.engine
        totals = []
        engine.optimizer.clear()
        for part, counts in engine.micro_batches.of(minibatch, whole=self.whole_episodes):
            total = self._loss(part, task_descriptions, share, length(minibatch))
            # Every rank makes as many backward passes, since FSDP exchanges weights in each of them: a rank that ran
            # out of parts would let the others wait for ever. A part that only fills up has weight 0.
            scale = counts * engine.weights.factor
            (total.loss if scale == 1.0 else total.loss * scale).backward()
            total.loss = total.loss.detach()  # drops the graph before the next micro-batch needs its memory
            totals.append(total if counts else nothing_of(total))
        engine.weights.sum_gradients(engine.optimizer.parameters)
        loss = torch.stack([total.loss for total in totals]).sum()
        return Step(totals=totals, loss=self.ranks.sum(loss))

    @abstractmethod
    def _loss(self, part: Columns, task_descriptions: Sequence[str], share: float, decisions: int) -> Total:
        """Compute the loss of a minibatch or of a part of it.

        Args:
            part: some rows of the batch's columns.
            task_descriptions: see `update`.
            share: of the minibatch in the batch; `weights` are such that the sum over the whole batch is the loss.
            decisions: chunks in the minibatch.
        """

    def _inputs(self, part: Columns, task_descriptions: Sequence[str]) -> Inputs:
        """Return the policy's inputs, preprocessed now unless they were for the whole batch."""
        inputs: Inputs | None = part.get("inputs")
        return self.engine.prepare(observation_from(part, task_descriptions)) if inputs is None else inputs


class OnPolicyLearner(NewestLearner):
    """Learns from a batch of the newest rollout by its log-probs, with the loss that the config names.

    Args:
        engine, simulator: see `Learner`.
        algorithm: the method's settings.
    """

    algorithm: OnPolicyConfig

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        settings = self.algorithm.loss
        self.loss: Bound[LossOutput] = Bound(LOSSES.load(settings.name), settings)
        self.whole_episodes = self.loss.takes("sequence")

    @classmethod
    def trial_loss(
        cls,
        algorithm: AlgorithmConfig,
        policy: Policy,
        beside: nn.Module | None,
        inputs: Inputs,
        decision: ActOutput,
    ) -> Tensor:
        """See `Learner`."""
        assert isinstance(algorithm, OnPolicyConfig), "its registration says so"
        output = policy.evaluate(inputs, dict(decision.trace))
        loss = output.logprobs.float().sum() + output.entropy.float().sum()
        if algorithm.value_coef > 0.0 and output.values is not None:
            loss = loss + output.values.float().sum()
        return loss

    def learns_without_advantages(self, batch: TrajectoryBatch) -> bool:
        """See `NewestLearner`: a critic, the KL penalty and the entropy bonus do."""
        return "values" in batch or self.algorithm.kl_coef > 0 or self.algorithm.entropy_coef > 0

    def begin(self, columns: Columns, task_descriptions: Sequence[str], drawn: Drawn) -> None:
        """See `NewestLearner`."""
        add_logprobs(self, columns, task_descriptions, drawn)

    def is_too_far(self, step: Step) -> bool:
        """See `NewestLearner`. Early stopping as in OpenAI's Spinning Up: the KL divergence is that before this step,
        which would lead still farther away."""
        # The GPU is waited for only if a target is set.
        target = self.algorithm.target_kl
        return target is not None and float(mean_kl(step, self.ranks)) > target

    def _loss(self, part: Columns, task_descriptions: Sequence[str], share: float, decisions: int) -> Total:
        """Compute policy loss + KL penalty - entropy bonus + value loss (Schulman et al. 2017, eq. 9; the KL penalty as
        in Shao et al. 2024, eq. 3); see `NewestLearner`.
        """
        settings = self.algorithm
        logprobs, evaluated = self.logprobs(self.policy, part, task_descriptions)
        entropy = logprobs_at_level(settings.logprob_level, evaluated.entropy, part["executed"])

        # The registered loss takes the columns that it names, besides options of its own.
        known = part | {"logprobs": logprobs}
        known |= {name: part[name].to(self.device) for name in self.policy.reads_on_host if self.loss.takes(name)}
        if self.loss.takes("proximal_logprobs") and "proximal_logprobs" not in part:
            known["proximal_logprobs"] = proximal_logprobs(
                logprobs, part["old_logprobs"], part["version"], self.engine.version + 1, settings.proximal
            )
        output = self.loss(known)
        require_entries(output, self.loss.function, logprobs)

        # Logged entry by entry, since what counts and how many is known only once all parts are joined (`summarize`).
        logged = output.metrics | {"policy_loss": output.losses.detach(), "entropy": entropy.detach()}
        losses = output.losses
        if settings.entropy_coef > 0.0:
            losses = losses - settings.entropy_coef * entropy
        if self.engine.reference is not None:
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

    def logprobs(self, policy: Policy, part: Columns, task_descriptions: Sequence[str]) -> tuple[Tensor, EvalOutput]:
        """Return the log-probs of chunks under a policy at the level of the loss, and all that the policy evaluated."""
        inputs = self._inputs(part, task_descriptions)
        with self.engine.computing:
            evaluated = policy.evaluate(inputs, part["trace"])
        return logprobs_at_level(self.algorithm.logprob_level, evaluated.logprobs, part["executed"]), evaluated
