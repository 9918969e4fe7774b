"""Settings of soft actor-critic with demonstrations. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Needs
from embodyrl.config.schema import Config, setting
from embodyrl.methods.imitation.config import FirstImitationConfig
from embodyrl.methods.sac.config import OffPolicyConfig, SACConfig


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(FirstImitationConfig):
    """Imitation of demonstrated actions, beside the critics."""

    held_out: float = setting(0.2, low=0.0, below=1.0)
    """Share of the demonstrations, at least one, on which the error of a policy that has imitated the others is
    measured before the run begins; it is forgotten afterwards, and the run imitates all of them. As many steps more as
    `first_steps`. 0: the error is not measured."""
    coef: float = setting(0.1, low=0.0)
    """Weight of the imitation loss in the policy's loss; it is the mean over the demonstrated decisions of a
    minibatch."""
    cloned_coef: float = setting(0.0, low=0.0, only_with={"first_steps": ()})
    """Weight of the squared distance from the policy that imitation alone gave, in every state that is learned from. It
    lets the critics correct that policy where the demonstrations have not been, and no more. Needs `first_steps`."""
    better_only: bool = setting(False, only_with={"coef": (), "algorithm.off_policy.demonstrations": ()})
    """Imitate a demonstrated action only where the critics value it more than the policy's own (Q-filter, Nair et al.
    2018)."""


@dataclass(frozen=True, kw_only=True)
class DemonstratedConfig(OffPolicyConfig):
    """Learning from a replay and from demonstrations (`data.path`), with critics of actions."""

    demonstrations: float = setting(0.5, low=0.0, below=1.0)
    """Share of demonstrations in every minibatch. Where that is no whole number of decisions, minibatches take
    turns."""
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    """Imitation of demonstrated actions."""
    critics_first: int = setting(0, low=0)
    """Steps of the critics before the policy learns from them."""


@dataclass(frozen=True, kw_only=True)
class RLPDConfig(SACConfig):
    """Soft actor-critic with demonstrations in every minibatch."""

    off_policy: DemonstratedConfig = field(default_factory=DemonstratedConfig)
    """Learning from a replay and from demonstrations."""

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return replace(super().needs(config), transitions=True, imitates_labels=self.off_policy.imitation.coef > 0.0)

    @property
    def unread_data(self) -> Sequence[str]:
        """See `ReplayAlgorithmConfig`."""
        return ("steps",) if self.off_policy.imitation.first_steps else ("steps", "batch_size", "shift_pixels")

    def _share(self) -> str:
        return f", {self.off_policy.demonstrations:.0%} of them"

    def smallest(self) -> Mapping[str, Any]:
        """See `AlgorithmConfig`."""
        own = {"algorithm.off_policy.imitation.first_steps": 1, "algorithm.off_policy.critics_first": 0}
        return {**super().smallest(), **own}

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also the demonstrations, and that no setting of imitation lacks another."""
        yield from super().check(config)
        settings, imitation = self.off_policy, self.off_policy.imitation
        if not settings.demonstrations and not imitation.first_steps:
            yield ConfigIssue(
                ("algorithm.off_policy.demonstrations", "algorithm.off_policy.imitation.first_steps"),
                "algorithm.off_policy.demonstrations = 0 and algorithm.off_policy.imitation.first_steps = 0, so that "
                "nothing is learned from data.path",
                "raise one of them, or set algorithm to sac and data.path to null",
            )
