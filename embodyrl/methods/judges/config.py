"""Settings of learning a network that judges observations. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Needs
from embodyrl.config.schema import Config, setting
from embodyrl.methods.sft.config import SFTConfig


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(SFTConfig):
    """Learning of a small network that judges observations, for rewards."""

    held_out: float = setting(0.2, above=0.0, below=1.0)
    """Share of the demonstrations that are not learned from: on them it is measured how right the network is."""

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return Needs(alone=True)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`."""
        from embodyrl.methods.judges import rules

        yield from rules.check(config)
