"""What is wrong with the options of advantage estimators and filters, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.algorithms.options import AccuracyConfig, GRPOConfig
from embodyrl.config.schema import AdvantageConfig, Config, NormLevel

Objection = tuple[str, str, str]
"""The setting, what is wrong with it, and what to do."""


def compares_groups(options: AdvantageConfig) -> bool:
    """Whether `grpo` compares the episodes of a group, rather than those of the whole batch."""
    assert isinstance(options, GRPOConfig)
    return NormLevel.group in (options.mean_level, options.std_level)


def check_grpo(config: Config) -> Iterator[Objection]:
    """Leave-one-out is about a mean."""
    options = config.algorithm.advantage
    assert isinstance(options, GRPOConfig)
    if options.leave_one_out and options.mean_level is NormLevel.none:
        yield (
            "algorithm.advantage.leave_one_out",
            "algorithm.advantage.leave_one_out has no use: algorithm.advantage.mean_level is 'none', so no mean is "
            "subtracted",
            "set algorithm.advantage.mean_level to group, or algorithm.advantage.leave_one_out to false",
        )


def check_accuracy(config: Config) -> Iterator[Objection]:
    """Some success rate lies within the filter's limits."""
    options = config.algorithm.filter
    assert isinstance(options, AccuracyConfig)
    if options.accuracy_low > options.accuracy_high:
        yield (
            "algorithm.filter.accuracy_low",
            f"algorithm.filter.accuracy_low = {options.accuracy_low:g} is above algorithm.filter.accuracy_high = "
            f"{options.accuracy_high:g}, so that no group would be learned from",
            f"set algorithm.filter.accuracy_low to {options.accuracy_high:g} or less",
        )
