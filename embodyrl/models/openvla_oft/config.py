"""Options of OpenVLA-OFT, and the check of its config. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config, setting
from embodyrl.models.prismatic.check import PrismaticInfo
from embodyrl.models.prismatic.config import PrismaticConfig
from embodyrl.registry import ALGORITHMS

ACTION_HEAD, PROPRIO_PROJECTOR = "action_head", "proprio_projector"
"""Prefixes of the files of parts that checkpoints keep separately."""


class ActionHead(StrEnum):
    """Computation of actions from the language model's hidden states."""

    discrete = "discrete"
    l1 = "l1"


class Normalization(StrEnum):
    """Statistics that are mapped to -1 and 1."""

    q99 = "q99"
    min_max = "min_max"


@dataclass(frozen=True, kw_only=True)
class OpenVLAOFTConfig(PrismaticConfig):
    """OpenVLA-OFT: several images, a chunk of actions in one pass."""

    action_head: ActionHead = setting(ActionHead.discrete)
    """discrete: action tokens, which reinforcement learning needs. l1: a regression network; it has no probabilities,
    so that it can be evaluated and trained on demonstrations only."""
    num_images: int = setting(1, low=1)
    """Images per observation, which is the number of `env.cameras`."""
    use_proprio: bool = setting(False)
    """Pass the robot's state to the model as well."""
    append_stop_token: bool = setting(True)
    """End the sequence with the stop token, as public training and evaluation do. Models that were trained with RLinf
    go without it."""
    normalization: Normalization = setting(Normalization.q99)
    """q99: -1 and 1 are the 1st and 99th percentile. min_max: the ends of the range, as models for ALOHA have it."""


class OpenVLAOFTInfo(PrismaticInfo):
    """OpenVLA-OFT."""

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config of OpenVLA-OFT."""
        model = config.model
        assert isinstance(model, OpenVLAOFTConfig)
        says_numbers = model.action_head is ActionHead.l1
        algorithm, needs = config.algorithm.name, config.algorithm.needs(config)
        if says_numbers and algorithm in ALGORITHMS and not ALGORITHMS.entry(algorithm).demonstrations:
            yield ConfigIssue(
                "model.action_head",
                f"model.action_head = l1 is a regression without probabilities, which algorithm {algorithm!r} cannot "
                "improve",
                "set model.action_head to discrete, or algorithm to one that learns from demonstrations",
            )
        elif says_numbers and needs.rollouts:
            yield ConfigIssue(
                ("model.action_head", "algorithm.name"),
                f"model.action_head = l1 is a regression without probabilities, and rollouts of algorithm {algorithm!r}"
                " draw actions",
                (f"set {needs.to_roll_out_nothing}, or " if needs.to_roll_out_nothing else "set ")
                + "model.action_head to discrete",
            )
        if says_numbers and config.eval.sample:
            yield ConfigIssue(
                "eval.sample",
                "eval.sample = true draws actions, but model.action_head = l1 is a regression without probabilities",
                "set eval.sample to false",
            )
        yield from super().check(config)

    def _images(self, model: OpenVLAOFTConfig) -> int:
        return model.num_images

    def _heads(self, model: OpenVLAOFTConfig) -> tuple[str, ...]:
        parts = ((ACTION_HEAD, model.action_head is ActionHead.l1), (PROPRIO_PROJECTOR, model.use_proprio))
        return tuple(name for name, used in parts if used)
