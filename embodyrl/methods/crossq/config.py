"""Settings of CrossQ. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from embodyrl.config.issues import LEAVE_OUT, ConfigIssue
from embodyrl.config.schema import Config, setting
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.methods.sac.config import OffPolicyConfig, SACConfig

UNREAD = ("layer_norm", "subset", "tau")
"""Settings of critics with slow copies and layer normalisation, which these do not have."""


@dataclass(frozen=True, kw_only=True)
class NormedCriticsConfig(CriticsConfig):
    """Networks that value a chunk of actions in a state, with batch renormalisation of all layers, and no slow copies:
    `layer_norm`, `subset` and `tau` are not read."""

    momentum: float = setting(0.01, above=0.0, high=1.0)
    """Share of a minibatch's mean and deviation in the running ones, which actions are judged by."""
    plain_updates: int = setting(100_000, low=0)
    """Updates with plain batch normalisation, until the running statistics mean something."""


@dataclass(frozen=True, kw_only=True)
class CrossConfig(OffPolicyConfig):
    """Learning from what was collected before, too, with critics without slow copies."""

    critics: NormedCriticsConfig = field(default_factory=NormedCriticsConfig)
    """Networks that value actions."""
    actor_every: int = setting(3, low=1)
    """Steps of the critics for every step of the policy and the temperature (policy_delay in sb3-contrib)."""


@dataclass(frozen=True, kw_only=True)
class CrossQConfig(SACConfig):
    """Soft actor-critic without target networks."""

    off_policy: CrossConfig = field(default_factory=CrossConfig)
    """Learning from what was collected before, too."""

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also that nothing is set for slow copies, and that there is one rank."""
        yield from super().check(config)
        critics = self.off_policy.critics
        usual = {each.name: each.default for each in dataclasses.fields(critics)}
        for name in (name for name in UNREAD if getattr(critics, name) != usual[name]):
            path = f"algorithm.off_policy.critics.{name}"
            yield ConfigIssue(
                (path, "algorithm.name"),
                f"{path} is set, and the critics of algorithm {self.name!r} have batch renormalisation and no slow "
                "copies",
                "leave it out, or set algorithm to sac",
                fix={path: LEAVE_OUT},
            )
        if config.engine.parallel.world_size not in ("auto", 1):
            yield ConfigIssue(
                ("engine.parallel.world_size", "algorithm.name"),
                f"engine.parallel.world_size = {config.engine.parallel.world_size}, and algorithm {self.name!r} "
                "normalises by statistics of whole minibatches, of which each rank would have a part",
                "set it to 1, or algorithm to sac",
                fix={"engine.parallel.world_size": 1},
            )
