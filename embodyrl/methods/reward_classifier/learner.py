"""Learning a classifier of success from demonstrations, for rewards (`algorithm.reward: classifier`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import Config
from embodyrl.data.judgements import Judgements
from embodyrl.methods.judges.learner import JudgeLearner
from embodyrl.methods.learner import BuildEngine
from embodyrl.models.classifier import SuccessClassifier
from embodyrl.models.judging import CLASSIFIER
from embodyrl.tracking.intervals import wilson_interval

THRESHOLDS = (0.5, 0.7, 0.9, 0.95)
"""Probabilities from which on an observation counts as a success, for which it is shown how often that is right."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How often a classifier is right about observations that it was not learned from, for one threshold."""

    threshold: float
    true_positives: int
    false_positives: int
    solved: int
    """Observations that are solved."""

    @classmethod
    def of(cls, probabilities: NDArray[np.float32], answers: NDArray[np.bool_], threshold: float) -> Scores:
        """Count."""
        found = probabilities >= threshold
        return cls(
            threshold=threshold,
            true_positives=int((found & answers).sum()),
            false_positives=int((found & ~answers).sum()),
            solved=int(answers.sum()),
        )

    @property
    def precision(self) -> float:
        """Share of what counts as a success that is one; 1 if nothing does."""
        found = self.true_positives + self.false_positives
        return self.true_positives / found if found else 1.0

    @property
    def recall(self) -> float:
        """Share of the successes that counts as one."""
        return self.true_positives / self.solved

    def line(self) -> str:
        """Return them for people, with 95 % intervals."""
        shown = []
        for name, rate, trials in (
            ("precision", self.precision, self.true_positives + self.false_positives),
            ("recall", self.recall, self.solved),
        ):
            low, high = wilson_interval(self.true_positives, trials) if trials else (0.0, 1.0)
            shown.append(f"{name} {rate:.2f} [{low:.2f}, {high:.2f}]")
        return (
            f"threshold {self.threshold:.2f}   {'   '.join(shown)}   "
            f"{self.false_positives} false, {self.solved - self.true_positives} missed"
        )


class ClassifierLearner(JudgeLearner):
    """Learns to say from an observation whether the task is solved."""

    written = CLASSIFIER.folder
    judge_class = SuccessClassifier
    labels = Judgements
    judge: SuccessClassifier

    def __init__(self, config: Config, build: BuildEngine) -> None:
        super().__init__(config, build)
        self._scores: list[Scores] = []

    def evaluate(self, message: Callable[[str], None]) -> dict[str, float]:
        """See `LearnerAlone`: on what was held out, for every threshold."""
        observations, answers = self.shown.held_out()
        probabilities = np.concatenate([self.judge.probabilities(each) for each in observations])
        self._scores = [Scores.of(probabilities, answers.astype(np.bool_), threshold) for threshold in THRESHOLDS]
        first = self._scores[0]
        message(f"held out   {first.line()}")
        return {"eval/precision": first.precision, "eval/recall": first.recall}

    def held_out(self) -> dict[str, Any]:
        """See `JudgeLearner`."""
        return {
            f"{each.threshold:g}": dataclasses.asdict(each) | {"precision": each.precision, "recall": each.recall}
            for each in self._scores
        }

    def closing(self, folder: Path) -> Iterator[str]:
        """See `LearnerAlone`."""
        yield "on what was held out:"
        yield from (f"  {each.line()}" for each in self._scores)
        path = f"algorithm.reward.name=classifier algorithm.reward.path={folder}"
        yield f"next: embodyrl run CONFIG {path} algorithm.reward.threshold=0.9"
