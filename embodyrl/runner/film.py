"""Filming the first episodes of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import EpisodeSpec
from embodyrl.envs.manager import EnvManager, StepResult
from embodyrl.tracking.video import TiledVideo


class Film:
    """Steps simulators for an evaluation and films what they do.

    Args:
        manager: the simulators.
        path: where the film goes.
        episodes: those that are filmed: the first ones of the evaluation, a tile each.
    """

    def __init__(self, manager: EnvManager, path: Path, episodes: Sequence[EpisodeSpec]) -> None:
        self.count = len(episodes)
        self.path = path
        self._manager = manager
        titles = [f"{episode.task}  start {episode.start_state}" for episode in episodes]
        self._video = TiledVideo(path, titles, fps=manager.spec.control_frequency)
        self._success = [False] * self.count

    def step(
        self,
        slots: NDArray[np.int64],
        numbers: NDArray[np.int64],
        actions: NDArray[np.float32],
        following: Sequence[EpisodeSpec | None],
    ) -> StepResult:
        """`EnvManager.step` with pictures; slot `slots[i]` plays episode `numbers[i]` of those that are filmed."""
        result, pictures = self._manager.step_recorded(slots, actions, following)
        for row, number in enumerate(numbers.tolist()):
            self._video.add(number, pictures[row])
            self._success[number] |= bool(result.success[row].any())
            if result.ended[row]:
                self._video.end(number, success=self._success[number])
        return result

    def __enter__(self) -> Self:
        self._video.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._video.__exit__(kind, error, where)
