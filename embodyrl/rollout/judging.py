"""Judges beside the simulators: small networks that say when an episode is solved, or how far it is.

Shapes: `B` slots of a decision, `M` slots of results, `C` actions in a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodyrl.algorithms.options import ClassifierRewardConfig, Pays, ProgressRewardConfig
from embodyrl.config.schema import Config
from embodyrl.models.classifier import ProgressPredictor, SuccessClassifier
from embodyrl.models.judging import CLASSIFIER, PROGRESS
from embodyrl.registry import REWARDS, load_target
from embodyrl.rollout.hooks import Decision, Hook

if TYPE_CHECKING:
    from embodyrl.envs.manager import StepResult


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Place of a judge: one of the processes with simulators."""

    config: Config
    slots: range
    """Slots of this process, as numbered in the run."""
    device: torch.device
    cameras: tuple[str, ...]
    """Names of an observation's images, of one moment."""
    folder: Path | None
    """Of the run; None: it keeps nothing."""


def judge_of(seat: Seat) -> Hook | None:
    """Return what judges the episodes of a process's slots; None if rewards do not come from a judge.

    Raises:
        PolicyError: its files are missing or damaged.
    """
    reward = seat.config.algorithm.parts().get("reward")
    judge = None if reward is None else REWARDS.entry(reward.name).judge
    if judge is None:
        return None
    hook: Hook = load_target(judge)(seat)
    return hook


def classifier_reward(seat: Seat) -> ClassifierReward:
    """Return the hook of reward `classifier`."""
    settings = seat.config.algorithm.parts()["reward"]
    assert isinstance(settings, ClassifierRewardConfig), "its registration says so"
    folder = CLASSIFIER.find(Path(str(settings.path)))
    return ClassifierReward(SuccessClassifier.load(folder, seat.device), settings, len(seat.slots))


def progress_reward(seat: Seat) -> ProgressReward:
    """Return the hook of reward `progress`."""
    settings = seat.config.algorithm.parts()["reward"]
    assert isinstance(settings, ProgressRewardConfig), "its registration says so"
    folder = PROGRESS.find(Path(str(settings.path)))
    return ProgressReward(ProgressPredictor.load(folder, seat.device), settings, len(seat.slots))


class ClassifierReward(Hook):
    """Judges the observation after each chunk. An episode is judged solved once.

    Args:
        classifier: says how likely it is that the task is solved.
        settings: from which probability on it is, and whether that ends the episode.
        num_envs: slots of this process.
    """

    state_name = "judged"

    def __init__(self, classifier: SuccessClassifier, settings: ClassifierRewardConfig, num_envs: int) -> None:
        self._classifier, self._settings = classifier, settings
        self.solved = np.zeros(num_envs, np.bool_)
        """Slots whose present episode has been judged solved."""

    def begin(self, slots: NDArray[np.int64]) -> None:
        """See `Hook`."""
        self.solved[slots] = False

    def judge(self, slots: NDArray[np.int64], result: StepResult) -> tuple[StepResult, dict[str, NDArray[Any]]]:
        """Judge the results of chunks in these slots.

        Returns:
            The results, in which episodes that the classifier ends have terminated, and `judged [M, C]`: the action
            after which each was solved for the first time.
        """
        seen = self._classifier.probabilities(result.final_observation) >= self._settings.threshold
        now = seen & ~self.solved[slots] & ~result.lost & (result.steps > 0)
        judged = np.zeros(result.success.shape, np.bool_)
        judged[now, result.steps[now] - 1] = True
        self.solved[slots] |= now
        if self._settings.ends_episodes:
            result = replace(result, terminated=result.terminated | now, truncated=result.truncated & ~now)
        over = result.terminated | result.truncated | result.lost
        self.solved[slots[over]] = False
        return result, {"judged": judged}

    def state(self, numbers: NDArray[np.int64]) -> list[bool]:
        """Return which slots' episodes have been judged solved."""
        return [bool(each) for each in self.solved]

    def restore(self, numbers: NDArray[np.int64], state: Sequence[bool]) -> None:
        """Continue from `state`."""
        self.solved[:] = state


class ProgressReward(Hook):
    """Predicts the progress at the observation after each chunk, and before the first of an episode.

    Args:
        predictor: says how far the task is.
        settings: what is paid.
        num_envs: slots of this process.
    """

    state_name = "progress"

    def __init__(self, predictor: ProgressPredictor, settings: ProgressRewardConfig, num_envs: int) -> None:
        self._predictor, self._pays = predictor, settings.pays
        self.reached = np.full(num_envs, np.nan, np.float32)
        """Progress of each slot's episode; NaN until its first decision."""

    def begin(self, slots: NDArray[np.int64]) -> None:
        """See `Hook`."""
        self.reached[slots] = np.nan

    def decide(self, decision: Decision) -> dict[str, NDArray[Any]]:
        """See `Hook`: look at where episodes begin; later observations have been seen as those that followed."""
        new = np.isnan(self.reached[decision.slots])
        if new.any():
            self.reached[decision.slots[new]] = self._predictor.progress(decision.observation.take(new))
        return {}

    def judge(self, slots: NDArray[np.int64], result: StepResult) -> tuple[StepResult, dict[str, NDArray[Any]]]:
        """Judge the results of chunks in these slots; returns them as they are, and `progress [M, C]`: at the last
        action of each chunk what is paid for it."""
        after = self._predictor.progress(result.final_observation)
        paid = after - self.reached[slots] if self._pays is Pays.gain else after
        counts = ~result.lost & (result.steps > 0)
        progress = np.zeros(result.success.shape, np.float32)
        progress[counts, result.steps[counts] - 1] = paid[counts]
        over = result.terminated | result.truncated | result.lost
        self.reached[slots] = np.where(over, np.float32(np.nan), after)
        return result, {"progress": progress}

    def state(self, numbers: NDArray[np.int64]) -> list[float]:
        """Return the progress of each slot's episode; -1 where no decision has been made in it."""
        return [-1.0 if np.isnan(each) else float(each) for each in self.reached]

    def restore(self, numbers: NDArray[np.int64], state: Sequence[float]) -> None:
        """Continue from `state`."""
        self.reached[:] = [np.nan if each < 0.0 else each for each in state]
