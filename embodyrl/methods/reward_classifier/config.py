"""Settings of learning a classifier of success. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.methods.judges.config import JudgeConfig


@dataclass(frozen=True, kw_only=True)
class RewardClassifierConfig(JudgeConfig):
    """Learning of a classifier of success."""
