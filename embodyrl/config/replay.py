"""Options of a replay and of an expert beside the policy. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from embodyrl.config.schema import setting

REMAINING, SOLVED = "remaining", "solved"
"""Columns of what came of the episode of a decision: actions that were executed from there to its end, and whether it
was solved."""


class Labelled(StrEnum):
    """Decisions for which it is noted what an expert would do."""

    executed = "executed"
    every = "every"


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Memory of past decisions."""

    capacity: int = setting(200_000, low=1)
    """Decisions that are kept; the oldest make room for new ones. The last observation of an episode that the time
    limit cut off takes the place of one."""
    memory_mib: int = setting(2048, low=1, resumable=True)
    """Largest replay that is held in memory [MiB]. A larger one lies in an unnamed file in the run's folder."""
    start_after: int = setting(1000, low=1)
    """Decisions of all envs together before learning from them begins (learning_starts in SB3). Their actions are
    random, unless the policy has learned something before (rlpd, iql, dagger)."""


@dataclass(frozen=True, kw_only=True)
class InterveneConfig:
    """An expert beside the policy, who takes over in rollouts. In evaluations the policy acts alone."""

    expert: str | None = setting(None, registry="EXPERTS")
    """Scripted expert; `embodyrl list experts` shows them. null: the simulator's own."""
    share: float = setting(0.0, low=0.0, high=1.0)
    """Share of the decisions that the expert executes, drawn at random (beta in Ross et al. 2011)."""
    after: int | None = setting(None, low=0)
    """Control steps of an episode after which the expert executes the rest, as long as it is not solved. null: it never
    takes over for good."""
    labels: Labelled = setting(Labelled.executed)
    """Decisions for which it is noted what the expert would do, to be imitated. executed: those that it executes.
    every: all, whoever executes them."""
