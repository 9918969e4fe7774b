"""RECAP: a value model judges every decision of demonstrations, rollouts and corrections, and the policy learns all of
them, told in its prompt which were better than usual; it acts as told so (Physical Intelligence 2025,
arXiv:2511.14759).

Unlike there, each round goes on with the policy of the one before, demonstrations are judged, too, since they may be
the policy's own attempts, and the value model has a small encoder of its own.

Shapes: `M` decisions of a minibatch, or those of them that this rank has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.config.replay import REMAINING, SOLVED
from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.minibatch import Columns
from embodyrl.engine.optimizer import Optimizer
from embodyrl.engine.update_metrics import Metrics, mean_metrics
from embodyrl.envs import SimulatorSpec
from embodyrl.methods.imitation.imitation import Imitation
from embodyrl.methods.recap.config import Lookahead, RecapConfig
from embodyrl.methods.recap.values import ValueDistribution, scaled_returns
from embodyrl.methods.replay.critic_encoder import CriticEncoder
from embodyrl.methods.replay.learner import ReplayLearner, restore_stream, task_descriptions
from embodyrl.methods.replay.statistics import Statistics
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.policy import FlowPolicy
from embodyrl.models.policy import Policy, PolicyObservation
from embodyrl.rollout.interventions import Source
from embodyrl.rollout.replay import DemonstrationSampler, Minibatch, Replay
from embodyrl.seeding import derive_seed
from embodyrl.tracking.clock import Phase

if TYPE_CHECKING:
    from embodyrl.data.transitions import Transitions
    from embodyrl.pipelines.pipeline import Iteration

JUDGED = 50
"""Minibatches of which the advantage is found that is better than usual."""

ROUNDING = 1e-5
"""Difference of advantages, in units of the least return, up to which they count as the same."""


class AdvantageConditioned(ReplayLearner):
    """Learns values of states, and a policy that is told which decisions were better than these.

    Args:
        engine, algorithm, simulator: see `Learner`.
    """

    policy: FlowPolicy
    algorithm: RecapConfig

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        self._check_words()
        settings, seed = self.algorithm.off_policy, engine.seed
        self.settings, self.pixels = settings, settings.augment_pixels
        self.imitation = Imitation(engine)
        self.encoder = self._encoder(engine.policy, simulator, seed).to(self.device)
        self.statistics = Statistics(engine, [engine.policy, self.encoder])
        with torch.random.fork_rng(devices=[]):  # nothing else draws differently because there are values
            torch.manual_seed(derive_seed(seed, "values"))
            sizes = settings.value.hidden_sizes
            self.values = ValueDistribution(self.encoder.feature_dim, sizes, settings.value.bins).to(self.device)
        config = engine.config.optimizer
        of_values = dataclasses.replace(config, lr=settings.value.lr or config.lr, critic_lr=None)
        self.value_optimizer = Optimizer([*self.values.parameters(), *self.encoder.encoder_parameters()], of_values, 1)
        self.longest = simulator.max_episode_steps
        self.failure = float(self.longest if isinstance(settings.failure, str) else settings.failure)
        self.untold = torch.Generator().manual_seed(derive_seed(seed, "untold"))
        """Choice of the decisions that are learned without being told which they are."""
        self.thresholds = torch.zeros(0)
        """Advantage from which on a decision of each task is better than usual."""

    def _check_words(self) -> None:
        """Check that the policy tells the words for better actions from those for others."""
        spec, indicator = self.simulator, self.policy.config.indicator
        assert indicator is not None, "the config rules ask for it"
        images = torch.zeros(2, spec.num_images, *spec.image_size, 3, dtype=torch.uint8) if spec.cameras else None
        told = self.engine.prepare(
            PolicyObservation(
                images=images,
                proprio=torch.zeros(2, spec.proprio_dim) if spec.proprio_dim else None,
                task_descriptions=[next(iter(spec.tasks.values()))] * 2,
                better=torch.tensor([1, 0], dtype=torch.int8),
            )
        )
        if all(torch.equal(*column) for column in told.values()):
            raise PolicyError(
                f"model.indicator: the checkpoint's tokenizer does not tell {indicator.better!r} from "
                f"{indicator.worse!r}",
                "set model.indicator.better and worse to words that it knows",
            )

    @staticmethod
    def _encoder(policy: Policy, simulator: SimulatorSpec, seed: int) -> CriticEncoder:
        return CriticEncoder(simulator, policy.spec.chunk_size, seed)

    @classmethod
    def memory(
        cls, policy: Policy, algorithm: AlgorithmConfig, simulator: SimulatorSpec, seed: int
    ) -> Mapping[str, int]:
        """See `Learner`: weights, gradients and two moments of the value model."""
        assert isinstance(algorithm, RecapConfig), "its registration says so"
        encoder, settings = cls._encoder(policy, simulator, seed), algorithm.off_policy.value
        values = ValueDistribution(encoder.feature_dim, settings.hidden_sizes, settings.bins)
        return {"values": 16 * sum(each.numel() for each in [*values.parameters(), *encoder.parameters()])}

    @property
    def acts_randomly_first(self) -> bool:
        """See `ReplayLearner`: it improves on what the policy does by itself."""
        return False

    @property
    def learns_before_rollouts(self) -> bool:
        """See `ReplayLearner`."""
        return True

    def sampler(self, replay: Replay, transitions: Transitions | None) -> DemonstrationSampler | None:
        """See `ReplayLearner`. All that is known is one dataset."""
        if transitions is None:
            return None
        known = len(transitions) + len(replay)
        return DemonstrationSampler(demonstrations=transitions, share=len(transitions) / known)

    # ---- a round

    def begin_round(self, iteration: Iteration) -> None:
        """Take note of what is known, and of the tasks that it is about."""
        assert iteration.replay is not None, "the stage has asked for it"
        self.statistics.begin(iteration.replay, iteration.transitions, policy_keeps=True)
        self.encoder.task_descriptions = task_descriptions(iteration)

    def learn_values(self, minibatches: Iterable[Minibatch], steps: int) -> dict[str, float]:
        """Learn what is left of episodes, `steps` minibatches; returns metrics."""
        optimizer, history = self.value_optimizer, []
        with self.engine.train_mode(), self.engine.clock.measure(Phase.train):
            for number, minibatch in enumerate(self.engine.clock.pulling(Phase.preprocess, minibatches)):
                optimizer.set_learning_rate(number, steps)
                columns = self.with_shifts(self._on_device(minibatch), minibatch)
                losses = self.values.losses(self._features(columns), self._returns(columns))
                loss = self._step(optimizer, losses, minibatch)
                history += [] if loss is None else [{"value_loss": self.ranks.sum(loss)}]
        return {f"train/{name}": value for name, value in _means(history).items()}

    @torch.no_grad()
    def judge(self, minibatches: Iterable[Minibatch]) -> dict[str, float]:
        """Find the advantage from which on decisions of each task are better than usual; returns metrics."""
        history: list[tuple[Tensor, Tensor, Tensor]] = []
        with self.engine.train_mode(), self.engine.clock.measure(Phase.train):
            for minibatch in self.engine.clock.pulling(Phase.preprocess, minibatches):
                columns = self._on_device(minibatch)
                own = (columns["task_index"], self.advantages(columns), columns[SOLVED])
                # The same on all ranks.
                task, advantage, good = (torch.cat(self.ranks.gather_rows(column)).cpu() for column in own)
                history.append((task, advantage, good))
        task, advantage, good = (torch.cat(column) for column in zip(*history, strict=True))
        # Of a task of which nothing was drawn, nothing is known.
        of_tasks = (advantage[task == number] for number in range(len(self.encoder.task_descriptions)))
        share = 1.0 - self.settings.better
        thresholds = torch.stack([each.quantile(share) if len(each) else advantage.max() for each in of_tasks])
        # A decision that was drawn more than once has advantages that differ by rounding, which must not decide.
        self.thresholds = thresholds + ROUNDING
        better = advantage > self.thresholds[task]
        return {
            "train/better": float(better.float().mean()),
            # What tells good judgements from bad ones: the share of solved episodes among the better ones, and all.
            "train/better_solved": float(good[better].float().mean()) if better.any() else 0.0,
            "train/solved": float(good.float().mean()),
            "train/advantage_deviation": float(advantage.std()),
        }

    def learn_policy(self, minibatches: Iterable[Minibatch], steps: int) -> dict[str, float]:
        """Learn what was done, told which of it was better than usual (eq. 3), `steps` minibatches; returns
        metrics."""
        engine, history = self.engine, []
        with engine.train_mode(), engine.clock.measure(Phase.train):
            for number, minibatch in enumerate(engine.clock.pulling(Phase.preprocess, minibatches)):
                rate = engine.optimizer.set_learning_rate(number, steps)
                columns = self.with_shifts(self._on_device(minibatch), minibatch)
                better = self._told(minibatch, columns)
                shown = {"better": better.to(torch.int8), **self.shown(columns, minibatch)}
                told = dataclasses.replace(minibatch, columns=minibatch.columns | shown)
                loss = self.imitation.step_towards(told, columns["actions"], self.encoder.task_descriptions)
                history += [] if loss is None else [{"loss": loss}]
                self.made += 1
        means = {f"train/{name}": value for name, value in _means(history).items()}
        return means | engine.end_update(rate) | {"train/updates": float(self.made)}

    @torch.no_grad()
    def advantages(self, columns: Columns) -> Tensor:
        """Return how much better decisions were than what is usual from there, `[M]` in units of the least return."""
        whole = self.longest + self.failure
        returns, value = self._returns(columns), self.values(self._features(columns))
        if self.settings.lookahead is Lookahead.chunk:
            # What follows the last decision of an episode is known.
            goes_on = columns[REMAINING] > columns["steps"]
            over = -self.failure / whole * ~columns[SOLVED]
            following = torch.where(goes_on, self.values(self._features(columns, "next_")), over)
            returns = -columns["steps"] / whole + following
        found: Tensor = returns - value
        return found

    def _told(self, minibatch: Minibatch, columns: Columns) -> Tensor:
        """Return what the policy is told of decisions `[M]`: better than usual (1), not (0), nothing (-1)."""
        better = self.advantages(columns).cpu() > self.thresholds[columns["task_index"].cpu()]
        if "source" in columns:
            better |= columns["source"].cpu() == Source.expert
        # Drawn for the whole minibatch, so that it is the same for any number of ranks.
        untold = torch.rand(minibatch.size, generator=self.untold)[minibatch.places] < self.settings.dropout
        told: Tensor = better.long().masked_fill(untold, -1)
        return told

    def _returns(self, columns: Columns) -> Tensor:
        return scaled_returns(columns[REMAINING], columns[SOLVED], failure=self.failure, longest=self.longest)

    # ---- what is seen

    def _on_device(self, minibatch: Minibatch) -> Columns:
        return {name: column.to(self.device, non_blocking=True) for name, column in minibatch.columns.items()}

    def _features(self, columns: Columns, prefix: str = "") -> Tensor:
        """Return what the value model sees of the observations at decisions, or with `next_` of those after them."""
        seen = {name: columns[prefix + name] for name in ("proprio", "images") if name in columns}
        return self.encoder.encode_stored(seen | {"task_index": columns["task_index"]})

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """See `Learner`."""
        return {
            "recap": {
                "encoder": dict(self.encoder.state_dict()),
                "values": dict(self.values.state_dict()),
                "optimizer": self.value_optimizer.state_dict(),
                "shifts": self.shifts.get_state(),
                "untold": self.untold.get_state(),
                "made": self.made,
            }
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        own = state["recap"]
        self.encoder.load_state_dict(own["encoder"])
        self.values.load_state_dict(own["values"])
        self.value_optimizer.load_state_dict(own["optimizer"])
        restore_stream(self.shifts, own["shifts"])
        self.untold.set_state(own["untold"])
        self.made = own["made"]


def _means(history: Sequence[Metrics]) -> dict[str, float]:
    return {name.removeprefix("train/"): value for name, value in mean_metrics(history).items()}
