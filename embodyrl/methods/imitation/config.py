"""Settings that methods which imitate share. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from embodyrl.config.issues import LEAVE_OUT, ConfigIssue
from embodyrl.config.schema import AlgorithmConfig, RewardConfig, setting


@dataclass(frozen=True, kw_only=True)
class FirstImitationConfig:
    """Imitation of demonstrations with which a run begins."""

    first_steps: int = setting(1000, low=0)
    """Optimizer steps of imitation alone before anything is collected, in minibatches of `data.batch_size`: behaviour
    cloning, whose success is printed beside that of every evaluation. 0: none; rollouts then begin with random
    actions."""


def rewards_without_use(algorithm: AlgorithmConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for each setting of rewards that is changed though a method learns from none."""
    for each in dataclasses.fields(AlgorithmConfig):
        found = getattr(algorithm, each.name)
        path = f"algorithm.{each.name}"
        if isinstance(found, RewardConfig):
            is_usual, path = found.name == RewardConfig().name, f"{path}.name"
        else:
            is_usual = each.name == "name" or found == each.default
        if not is_usual:
            yield ConfigIssue(
                path,
                f"{path.removesuffix('.name')} has no use: algorithm {algorithm.name!r} only imitates, and learns from "
                "no rewards",
                "leave it out",
                fix={path: LEAVE_OUT},
            )
