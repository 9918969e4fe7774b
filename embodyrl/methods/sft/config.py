"""Settings of supervised fine-tuning. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import IterationSize, Learns, Needs
from embodyrl.config.schema import AlgorithmConfig, Config
from embodyrl.data.check import check_to_imitate
from embodyrl.screen import counted


@dataclass(frozen=True, kw_only=True)
class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning; its settings are in the section data."""

    @property
    def family(self) -> str:
        """See `AlgorithmConfig`."""
        return "imitation"

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return Needs(learns=Learns.imitation)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`."""
        yield from check_to_imitate(config)

    def batches(self, config: Config) -> IterationSize:
        """See `AlgorithmConfig`."""
        steps, minibatch = config.data.steps, config.data.batch_size
        return IterationSize(decisions=steps * minibatch, steps=steps, minibatch=minibatch)

    def describe(self, config: Config) -> str:
        """See `AlgorithmConfig`."""
        data = config.data
        return (
            f"{self.name}   {counted(config.run.iterations, 'iteration')} of {data.steps} x "
            f"{counted(data.batch_size, 'chunk')} of {counted(config.rollout.chunk_size, 'action')} from {data.path}"
        )
