"""Demonstrations as decisions for critics: what was seen, what was executed, what came of it, what followed.

A dataset does not say all of that in itself, so that four things decide what a frame is worth:

- `next.done` marks the last frame of every episode, whatever ended it. An episode has terminated where the task was
  solved and this ends it (by `env.end_at_success`, or because a classifier of success would have), or where the
  recorder noted that the simulator ended it. What the demonstrator did after a success that ends it, or after
  `env.max_episode_steps`, does not exist in rollouts, and is left out.
- What followed the last frame is known only if it was recorded (`embodyrl collect` does, other recorders do not).
  Without it, an episode that has not terminated loses its last chunk.
- Where a push interfered, the recorded action is what the demonstrator wanted. Without the executed one beside it, such
  a frame is in no chunk.
- Chunks may begin at any frame, and reach beyond the end only if the task was solved inside of them.

Shapes: `N` decisions, `M` of them, `T` frames of an episode, `C` actions in a chunk, `D` action dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.replay import REMAINING, SOLVED
from embodyrl.config.schema import AtEnd
from embodyrl.data.layout import DatasetError, Episode
from embodyrl.data.store import EpisodeStore
from embodyrl.screen import counted


@dataclass(frozen=True, kw_only=True)
class _Decisions:
    """Decisions of an episode."""

    starts: NDArray[np.int64]
    """Frames at which chunks begin."""
    steps: NDArray[np.int64]
    """Executed actions of each."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    length: int
    """Frames of the episode as a rollout would have it."""


class Transitions:
    """All decisions of a dataset, in memory; images are there once.

    Args:
        store: the demonstrations.
        task_descriptions: those that a rollout's `task_index` refers to.
        judge_ends: in rollouts a classifier says what is solved: whether that ends an episode; None: there is none.

    Raises:
        DatasetError: they have no rewards, no usable decision, or are too large.
    """

    def __init__(
        self, store: EpisodeStore, task_descriptions: Sequence[str] = (), *, judge_ends: bool | None = None
    ) -> None:
        self.store = store
        self.task_descriptions = list(task_descriptions)
        """Those that the column `task_index` refers to: the given ones, and others of the dataset after them."""
        self._config, self._size = store.config, store.config.rollout.chunk_size
        self._judge_ends = judge_ends
        self._whole_episodes = self._config.algorithm.needs(self._config).whole_episodes
        folder = store.dataset.folder
        if not store.dataset.spec.outcome and self._config.algorithm.needs(self._config).outcomes:
            raise DatasetError(
                f"{folder} does not hold both rewards and successes, which critics learn from",
                "record it anew with embodyrl collect, or learn from it by algorithm=sft",
            )
        store.require_all()
        self._frames, episodes = store.read(range(len(store)), with_last=True)
        columns = [
            self._columns_of(_with_outcome(episode), int(begin))
            for episode, begin in zip(episodes, self._frames.begin, strict=True)
        ]
        self._columns = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
        self.terminations = int(self._columns["terminated"].sum())
        """Decisions that end an episode, for another reason than a time limit."""
        if not len(self):
            raise DatasetError(
                f"no chunk of {self._size} actions in {folder} can be learned from by critics: of each it must "
                "be known what was executed and what followed; record the demonstrations anew with embodyrl collect, "
                "or lower rollout.chunk_size"
            )

    def __len__(self) -> int:
        """Return the number of decisions, `N`."""
        return len(self._columns["steps"])

    def describe(self) -> str:
        """Return their number and their ends, for people."""
        return (
            f"{counted(len(self), 'chunk')} of {counted(len(self.store), 'demonstration')}, "
            f"{self.terminations} of which end one"
        )

    @property
    def proprio(self) -> NDArray[np.float32] | None:
        """State observations of all decisions `[N, S]`; a copy. None if there are none."""
        return None if self._frames.proprio is None else self._frames.proprio[self._columns["at"]]

    def take(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the columns of some decisions, as a replay has them, each `[M, ...]`; besides, `labels [M, C, D]`, the
        actions that the demonstrator wanted, and `labelled [M]`, whether they are such that the observation explains
        them."""
        columns = {name: column[rows] for name, column in self._columns.items()}
        for prefix, place in (("", columns.pop("at")), ("next_", columns.pop("following"))):
            columns |= {prefix + name: column for name, column in self._frames.observed(place).items()}
        return columns

    # ---- reading

    def _columns_of(self, episode: Episode, begin: int) -> dict[str, NDArray[Any]]:
        """Return the columns of an episode's decisions; `at` and `following` are places of observations, of which those
        of the episode begin at `begin`."""
        assert episode.rewards is not None and episode.success is not None, "checked before"
        if not np.isfinite(episode.rewards).all():
            raise DatasetError(
                f"a reward of the demonstrations in {self.store.dataset.folder} is not finite", "record them anew"
            )
        if episode.task not in self.task_descriptions:
            self.task_descriptions.append(episode.task)
        found = self._decisions(episode)
        frames = found.starts[:, None] + np.arange(self._size)
        done = np.arange(self._size) < found.steps[:, None]
        inside = np.minimum(frames, len(episode) - 1)
        executed = episode.actions if episode.executed is None else episode.executed
        # Solved once is solved: a reward for success comes at the first time alone.
        first = episode.success & (episode.success.cumsum() == 1)
        # Demonstrations say themselves what was solved, so that no classifier has to.
        judged = {} if self._judge_ends is None else {"judged": first[inside] & done}
        if self._whole_episodes:
            judged[REMAINING] = (found.length - found.starts).astype(np.int32)
            judged[SOLVED] = np.full(len(found.starts), bool(episode.success[: found.length].any()))
        return judged | {
            "at": begin + found.starts,
            # After a termination nothing follows, and whatever is there has the factor 0; but it must be a number.
            "following": begin + np.where(found.terminated, found.starts, found.starts + found.steps),
            "task_index": np.full(len(found.starts), self.task_descriptions.index(episode.task)),
            "actions": executed[inside],
            "rewards": np.where(done, episode.rewards[inside], 0.0).astype(np.float32),
            "success": first[inside] & done,
            "steps": found.steps,
            "terminated": found.terminated,
            "truncated": found.truncated,
            "labels": episode.actions[inside],
            "labelled": self._explained(episode, found),
        }

    def _decisions(self, episode: Episode) -> _Decisions:
        """Return the decisions of an episode that are known completely."""
        assert episode.success is not None, "checked before"
        env = self._config.env
        length = min(len(episode), env.time_limit)
        solved = episode.success[:length]
        # None: the simulator itself knows what ends an episode.
        at_success = True if self._judge_ends else getattr(env, "end_at_success", None)
        if at_success and solved.any():
            length = int(solved.argmax()) + 1
            ends = True
        else:  # a failure, say; or a success that ended the recording, but would not end a rollout
            ends = episode.terminated and length == len(episode) and not (at_success is False and bool(solved[-1]))
        starts = np.arange(length)
        steps = np.minimum(self._size, length - starts)
        reaches_end = starts + steps == length
        terminated = reaches_end & ends
        last = length < len(episode) or episode.has_last
        known = terminated | (steps == self._size) & (~reaches_end | last)
        if episode.executed is None:
            known &= episode.undisturbed(starts, starts + steps)
        truncated = reaches_end & ~terminated & (length >= env.time_limit)
        return _Decisions(
            starts=starts[known],
            steps=steps[known],
            terminated=terminated[known],
            truncated=truncated[known],
            length=length,
        )

    def _explained(self, episode: Episode, found: _Decisions) -> NDArray[np.bool_]:
        """Return which chunks can be imitated, `[N]`: only the last action of one may be perturbed, since later ones
        react to what the observation at its beginning does not show; and `data.at_end` decides about those that reach
        beyond the end."""
        whole = (found.steps == self._size) | (self._config.data.at_end is AtEnd.repeat)
        return np.asarray(whole & episode.undisturbed(found.starts, found.starts + found.steps - 1))


def _with_outcome(episode: Episode) -> Episode:
    """Return an episode that is only imitated and of which nobody noted what came of it, as one that came to nothing:
    nothing reads that, and its end is where the recording ended."""
    if episode.rewards is not None and episode.success is not None:
        return episode
    nothing = np.zeros(len(episode), np.float32)
    return replace(episode, rewards=nothing, success=nothing.astype(np.bool_))
