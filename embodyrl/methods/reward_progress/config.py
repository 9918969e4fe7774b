"""Settings of learning to predict progress. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.methods.judges.config import JudgeConfig


@dataclass(frozen=True, kw_only=True)
class RewardProgressConfig(JudgeConfig):
    """Learning of a predictor of progress."""
