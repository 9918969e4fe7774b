"""Settings of methods that learn from the velocities of a flow policy. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from embodyrl.config.infos import model_info
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Learns, Needs
from embodyrl.config.rules import on_policy_algorithms
from embodyrl.config.schema import Config, RolloutMode, setting
from embodyrl.methods.on_policy.config import NewestConfig
from embodyrl.models.flow.config import FlowInfo
from embodyrl.registry import SupportedModel


@dataclass(frozen=True, kw_only=True)
class VelocitiesConfig(NewestConfig):
    """Learning from the newest rollout by velocities between its chunks and noise."""

    points: int = setting(8, low=1, high=1024)
    """Points between each chunk and noise, drawn once for an update (N_mc in FPO)."""

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return Needs(learns=Learns.velocity, rollouts=True)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also that the model is a flow policy, and that its newest self has acted."""
        yield from super().check(config)
        model = config.model.name
        if model in SupportedModel and not isinstance(model_info(model), FlowInfo):
            flow = [name for name in SupportedModel.names() if isinstance(model_info(name), FlowInfo)]
            yield ConfigIssue(
                ("algorithm.name", "model.name"),
                f"algorithm {self.name!r} learns from the velocities of a flow policy, and model {model!r} is none",
                f"set model to {' or '.join(flow)}, or algorithm to {on_policy_algorithms(config)}",
            )
        if config.rollout.mode is RolloutMode.async_:
            yield ConfigIssue(
                ("rollout.mode", "algorithm.name"),
                f"rollout.mode is async, but algorithm {self.name!r} compares velocities with those of the policy that "
                "an update starts from, which would not be the one that acted",
                "set rollout.mode to sync",
                fix={"rollout.mode": RolloutMode.sync.value},
            )
