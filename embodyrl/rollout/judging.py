"""A classifier of success beside the simulators: it says when an episode is solved, and may end it.

Shapes: `M` slots, `C` actions in a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodyrl.algorithms.options import ClassifierRewardConfig
from embodyrl.config.schema import Config
from embodyrl.models.classifier import SuccessClassifier
from embodyrl.models.judging import find_classifier
from embodyrl.rollout.hooks import Hook

if TYPE_CHECKING:
    from embodyrl.envs.manager import StepResult


def judge_of(config: Config, num_envs: int, device: torch.device) -> ClassifierReward | None:
    """Return what judges the episodes of a process's slots; None if rewards do not come from a classifier.

    Raises:
        PolicyError: its files are missing or damaged.
    """
    settings = config.algorithm.parts().get("reward")
    if not isinstance(settings, ClassifierRewardConfig):
        return None
    folder = find_classifier(Path(str(settings.path)))
    return ClassifierReward(SuccessClassifier.load(folder, device), settings, num_envs)


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
