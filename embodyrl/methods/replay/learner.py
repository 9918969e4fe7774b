"""Learning from a replay: what its methods share, and critics of actions with their slow copies. The formulas are in
`algorithms.off_policy`.

Shapes: `M` decisions of a minibatch, or those of them that this rank has; `N` numbers of a chunk of actions.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from embodyrl.algorithms.off_policy import decision_returns, following_factors
from embodyrl.algorithms.rewards import rewards_by
from embodyrl.algorithms.shifts import draw_shifts, shifted
from embodyrl.config.schema import AlgorithmConfig, DiscountPer
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.minibatch import Columns
from embodyrl.engine.optimizer import Optimizer
from embodyrl.engine.update_metrics import Metrics
from embodyrl.envs import SimulatorSpec
from embodyrl.methods.learner import Learner
from embodyrl.methods.replay.config import CriticizedAlgorithmConfig, CriticsConfig, ReplayAlgorithmConfig
from embodyrl.methods.replay.critic_encoder import CriticEncoder
from embodyrl.methods.replay.statistics import Statistics
from embodyrl.models.critics.network import Critics, critic_weights
from embodyrl.models.errors import PolicyError
from embodyrl.models.policy import ActOutput, Inputs, Policy, SoftPolicy
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.replay import DemonstrationSampler, Minibatch, Replay
from embodyrl.rollout.replay_fields import JUDGED
from embodyrl.seeding import derive_seed
from embodyrl.tracking.clock import Phase

if TYPE_CHECKING:
    from embodyrl.data.transitions import Transitions
    from embodyrl.pipelines.pipeline import Iteration

OF_REWARDS = ("rewards", "success", *JUDGED, "steps", "terminated", "truncated")
"""Columns of a replay that rewards are computed from, of `JUDGED` only where a judge writes one."""


class ReplayLearner(Learner):
    """Learns from minibatches that are drawn from a replay. A subclass adds `learn`.

    Args:
        engine, simulator: see `Learner`.
        algorithm: the method's settings.
    """

    algorithm: ReplayAlgorithmConfig

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        self.statistics = Statistics(engine, [engine.policy])
        """What scales observations."""
        self.pixels = 0
        """Pixels by which images are shifted at most."""
        self.shifts = torch.Generator(self.device).manual_seed(derive_seed(engine.seed, "shifts"))
        """Shifts of images."""
        self.made = 0
        """Steps so far; of a method with critics, those of the critics."""

    @property
    def learns_before_rollouts(self) -> bool:
        """Whether the policy learns from demonstrations before it sees a rollout, and from values afterwards. It then
        keeps the statistics that it learned with."""
        return False

    @property
    def acts_randomly_first(self) -> bool:
        """Whether rollouts begin with random actions."""
        return not self.learns_before_rollouts

    def explores(self, replay: Replay | None) -> bool:
        """See `Learner`: until the replay holds `start_after` decisions, unless it is filled again."""
        begins = replay is not None and not (replay.has_begun or replay.is_refilled)
        return begins and self.acts_randomly_first

    def sampler(self, replay: Replay, transitions: Transitions | None) -> DemonstrationSampler | None:
        """Return the demonstrations that are in every minibatch, if there are any."""
        return None

    def learn(self, minibatches: Iterable[Minibatch], task_descriptions: Sequence[str] = ()) -> dict[str, float]:
        """Learn from minibatches, an update of the policy's version; returns metrics.

        Args:
            minibatches: the same ones on all ranks, each with its own decisions of them.
            task_descriptions: those that the column `task_index` refers to, if there is one.
        """
        raise NotImplementedError

    def learn_from(self, minibatches: Iterable[Minibatch], iteration: Iteration) -> None:
        """Learn from minibatches in an iteration, with statistics of what has been seen; adds `train/` metrics."""
        assert iteration.replay is not None, "the stage has asked for it"
        self.statistics.begin(iteration.replay, iteration.transitions, policy_keeps=self.learns_before_rollouts)
        iteration.metrics |= self.learn(minibatches, task_descriptions(iteration))
        self.warn_of_values(iteration)

    def warn_of_values(self, iteration: Iteration) -> None:
        """Warn of what looks wrong after an update."""

    def remembered(self, batch: TrajectoryBatch, replay: Replay, iteration: Iteration) -> None:
        """Take note of the rollout that has been added to the replay."""
        self.statistics.go_on(batch, replay, iteration)

    def with_shifts(self, columns: Columns, minibatch: Minibatch) -> Columns:
        """Return columns on the device with the images of a minibatch and those that followed shifted, by up to
        `pixels`. Shifts are drawn for the whole minibatch, so that they are the same for any number of ranks."""
        if not self.pixels:
            return columns
        found = dict(columns)
        for name in ("images", "next_images"):
            drawn = draw_shifts(minibatch.size, self.pixels, self.shifts)
            found[name] = shifted(columns[name], drawn[minibatch.places.to(drawn.device)], self.pixels)
        return found

    def shown(self, columns: Columns, minibatch: Minibatch) -> Columns:
        """Return what the policy sees otherwise than it is in a minibatch: the shifted images."""
        return {"images": columns["images"].to(minibatch.columns["images"].device)} if self.pixels else {}

    def _step(self, optimizer: Optimizer, losses: Tensor, minibatch: Minibatch) -> Tensor | None:
        """Make an optimiser step by the mean of losses over the whole minibatch, of which these are this rank's;
        returns this rank's part of the mean, or None if the step was not finite and left out."""
        # Divided by the size over all ranks, whose gradients are added up: a step is the same for any number of ranks.
        loss = losses.sum() / minibatch.size
        optimizer.clear()
        loss.backward()
        self.engine.weights.sum_gradients(optimizer.parameters)
        norm = optimizer.clip()
        whole = self.ranks.sum(loss.detach())
        if not self.engine.guard.allows(whole, norm, minibatch.columns, update=self.made + 1):
            return None
        optimizer.step()
        self.engine.watch()
        return loss.detach()

    def progress(self, replay: Replay) -> dict[str, float]:
        """Return metrics of an iteration besides those of its steps."""
        return {}


def task_descriptions(iteration: Iteration) -> Sequence[str]:
    """Return those that the column `task_index` of minibatches refers to."""
    known = iteration.batch if iteration.transitions is None else iteration.transitions
    assert known is not None, "an iteration without demonstrations begins with a rollout"
    return known.task_descriptions


@dataclass(kw_only=True)
class EncodedMinibatch:
    """A minibatch with encoded observations."""

    columns: Columns
    """Of the minibatch, on the device."""
    features: Tensor
    """`[M, F]`, without a gradient."""
    encoded: Tensor
    """The same, from which gradients flow to the policy's encoder, if it has one."""
    following: Tensor
    """Features of the observations that followed."""
    actions: Tensor
    """`[M, N]`, in -1 .. 1."""
    returns: Tensor
    factors: Tensor
    labels: Tensor | None
    """`[M, C, D]`, demonstrated actions in the simulator's units; None: there are none."""
    labelled: Tensor | None
    """bool `[M]`"""


class CriticLearner(ReplayLearner):
    """Learns from a replay by critics of actions and their slow copies. A subclass adds how critics and policy learn.

    The critics learn from the gradients of their own loss alone, and the policy from those of its own: each is clipped
    and stepped separately, and no gradient of one is in the norm of the other. An encoder of the policy learns with the
    critics (Yarats et al. 2021, arXiv:2107.09645): the policy's loss and the targets see its features as they are.

    Args:
        engine: holds the policy, whose optimiser is without `SoftPolicy.encoder_parameters`.
        algorithm: discounts, reward, sizes of the critics, shifts of images.
        simulator: see `Learner`.

    Raises:
        PolicyError: the policy cannot learn so.
    """

    algorithm: CriticizedAlgorithmConfig
    slow_copies: ClassVar[bool] = True
    """Whether targets come from slow copies of the critics."""

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        critics = self._sizes = self.algorithm.off_policy.critics
        self.pixels = self.algorithm.off_policy.augment_pixels
        device, seed, config, updates = self.device, engine.seed, engine.config.optimizer, engine.iterations
        # A policy that shows critics what it sees has one encoder for both; otherwise they need one of their own.
        critic_encoder = None if shows_critics(self.policy) else self.encoder_for(self.policy, simulator, seed)
        self.critic_encoder = None if critic_encoder is None else critic_encoder.to(device)
        """What the critics see with, where the policy shows them nothing."""
        self.statistics = Statistics(engine, [engine.policy, *([] if critic_encoder is None else [critic_encoder])])
        self.size = self.observation_encoder.decision_size
        # On the CPU, so that critics start alike on all devices.
        start = torch.Generator().manual_seed(derive_seed(seed, "critics"))
        self.critics = self.critics_for(self.observation_encoder.feature_dim + self.size, critics, start).to(device)
        # Critics that chase their own newest values diverge (Lillicrap et al. 2016, arXiv:1509.02971, section 3).
        self.targets = copy.deepcopy(self.critics).requires_grad_(False) if self.slow_copies else self.critics
        encoder = self.observation_encoder.encoder_parameters()
        # The encoder is stepped with the critics, not with the actor: it learns from the loss of the values alone.
        of_critics = dataclasses.replace(config, lr=config.critic_lr or config.lr, critic_lr=None)
        learned = [*self.critics.parameters(), *encoder]
        self.optimizers = {
            "actor": engine.optimizer,
            "critic": Optimizer(learned, of_critics, updates, keep_gradients=not encoder),
        }
        self.choice = torch.Generator().manual_seed(derive_seed(seed, "subset"))
        """Choice of the critics of a target."""
        self.largest_return = 0.0
        """Largest return of a decision that was ever learned from, without its sign."""

    @classmethod
    def own_parameters(cls, policy: Policy, algorithm: AlgorithmConfig) -> Sequence[nn.Parameter]:
        """See `Learner`: the encoder of a policy that shows critics what it sees learns with them."""
        return policy.encoder_parameters() if shows_critics(policy) else ()

    @classmethod
    def critics_for(cls, inputs: int, config: CriticsConfig, generator: torch.Generator) -> Critics:
        """Return new critics; see `Critics`."""
        return Critics(inputs, config, generator)

    @classmethod
    def encoder_for(cls, policy: Policy, simulator: SimulatorSpec, seed: int) -> CriticEncoder | None:
        """Return what critics see with where the policy shows them nothing.

        Raises:
            PolicyError: this method has no such critics.
        """
        raise PolicyError(f"model {policy.name!r} cannot learn from a replay: see model.head")

    @classmethod
    def beside(cls, policy: Policy, algorithm: AlgorithmConfig) -> nn.Module | None:
        """See `Learner`."""
        assert isinstance(algorithm, CriticizedAlgorithmConfig), "its registration says so"
        if not isinstance(policy, SoftPolicy):
            return None
        size = policy.feature_dim + policy.decision_size
        return cls.critics_for(size, algorithm.off_policy.critics, torch.Generator())

    @classmethod
    def trial_loss(
        cls,
        algorithm: AlgorithmConfig,
        policy: Policy,
        beside: nn.Module | None,
        inputs: Inputs,
        decision: ActOutput,
    ) -> Tensor:
        """See `Learner`; that of critics and of the policy's encoder."""
        assert isinstance(policy, SoftPolicy) and isinstance(beside, Critics), "see beside"
        seen = decision.trace if policy.scaled in decision.trace else inputs
        encoded = policy.encode(dict(seen))
        with torch.no_grad():
            following = policy.encode({name: tensor.clone() for name, tensor in seen.items()})
            actions, _ = policy.draw(following, following.new_zeros(len(following), policy.decision_size))
            targets = beside(following, actions).amin(0)
        loss: Tensor = (beside(encoded, actions) - targets).square().sum()
        return loss

    @classmethod
    def memory(
        cls, policy: Policy, algorithm: AlgorithmConfig, simulator: SimulatorSpec, seed: int
    ) -> Mapping[str, int]:
        """See `Learner`: critics with weights, those of the slow copies, gradients and two moments; what they see with
        has no slow copy."""
        assert isinstance(algorithm, CriticizedAlgorithmConfig), "its registration says so"
        seeing: Any = policy
        own = 0
        if not shows_critics(policy) and (encoder := cls.encoder_for(policy, simulator, seed)) is not None:
            seeing, own = encoder, sum(each.numel() for each in encoder.parameters())
        inputs = seeing.feature_dim + seeing.decision_size
        weights = critic_weights(inputs, algorithm.off_policy.critics)  # which takes no memory, as building them would
        return {"critics": 4 * ((4 + cls.slow_copies) * weights + 4 * own)}

    @property
    def observation_encoder(self) -> SoftPolicy | CriticEncoder:
        """What the critics see with."""
        if self.critic_encoder is not None:
            return self.critic_encoder
        assert isinstance(self.policy, SoftPolicy), "see shows_critics"
        return self.policy

    def warn_of_values(self, iteration: Iteration) -> None:
        """See `ReplayLearner`: of values that no rewards add up to, once."""
        metrics, settings = iteration.metrics, self.algorithm
        chunk = iteration.config.rollout.chunk_size if settings.discount_per is DiscountPer.action else 1
        gamma = settings.gamma**chunk
        bound = self.largest_return / (1.0 - gamma) if gamma < 1.0 else math.inf
        if metrics.get("train/q_max", -math.inf) > bound > 0.0:
            iteration.warn(
                "values_too_large",
                f"the critics value an action at {metrics['train/q_max']:.3g}, more than the largest reward so far for "
                f"ever ({self.largest_return:.3g} / (1 - gamma) = {bound:.3g}): they overestimate. Lower "
                "engine.optimizer.critic_lr or algorithm.off_policy.updates_per_step, keep "
                "algorithm.off_policy.critics.layer_norm on, or use more critics",
            )

    # ---- an iteration

    def learn(self, minibatches: Iterable[Minibatch], task_descriptions: Sequence[str] = ()) -> dict[str, float]:
        """Learn from minibatches, one after the other; returns metrics, each the mean over its steps.

        Args:
            minibatches: the same ones on all ranks, each with its own decisions of them.
            task_descriptions: those that the column `task_index` refers to, if there is one.
        """
        engine = self.engine
        if self.critic_encoder is not None:
            self.critic_encoder.task_descriptions = task_descriptions
        history: list[Metrics] = []
        with engine.train_mode(), engine.clock.measure(Phase.train):
            for optimizer in self.optimizers.values():
                optimizer.set_learning_rate(engine.version)
            # The next minibatch is read only now: on a GPU the steps of the last one are still being computed.
            for minibatch in engine.clock.pulling(Phase.preprocess, minibatches):
                history.append(self._learn(minibatch, self.encode(minibatch)))
                self.follow()
            metrics = self._means(history)
        return metrics | engine.end_update(engine.optimizer.rate)

    def follow(self) -> None:
        """Let the slow copies follow, after every minibatch."""
        if self.slow_copies:
            self.targets.follow(self.critics, self._sizes.tau)

    @abstractmethod
    def _learn(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Metrics:
        """Make the steps of a minibatch, count it in `made`, and return metrics."""

    def encode(self, minibatch: Minibatch) -> EncodedMinibatch:
        """Compute what the networks see, and the return of each decision by `algorithm.reward`."""
        settings, device = self.algorithm, self.device
        # Rewards are computed here: the replay holds what the simulator gave, and nothing that was derived from it.
        columns = {name: column.to(device, non_blocking=True) for name, column in minibatch.columns.items()}
        columns = self.with_shifts(columns, minibatch)
        executed = torch.arange(columns["rewards"].shape[1], device=columns["steps"].device) < columns["steps"][:, None]
        in_time = {name: columns[name][None] for name in OF_REWARDS if name in columns}
        rewards = rewards_by(self.reward, in_time | {"executed": executed[None]})[0]
        shaped = (rewards - settings.time_penalty) * executed * settings.reward_scale
        discounts: dict[str, Any] = {"gamma": settings.gamma, "discount_per": settings.discount_per}
        encoded = self.features(columns)
        # What followed is seen for targets, through which no gradient flows.
        with torch.no_grad():
            following = self.features(columns, "next_")
        return EncodedMinibatch(
            columns=columns,
            features=encoded.detach(),
            encoded=encoded,
            following=following,
            actions=self.observation_encoder.to_unit(columns[self.observation_encoder.decided]),
            returns=decision_returns(shaped.float(), **discounts),
            factors=following_factors(
                columns["steps"],
                columns["terminated"],
                columns["truncated"],
                bootstrap=settings.bootstrap,
                **discounts,
            ),
            labels=columns.get("labels"),
            labelled=columns.get("labelled"),
        )

    def features(self, columns: Columns, prefix: str = "", of: SoftPolicy | None = None) -> Tensor:
        """Return what the critics see of the observations at decisions, or with `next_` of those that followed; `of` is
        the policy that looks, if it is another one."""
        # Observations are the columns that come in pairs, now and `next_`; the others, such as rewards, are not seen.
        followed = [name.removeprefix("next_") for name in columns if name.startswith("next_")]
        seen = {name: columns[f"{prefix}{name}"] for name in followed}
        if self.critic_encoder is not None:
            seen["task_index"] = columns["task_index"]
        return (of or self.observation_encoder).encode_stored(seen)

    def _subset(self) -> Tensor | None:
        """Draw the critics of a target, none twice; None: all of them count."""
        # The least of a few that are drawn anew (REDQ, Chen et al. 2021, arXiv:2101.05982): the least of many would
        # be far too low.
        count, subset = self._sizes.count, self._sizes.subset
        if subset == count:
            return None
        drawn = torch.randperm(count, generator=self.choice)[:subset]
        return drawn.to(self.device)

    @staticmethod
    def _value_metrics(values: Tensor, seen: EncodedMinibatch, minibatch: Minibatch) -> Metrics:
        """Return metrics of the critics' values `[E, M]` of decisions, and of the returns that they learned from."""
        means, any_here = values.mean(0), bool(len(seen.returns))
        return {
            "q": means.sum() / minibatch.size,
            "q_max": means.max() if any_here else means.new_tensor(-math.inf),
            "return_max": seen.returns.abs().max() if any_here else means.new_zeros(()),
        }

    def _means(self, history: list[Metrics]) -> dict[str, float]:
        """Return the metrics of an iteration: the same on all ranks."""
        metrics = {"train/updates": float(self.made)}
        for name in dict.fromkeys(name for row in history for name in row):
            # Numbers stay on the device until here: reading each would wait for the device once a step.
            column = torch.stack([row[name] for row in history if name in row])
            every = torch.stack(self.ranks.gather(column))
            largest = name.endswith("_max")
            metrics[f"train/{name}"] = float(every.max() if largest else every.sum(0).mean())
        self.largest_return = max(self.largest_return, metrics.pop("train/return_max", 0.0))
        return metrics

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """See `Learner`."""
        return {"soft": self.own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.load_own_state(state["soft"])

    def own_state(self) -> dict[str, Any]:
        """Return critics, their slow copies, what they see with unless that is the policy, optimisers and random
        streams. The policy and its optimiser are not among them."""
        return {
            "onlooker": {} if self.critic_encoder is None else dict(self.critic_encoder.state_dict()),
            "critics": dict(self.critics.state_dict()),
            "targets": dict(self.targets.state_dict()) if self.slow_copies else {},
            "optimizers": {name: each.state_dict() for name, each in self._own_optimizers()},
            "choice": self.choice.get_state(),
            "shifts": self.shifts.get_state(),
            "made": self.made,
            "largest_return": self.largest_return,
        }

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `own_state`."""
        if self.critic_encoder is not None:
            self.critic_encoder.load_state_dict(state["onlooker"])
        self.critics.load_state_dict(state["critics"])
        if self.slow_copies:
            self.targets.load_state_dict(state["targets"])
        for name, each in self._own_optimizers():
            each.load_state_dict(state["optimizers"][name])
        restore_stream(self.shifts, state["shifts"])
        self.choice.set_state(state["choice"])
        self.made, self.largest_return = state["made"], state["largest_return"]

    def _own_optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        return ((name, each) for name, each in self.optimizers.items() if name != "actor")


def shows_critics(policy: Policy) -> TypeGuard[SoftPolicy]:
    """Return whether critics of actions see what the policy sees, and its encoder learns with them."""
    return isinstance(policy, SoftPolicy) and policy.learns_from_replay


def restore_stream(stream: torch.Generator, state: Tensor) -> None:
    """Continue a random stream, unless its state is that of another type of device; see `Streams`."""
    if len(stream.get_state()) == len(state):
        stream.set_state(state)
