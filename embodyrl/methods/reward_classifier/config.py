"""Settings of learning a classifier of success. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Needs
from embodyrl.config.schema import Config, setting
from embodyrl.methods.sft.config import SFTConfig


@dataclass(frozen=True, kw_only=True)
class RewardClassifierConfig(SFTConfig):
    """Learning of a classifier of success."""

    held_out: float = setting(0.2, above=0.0, below=1.0)
    """Share of the demonstrations that are not learned from: on them precision and recall are measured."""

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return Needs(alone=True)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`."""
        from embodyrl.methods.reward_classifier import rules

        yield from rules.check(config)
