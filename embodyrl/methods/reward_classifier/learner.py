"""Learning a classifier of success from demonstrations, for rewards (`algorithm.reward: classifier`).

It is small and learned in seconds, without simulators: a run that was interrupted begins again.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import Config
from embodyrl.data.judgements import Judgements
from embodyrl.data.store import EpisodeStore
from embodyrl.methods.imitation.imitation import Imitation
from embodyrl.methods.learner import BuildEngine, LearnerAlone
from embodyrl.methods.reward_classifier.config import RewardClassifierConfig
from embodyrl.models.classifier import SuccessClassifier, spec_of_answers
from embodyrl.models.judging import CLASSIFIER, ClassifierFacts, ClassifierInput
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


class ClassifierLearner(LearnerAlone):
    """Learns to say from an observation whether the task is solved.

    Args:
        config: of the run.
        build: builds the engine of a network.

    Raises:
        DatasetError: the demonstrations do not suffice.
    """

    written = CLASSIFIER

    def __init__(self, config: Config, build: BuildEngine) -> None:
        assert isinstance(config.algorithm, RewardClassifierConfig), "its registration says so"
        self._config = config
        store = EpisodeStore.open(config)
        self._shown = Judgements(store, config.algorithm.held_out)
        env = config.env
        height, width = env.image_size if env.cameras else (0, 0)
        self._seen = ClassifierInput(
            state_dim=store.dataset.spec.state_dim,
            cameras=tuple(env.cameras),
            image_size=(height, width),
            frames=env.frames,
        )
        single = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, chunk_size=1))
        self._engine = build(single, spec_of_answers(self._seen))
        self._imitation = Imitation(self._engine)
        self._classifier = SuccessClassifier(self._engine.policy)
        self._scores: list[Scores] = []

    def describe(self) -> str:
        """See `LearnerAlone`."""
        return f"demonstrations: {self._shown.describe()}"

    def iterate(self, number: int) -> dict[str, float]:
        """See `LearnerAlone`."""
        steps = self._config.data.steps
        return self._imitation.learn(self._shown.batches((number - 1) * steps, steps))

    def evaluate(self, message: Callable[[str], None]) -> dict[str, float]:
        """See `LearnerAlone`: on what was held out, for every threshold."""
        observations, answers = self._shown.held_out()
        probabilities = np.concatenate([self._classifier.probabilities(each) for each in observations])
        self._scores = [Scores.of(probabilities, answers, threshold) for threshold in THRESHOLDS]
        first = self._scores[0]
        message(f"held out   {first.line()}")
        return {"eval/precision": first.precision, "eval/recall": first.recall}

    def write(self, folder: Path) -> None:
        """See `LearnerAlone`: the classifier, written beside its place and renamed."""
        from embodyrl.engine.lora import save_policy

        config = self._config
        held_out = {
            f"{each.threshold:g}": dataclasses.asdict(each) | {"precision": each.precision, "recall": each.recall}
            for each in self._scores
        }
        facts = ClassifierFacts(
            model=config.model.name, seen=self._seen, tasks=tuple(config.env.tasks), held_out=held_out
        )
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{CLASSIFIER}.") as temporary:
            place = Path(temporary) / CLASSIFIER
            place.mkdir()
            save_policy(self._engine.policy, place, config.model)
            facts.write(place)
            place.rename(folder / CLASSIFIER)

    def closing(self, folder: Path) -> Iterator[str]:
        """See `LearnerAlone`."""
        yield "on what was held out:"
        yield from (f"  {each.line()}" for each in self._scores)
        path = f"algorithm.reward.name=classifier algorithm.reward.path={folder}"
        yield f"next: embodyrl run CONFIG {path} algorithm.reward.threshold=0.9"
