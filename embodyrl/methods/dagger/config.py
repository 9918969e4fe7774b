"""Settings of dataset aggregation. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Learns, Needs
from embodyrl.config.replay import InterveneConfig, Labelled
from embodyrl.config.schema import Config, setting
from embodyrl.methods.imitation.config import FirstImitationConfig
from embodyrl.methods.replay.config import CorrectedConfig, ReplayAlgorithmConfig
from embodyrl.methods.replay.expert_rules import HERE


@dataclass(frozen=True, kw_only=True)
class AggregatedConfig(CorrectedConfig):
    """Imitation of demonstrations and of what an expert says about the policy's own decisions."""

    intervene: InterveneConfig | None = field(default_factory=lambda: InterveneConfig(labels=Labelled.every))
    """The expert."""
    demonstrations: float | str = setting("auto", low=0.0, below=1.0, words=("auto",), only_with={"data.path": ()})
    """Share of demonstrations (`data.path`) in every minibatch. auto: in proportion to their number, as if all that is
    known were one dataset."""
    imitation: FirstImitationConfig = field(default_factory=FirstImitationConfig)
    """Imitation of demonstrations with which a run begins."""


@dataclass(frozen=True, kw_only=True)
class DAggerConfig(ReplayAlgorithmConfig):
    """Dataset aggregation."""

    off_policy: AggregatedConfig = field(default_factory=AggregatedConfig)
    """Imitation of demonstrations and of what an expert says about the policy's own decisions."""

    @property
    def family(self) -> str:
        """See `AlgorithmConfig`."""
        return "imitation"

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`. Imitation wants the states that the policy gets into by itself: it acts as in
        evaluations."""
        return replace(
            super().needs(config),
            learns=Learns.imitation,
            transitions=True,
            outcomes=False,
            only_labelled=True,
            imitates_labels=True,
            most_likely=not config.eval.sample,
        )

    def smallest(self) -> Mapping[str, Any]:
        """See `AlgorithmConfig`."""
        return {**super().smallest(), "algorithm.off_policy.imitation.first_steps": 1}

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also that there is something to imitate."""
        yield from super().check(config)
        settings, path = self.off_policy, config.data.path
        if settings.intervene is None:
            yield ConfigIssue(
                (HERE, "algorithm.name"),
                f"algorithm {self.name!r} imitates an expert beside the policy, but {HERE} is null",
                f"give it {HERE}.labels, or set algorithm to sft, which learns from demonstrations alone",
            )
        if path is None and settings.imitation.first_steps:
            yield ConfigIssue(
                ("data.path", "algorithm.off_policy.imitation.first_steps", "algorithm.name"),
                f"algorithm.off_policy.imitation.first_steps = {settings.imitation.first_steps} steps imitate "
                "demonstrations, but data.path is null",
                "name the folder of a LeRobotDataset v3 (`embodyrl collect CONFIG --out DIR --episodes N` records "
                "one), or set algorithm.off_policy.imitation.first_steps to 0",
            )
