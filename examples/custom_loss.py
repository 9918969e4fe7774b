"""A loss and an advantage in one file, outside the package, each with options of its own.

    embodyrl run examples/custom_loss.yaml

A component names what it needs as keyword arguments: columns of the batch and its own options, which are a dataclass.
The dataclass becomes the component's section of the YAML: checked, documented, with defaults. docs/algorithms.md lists
the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodyrl.algorithms.losses import LossOutput, log_ratio
from embodyrl.config.schema import AdvantageConfig, LossConfig, setting
from embodyrl.registry import ADVANTAGES, LOSSES


@dataclass(frozen=True, kw_only=True)
class SPOConfig(LossConfig):
    """Simple policy optimisation."""

    width: float = setting(0.2, above=0.0, below=1.0)
    """The loss has its minimum where the probability ratio is this far from 1."""


def spo(*, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, width: float) -> LossOutput:
    """Loss of every log-prob, Xie et al. (2025), arXiv:2401.16025: -A r + |A| (r - 1)^2 / (2 width).

    PPO stops pushing a ratio that has left its clip; here it is pulled back.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    losses = -advantages * ratio + advantages.abs() * (ratio - 1.0).square() / (2.0 * width)
    return LossOutput(losses=losses, metrics={"beyond_width": ((ratio - 1.0).abs() > width).float()})


@dataclass(frozen=True, kw_only=True)
class PairwiseConfig(AdvantageConfig):
    """Comparisons between the episodes of a group."""

    margin: float = setting(1.0e-6, low=0.0)
    """Returns that differ by no more than this count as equal."""


def pairwise(*, rewards: Tensor, valid: Tensor, group_size: int, margin: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns `[T, B]` of whole episodes: the share of its group that an episode beats, less the share
    that beats it, -1 .. 1. Only the order of returns matters, so that a single one cannot outweigh the others.
    """
    returns = (rewards * valid).sum(0)
    in_groups = returns.view(-1, group_size)
    played = valid.any(0).view(-1, 1, group_size)  # an episode that was lost with its simulator counts nowhere
    lead = in_groups.unsqueeze(2) - in_groups.unsqueeze(1)  # [P, G, G], of each episode before each other one
    beaten = torch.where(lead.abs() > margin, lead.sign(), 0.0) * played
    score = beaten.sum(2) / (played.sum(2) - 1).clamp(min=1)
    return torch.where(valid, score.flatten(), 0.0), torch.where(valid, returns, 0.0)


LOSSES.register("spo", target=spo, options=SPOConfig, whole=False, summary="pulls ratios back")

ADVANTAGES.register(
    "pairwise",
    target=pairwise,
    options=PairwiseConfig,
    critic=False,
    whole=True,
    group=True,
    summary="who beats whom in a group",
)
