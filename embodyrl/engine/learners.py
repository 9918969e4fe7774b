"""Who learns from a replay, by the algorithm's options."""

from __future__ import annotations

from typing import Any

from embodyrl.algorithms.off_policy_options import IQLConfig, RLPDConfig, SACConfig
from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.demonstrated import DemonstratedActorCritic
from embodyrl.engine.implicit import ImplicitQ
from embodyrl.engine.soft import CriticLearner, SoftActorCritic
from embodyrl.models.errors import PolicyError
from embodyrl.models.policy import Policy, SoftPolicy

LEARNERS: dict[type[AlgorithmConfig], type[CriticLearner]] = {
    RLPDConfig: DemonstratedActorCritic,
    IQLConfig: ImplicitQ,
    SACConfig: SoftActorCritic,
}
"""By options; the first that fits."""


def learner_of(policy: Policy, algorithm: AlgorithmConfig, **others: Any) -> CriticLearner | None:
    """Return what learns from a replay beside the policy; None if the algorithm has no critics of actions.

    Args:
        policy: on its device.
        algorithm: its options.
        others: see `CriticLearner`.

    Raises:
        PolicyError: the policy cannot learn so.
    """
    kind = next((learner for options, learner in LEARNERS.items() if isinstance(algorithm, options)), None)
    if kind is None:
        return None
    if not isinstance(policy, SoftPolicy) or not policy.learns_from_replay:
        raise PolicyError(f"model {policy.name!r} cannot learn from a replay: see model.head")
    return kind(policy, algorithm=algorithm, **others)  # type: ignore[arg-type]
