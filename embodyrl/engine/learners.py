"""Who learns from a replay, by the algorithm's options."""

from __future__ import annotations

from typing import Any, TypeGuard

from embodyrl.algorithms.off_policy_options import CriticizedAlgorithmConfig, IQLConfig, RLPDConfig, SACConfig
from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.demonstrated import DemonstratedActorCritic
from embodyrl.engine.implicit import Imitate, ImplicitQ
from embodyrl.engine.onlooker import Onlooker
from embodyrl.engine.soft import CriticLearner, SoftActorCritic
from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.policy import Policy, SoftPolicy

LEARNERS: dict[type[AlgorithmConfig], type[CriticLearner]] = {
    RLPDConfig: DemonstratedActorCritic,
    IQLConfig: ImplicitQ,
    SACConfig: SoftActorCritic,
}
"""By options; the first that fits."""


def shows_critics(policy: Policy, algorithm: AlgorithmConfig) -> TypeGuard[SoftPolicy]:
    """Return whether critics of actions see what the policy sees, and its encoder learns with them."""
    learns = isinstance(algorithm, CriticizedAlgorithmConfig)
    return learns and isinstance(policy, SoftPolicy) and policy.learns_from_replay


def onlooker_for(policy: Policy, algorithm: AlgorithmConfig, simulator: SimulatorSpec, seed: int) -> Onlooker | None:
    """Return what critics see with where the policy shows them nothing; None where it does, or there are no critics."""
    if not isinstance(algorithm, IQLConfig) or shows_critics(policy, algorithm):
        return None
    return Onlooker(simulator, policy.spec.chunk_size, seed)


def learner_of(
    policy: Policy, algorithm: AlgorithmConfig, *, onlooker: Onlooker | None, imitate: Imitate, **others: Any
) -> CriticLearner | None:
    """Return what learns from a replay beside the policy; None if the algorithm has no critics of actions.

    Args:
        policy: on its device.
        algorithm: its options.
        onlooker: see `onlooker_for`.
        imitate: see `ImplicitQ`.
        others: see `CriticLearner`.

    Raises:
        PolicyError: the policy cannot learn so.
    """
    kind = next((learner for options, learner in LEARNERS.items() if isinstance(algorithm, options)), None)
    if kind is None:
        return None
    if isinstance(algorithm, IQLConfig):
        others |= {"onlooker": onlooker, "imitate": imitate}
    if onlooker is None and not shows_critics(policy, algorithm):
        raise PolicyError(f"model {policy.name!r} cannot learn from a replay: see model.head")
    return kind(policy, algorithm=algorithm, **others)  # type: ignore[arg-type]
