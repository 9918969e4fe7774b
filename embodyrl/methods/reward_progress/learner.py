"""Learning to predict progress from successful demonstrations, for rewards (`algorithm.reward: progress`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.data.judgements import ProgressLabels
from embodyrl.methods.judges.learner import JudgeLearner
from embodyrl.models.classifier import ProgressPredictor
from embodyrl.models.judging import PROGRESS


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How wrong predictions are about observations that were not learned from."""

    observations: int
    mean: float
    """Mean absolute error, of a progress of 0 .. 1."""
    constant: float
    """The same of the best constant (the median)."""
    ordered: float
    """Share of the pairs of held-out observations of different progress whose order is right: 0.5 by chance."""
    horizon: int
    """Actions that a progress of 0 is away from success."""

    @classmethod
    def of(cls, predicted: NDArray[np.float32], answers: NDArray[np.float32], horizon: int) -> Errors:
        """Compute them."""
        found, wanted = predicted.astype(np.float64), answers.astype(np.float64)
        later = wanted[:, None] > wanted[None, :]
        right = (found[:, None] > found[None, :])[later]
        return cls(
            observations=len(wanted),
            mean=float(np.abs(found - wanted).mean()),
            constant=float(np.abs(wanted - np.median(wanted)).mean()),
            ordered=float(right.mean()) if len(right) else 1.0,
            horizon=horizon,
        )

    def line(self) -> str:
        """Return them for people."""
        return (
            f"error {self.mean:.3f} ({self.mean * self.horizon:.1f} of up to {self.horizon} actions; a constant: "
            f"{self.constant:.3f})   pairs in order {self.ordered:.2f}   {self.observations} observations"
        )


class ProgressLearner(JudgeLearner):
    """Learns to say from an observation how far the task is."""

    written = PROGRESS.folder
    judge_class = ProgressPredictor
    labels = ProgressLabels
    judge: ProgressPredictor
    shown: ProgressLabels
    _errors: Errors

    def evaluate(self, message: Callable[[str], None]) -> dict[str, float]:
        """See `LearnerAlone`: on what was held out."""
        observations, answers = self.shown.held_out()
        predicted = np.concatenate([self.judge.progress(each) for each in observations])
        self._errors = Errors.of(predicted, answers.astype(np.float32), self.shown.horizon)
        message(f"held out   {self._errors.line()}")
        return {"eval/error": self._errors.mean, "eval/ordered": self._errors.ordered}

    def held_out(self) -> dict[str, Any]:
        """See `JudgeLearner`."""
        return dataclasses.asdict(self._errors)

    def closing(self, folder: Path) -> Iterator[str]:
        """See `LearnerAlone`."""
        yield f"on what was held out: {self._errors.line()}"
        if self._errors.mean >= self._errors.constant:
            yield "it predicts no better than a constant: record more demonstrations, or learn for longer"
        yield f"next: embodyrl run CONFIG algorithm.reward.name=progress algorithm.reward.path={folder}"
