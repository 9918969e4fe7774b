"""Learning a classifier of success from demonstrations, for rewards (`algorithm: reward_classifier`).

It is small and learned in seconds, without simulators: a run that was interrupted begins again.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embodyrl.algorithms.options import RewardClassifierConfig
from embodyrl.config import LoadedConfig
from embodyrl.config.schema import Config
from embodyrl.models.judging import CLASSIFIER, ClassifierFacts, Seen
from embodyrl.runner.build import Elsewhere, Host, build_engine, open_sinks, settings_of_torch_kept
from embodyrl.runner.rundir import RunDir

if TYPE_CHECKING:
    from embodyrl.data.judgements import Judgements
    from embodyrl.engine.hybrid import HybridEngine
    from embodyrl.models.classifier import SuccessClassifier
    from embodyrl.tracking import Sink

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
        from embodyrl.tracking.intervals import wilson_interval

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


def learn_classifier(loaded: LoadedConfig, directory: RunDir, host: Host) -> None:
    """Learn a classifier and write it into the folder `classifier` of a run directory.

    Args:
        loaded: the config.
        directory: of the run.
        host: settings of the program that the run is part of.

    Raises:
        DatasetError: the demonstrations do not suffice.
    """
    from embodyrl.data.judgements import Judgements
    from embodyrl.data.reader import open_dataset
    from embodyrl.models.classifier import SuccessClassifier, spec_of_answers
    from embodyrl.runner.runner import is_due

    started, config = time.monotonic(), loaded.config
    assert isinstance(config.algorithm, RewardClassifierConfig), "its registration says so"
    dataset = open_dataset(config)
    shown = Judgements(dataset, config, config.algorithm.held_out)
    seen = _seen(config, dataset.spec.state_dim)
    single = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, chunk_size=1))
    last, steps = config.run.iterations, config.data.steps
    with open_sinks(loaded, directory, 0, host) as sinks, settings_of_torch_kept():
        _message(directory, sinks, f"demonstrations: {shown.describe()}")
        engine = build_engine(single, Elsewhere(spec_of_answers(seen)), weights=None, folder=directory.path)
        classifier = SuccessClassifier(engine.policy)
        for iteration in range(1, last + 1):
            begun = time.perf_counter()
            metrics = engine.sft_step(shown.batches((iteration - 1) * steps, steps))
            metrics["time/iteration"] = time.perf_counter() - begun
            if iteration == last or is_due(iteration, config.run.eval_every):
                scores = _scores(classifier, shown)
                metrics |= {"eval/precision": scores[0].precision, "eval/recall": scores[0].recall}
                _message(directory, sinks, f"held out   {scores[0].line()}")
            directory.keep()
            for sink in sinks:
                sink.log(iteration, metrics)
        _write(config, seen, engine, scores, directory)
        _message(directory, sinks, f"done in {time.monotonic() - started:.1f} s   on what was held out:")
        for each in scores:
            _message(directory, sinks, f"  {each.line()}")
        path = f"algorithm.reward.name=classifier algorithm.reward.path={directory.path}"
        _message(directory, sinks, f"next: embodyrl run CONFIG {path} algorithm.reward.threshold=0.9")


def _seen(config: Config, state_dim: int) -> Seen:
    """Return the inputs of a classifier."""
    env = config.env
    height, width = env.image_size if env.cameras else (0, 0)
    return Seen(state_dim=state_dim, cameras=tuple(env.cameras), image_size=(height, width), frames=env.frames)


def _scores(classifier: SuccessClassifier, shown: Judgements) -> list[Scores]:
    """Evaluate on what was held out, for every threshold."""
    observations, answers = shown.held_out()
    probabilities = np.concatenate([classifier.probabilities(each) for each in observations])
    return [Scores.of(probabilities, answers, threshold) for threshold in THRESHOLDS]


def _write(config: Config, seen: Seen, engine: HybridEngine, scores: list[Scores], directory: RunDir) -> None:
    """Write the classifier beside its place, and rename it."""
    from embodyrl.engine.lora import save_policy

    held_out = {
        f"{each.threshold:g}": dataclasses.asdict(each) | {"precision": each.precision, "recall": each.recall}
        for each in scores
    }
    facts = ClassifierFacts(model=config.model.name, seen=seen, tasks=tuple(config.env.tasks), held_out=held_out)
    with tempfile.TemporaryDirectory(dir=directory.path, prefix=f".{CLASSIFIER}.") as temporary:
        folder = Path(temporary) / CLASSIFIER
        folder.mkdir()
        save_policy(engine.policy, folder, config.model)
        facts.write(folder)
        folder.rename(directory.path / CLASSIFIER)


def _message(directory: RunDir, sinks: Sequence[Sink], text: str) -> None:
    """Write a line for people to run.log, and to the sinks that show messages."""
    directory.note(text)
    for sink in sinks:
        sink.message(text)
