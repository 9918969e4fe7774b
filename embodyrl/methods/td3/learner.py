"""TD3: critics of a deterministic policy, whose targets are the smaller of two values for an action with noise, and a
policy that learns half as often (Fujimoto et al. 2018, arXiv:1802.09477). With demonstrations TD3+BC: the policy also
stays near demonstrated actions (Fujimoto and Gu 2021, arXiv:2106.06860).

Shapes: `M` decisions of a minibatch, or those of them that this rank has; `N` numbers of a chunk of actions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.algorithms.off_policy import agreed_values, critic_losses, implicit_targets
from embodyrl.config.schema import AlgorithmConfig, Config
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.update_metrics import Metrics
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import unit_range
from embodyrl.methods.replay.learner import CriticLearner, EncodedMinibatch, restore_stream
from embodyrl.methods.td3.config import TD3Config
from embodyrl.models.policy import SoftPolicy
from embodyrl.rollout.hooks import Decision, Hook
from embodyrl.rollout.replay import DemonstrationSampler, Minibatch, Replay
from embodyrl.seeding import derive_seed

if TYPE_CHECKING:
    from embodyrl.data.transitions import Transitions


class TwinDelayed(CriticLearner):
    """Critics and a policy of which only the most likely action counts, each with a slow copy.

    Args:
        engine, algorithm, simulator: see `CriticLearner`.
    """

    policy: SoftPolicy
    algorithm: TD3Config

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        self.settings = self.algorithm.off_policy
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        """Slow copy of the policy, for targets."""
        self.noise = torch.Generator(self.device).manual_seed(derive_seed(engine.seed, "improve"))
        """Noise of the actions of targets."""

    @classmethod
    def hooks(cls, config: Config, simulator: SimulatorSpec) -> Sequence[Hook]:
        """See `Learner`."""
        assert isinstance(config.algorithm, TD3Config), "its registration says so"
        return (ExplorationNoise(simulator, config.algorithm.off_policy.exploration_noise),)

    def sampler(self, replay: Replay, transitions: Transitions | None) -> DemonstrationSampler | None:
        """See `ReplayLearner`."""
        if transitions is None:
            return None
        return DemonstrationSampler(
            demonstrations=transitions, share=self.settings.demonstrations, interventions_join=True
        )

    @property
    def learns_before_rollouts(self) -> bool:
        """See `ReplayLearner`."""
        return self.settings.offline_iterations > 0

    def _learn(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Metrics:
        """Make a step of the critics, and every `actor_every`-th time one of the policy."""
        # Drawn for the whole minibatch, see `SoftActorCritic`.
        noise = torch.randn(minibatch.size, self.size, generator=self.noise, device=self.noise.device)
        metrics = self._learn_critics(minibatch, seen, noise[minibatch.places.to(noise.device)])
        self.made += 1
        if self._is_actors_turn():
            metrics |= self._learn_actor(minibatch, seen)
        return metrics

    def _is_actors_turn(self) -> bool:
        return self.made % self.settings.actor_every == 0

    def follow(self) -> None:
        """See `CriticLearner`; all copies follow when the policy has learned."""
        if not self._is_actors_turn():
            return
        super().follow()
        own, copies = tuple(self.policy.parameters()), tuple(self.target_policy.parameters())
        with torch.no_grad():
            torch._foreach_lerp_(copies, own, self._sizes.tau)

    def _learn_critics(self, minibatch: Minibatch, seen: EncodedMinibatch, noise: Tensor) -> Metrics:
        """Step the critics towards R + Gam min_j Q'_j(s', pi'(s') + clipped noise), algorithm 1; `noise` `[M, N]`."""
        settings = self.settings
        with torch.no_grad():
            # Noise around the action that follows smooths the values: a narrow peak, mostly an error, is averaged away.
            most = settings.target_noise_clip
            actions = self.target_policy.mode(seen.following) + (settings.target_noise * noise).clamp(-most, most)
            # The smaller value counts, since an error upwards is what the policy would go for.
            values = self.targets(seen.following, actions.clamp(-1.0, 1.0), self._subset()).amin(0)
            targets = implicit_targets(seen.returns, seen.factors, values)
        values = self.critics(seen.encoded, seen.actions)
        loss = self._step(self.optimizers["critic"], critic_losses(values, targets), minibatch)
        return {} if loss is None else {"critic_loss": loss} | self._value_metrics(values.detach(), seen, minibatch)

    def _learn_actor(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Metrics:
        """Step the policy towards actions of a higher value, and with `cloning` towards demonstrated ones."""
        every = self.critics.of_actions(seen.features, self.policy.mode(seen.features))
        values = agreed_values(every, self._sizes.actor_uses)
        losses, cloned = -values, None
        if self.settings.cloning is not None:
            # Values in units of their mean size, so that one weight suits all rewards (TD3+BC, eq. 5).
            size = self.ranks.sum(values.detach().abs().sum()) / minibatch.size
            cloned = self._distances(minibatch, seen)
            losses = losses * self.settings.cloning / size.clamp(min=1e-6) + cloned
        loss = self._step(self.optimizers["actor"], losses, minibatch)
        if loss is None:
            return {}
        more = {} if cloned is None else {"imitation_loss": cloned.detach().sum() / minibatch.size}
        return {"actor_loss": loss, **more}

    def _distances(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Tensor:
        """Return the squared distances `[M]` of the most likely chunks from demonstrated ones; 0 elsewhere."""
        errors = self.policy.errors(seen.features, seen.columns["actions"])
        shown = minibatch.demonstrated
        return errors if shown is None else errors * shown.to(errors.device)

    # ---- checkpoints

    def own_state(self) -> dict[str, Any]:
        """See `CriticLearner`; also the slow copy of the policy."""
        own = {"target_policy": dict(self.target_policy.state_dict()), "noise": self.noise.get_state()}
        return super().own_state() | own

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `own_state`."""
        super().load_own_state(state)
        self.target_policy.load_state_dict(state["target_policy"])
        restore_stream(self.noise, state["noise"])


class ExplorationNoise(Hook):
    """Adds Gaussian noise to what the policy has chosen (Fujimoto et al. 2018, arXiv:1802.09477, section 5).

    Args:
        simulator: its spec, for the range of actions.
        deviation: standard deviation, in units of half the action range.
    """

    def __init__(self, simulator: SimulatorSpec, deviation: float) -> None:
        self._low, self._high = simulator.action_low, simulator.action_high
        self._deviation = deviation * unit_range(simulator)[1]

    def decide(self, decision: Decision) -> dict[str, NDArray[Any]]:
        """See `Hook`; random actions stay."""
        actions = decision.actions
        if not decision.random:
            drawn = torch.randn(actions.shape, generator=decision.noise, device=decision.noise.device)
            noisy = actions + self._deviation * drawn.cpu().numpy()
            actions = noisy.clip(self._low, self._high).astype(np.float32)
        return {"actions": actions}
