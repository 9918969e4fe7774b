"""Evaluation on start states that training never sees, in the training simulators, and videos of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from embodyrl.config.schema import Config
from embodyrl.engine.compute import Blocks, block_indices
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.manager import EpisodePlayer, Simulators, StepResult
from embodyrl.rollout.action_queue import ONE_AFTER_ANOTHER, ActionQueue, Overlap
from embodyrl.rollout.episodes import (
    EpisodeTracker,
    FinishedEpisode,
    by_source,
    evaluation_episodes,
    of_source,
    success_doubt,
)
from embodyrl.rollout.plans import Plans
from embodyrl.screen import counted, task
from embodyrl.seeding import derive_seed
from embodyrl.tracking.clock import Clock, Phase
from embodyrl.tracking.intervals import outcomes, rate_text, wilson_interval
from embodyrl.tracking.video import TiledVideo

Step = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], Sequence[EpisodeSpec | None]], StepResult]
"""Executes a chunk of actions. Arguments: slots `[B]`, number of the episode that each plays `[B]`, actions
`[B, C, D]`, and the next episode of each."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """One episode of an evaluation, so that others can check the result."""

    task: str
    start_state: int
    """Its id, see `EpisodeSpec.start_state`."""
    seed: int
    """Of everything random inside the simulator."""
    success: bool | None
    """The task's condition held at least once; None: the simulator does not say."""
    success_at_end: bool | None
    """It held after the last control step; None: the simulator does not say."""
    total_reward: float
    """Return, not discounted."""
    length: int
    """Control steps."""
    source: str = ""
    """Simulator of a mix that played it; empty in a run with one."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of an evaluation."""

    episodes: int
    successes: int | None
    """Episodes in which the task's condition held at least once; None: the simulator says of none of them."""
    mean_return: float
    mean_length: float
    """Control steps."""
    seconds: float
    sampled: bool
    """True if actions were drawn from the policy's distribution; else they were its most likely ones."""
    doubt: str | None = None
    """Why its success may say nothing about the policy, for people; None: it does not seem so."""
    records: tuple[EpisodeRecord, ...] = ()
    """Its episodes, in the order of `held_out_episodes`; empty where only metrics are known."""

    @property
    def success_once(self) -> float | None:
        """Success rate, 0 .. 1; None: the simulator does not say what success is."""
        return None if self.successes is None else self.successes / self.episodes

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the success rate."""
        return None if self.successes is None else wilson_interval(self.successes, self.episodes)

    def metrics(self) -> dict[str, float]:
        """Return the metrics, named `eval/...`; none of success where it is unknown."""
        success = {} if self.success_once is None else {"eval/success_once": self.success_once}
        ends = dict(zip(("eval/success_low", "eval/success_high"), self.interval or (), strict=False))
        return {
            **success,
            **ends,
            "eval/return": self.mean_return,
            "eval/episode_length": self.mean_length,
            "eval/episodes": float(self.episodes),
            "eval/sampled": float(self.sampled),
            **{name: value for source, own in by_source(self.records).items() for name, value in _part(source, own)},
        }

    @classmethod
    def of_episodes(
        cls,
        finished: Sequence[FinishedEpisode],
        episodes: Sequence[EpisodeSpec],
        *,
        seconds: float,
        sampled: bool,
    ) -> Evaluation:
        """Summarise an evaluation.

        Args:
            finished: what came of the episodes, in any order.
            episodes: those of the evaluation; `finished` has their numbers.
            seconds: that it took.
            sampled: see `sampled`.
        """
        solved = outcomes(each.success for each in finished)
        return cls(
            episodes=len(finished),
            successes=sum(solved) if solved else None,
            # Sorted, because a sum in floating point depends on the order in which episodes happened to finish.
            mean_return=float(np.mean(sorted(each.total_reward for each in finished))),
            mean_length=float(np.mean([each.length for each in finished])),
            seconds=seconds,
            sampled=sampled,
            doubt=success_doubt(finished),
            records=tuple(
                record_of(each, episodes[each.number]) for each in sorted(finished, key=lambda each: each.number)
            ),
        )

    @classmethod
    def of(cls, metrics: Mapping[str, float], seconds: float) -> Evaluation:
        """Return the evaluation with these `metrics`."""
        episodes, rate = int(metrics["eval/episodes"]), metrics.get("eval/success_once")
        return cls(
            episodes=episodes,
            successes=None if rate is None else round(rate * episodes),
            mean_return=metrics["eval/return"],
            mean_length=metrics["eval/episode_length"],
            seconds=seconds,
            sampled=bool(metrics["eval/sampled"]),
        )

    @property
    def success_text(self) -> str:
        """Success rate and interval for people; `-` where it is unknown."""
        return "-" if self.successes is None else rate_text(self.successes, self.episodes)

    def lines(self) -> Iterator[str]:
        """Yield a line for people, and of a mix one for each simulator."""
        yield self.line()
        yield from self._source_lines()

    def line(self) -> str:
        """Return the line for people that is about all episodes."""
        sampled = " with sampled actions" if self.sampled else ""
        return (
            f"evaluation  {counted(self.episodes, 'episode')}{sampled}  success {self.success_text}  "
            f"return {self.mean_return:.2f}  length {self.mean_length:.0f}  ({self.seconds:.1f} s)"
        )

    def _source_lines(self) -> Iterator[str]:
        sources = by_source(self.records)
        width = max(map(len, sources), default=0)
        for source, own in sources.items():
            solved = outcomes(each.success for each in own)
            shown = rate_text(sum(solved), len(solved)) if solved else "-"
            mean = float(np.mean([each.total_reward for each in own]))
            yield f"  {source:{width}}  {counted(len(own), 'episode')}  success {shown}  return {mean:.2f}"


def _part(source: str, records: Sequence[EpisodeRecord]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of the episodes of one simulator of a mix."""
    solved = outcomes(each.success for each in records)
    if solved:
        yield of_source("eval/success_once", source), sum(solved) / len(solved)
    yield of_source("eval/return", source), float(np.mean([each.total_reward for each in records]))
    yield of_source("eval/episodes", source), float(len(records))


def record_of(finished: FinishedEpisode, episode: EpisodeSpec) -> EpisodeRecord:
    """Return what is kept of an episode."""
    return EpisodeRecord(
        task=episode.task,
        start_state=episode.start_state,
        seed=episode.seed,
        success=finished.success,
        success_at_end=finished.success_at_end,
        total_reward=finished.total_reward,
        length=finished.length,
        source=episode.source,
    )


class TileRecorder:
    """Steps simulators for an evaluation and records its first episodes as tiles of a video.

    Args:
        manager: the simulators.
        video: is closed by whoever opened it.
        tiles: of the episodes to record, in their order.
    """

    def __init__(self, manager: EpisodePlayer, video: TiledVideo, tiles: Sequence[int]) -> None:
        self.count = len(tiles)
        self._manager, self._video, self._tiles = manager, video, tiles
        self._success: list[bool | None] = [None] * self.count

    def step(
        self,
        slots: NDArray[np.int64],
        numbers: NDArray[np.int64],
        actions: NDArray[np.float32],
        following: Sequence[EpisodeSpec | None],
    ) -> StepResult:
        """Step and record images; see `Step`. Slot `slots[i]` plays episode `numbers[i]` of those to record."""
        result, images = self._manager.step_recorded(slots, actions, following)
        for row, number in enumerate(numbers.tolist()):
            self._video.add(self._tiles[number], images[row])
            if result.success_known is None or result.success_known[row]:
                self._success[number] = bool(self._success[number]) or bool(result.success[row].any())
            if result.ended[row]:
                self._video.end(self._tiles[number], success=self._success[number])
        return result


class VideoRecorder(TileRecorder):
    """Records a video of its own.

    Args:
        manager: the simulators.
        path: of the video.
        episodes: to record, the first of the evaluation; each is a tile.
    """

    def __init__(self, manager: EpisodePlayer, path: Path, episodes: Sequence[EpisodeSpec]) -> None:
        self.path = path
        titles = [f"{episode.task}  start {episode.start_state}" for episode in episodes]
        video = TiledVideo(path, titles, fps=manager.spec.control_frequency)
        super().__init__(manager, video, range(len(episodes)))

    def __enter__(self) -> Self:
        self._video.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._video.__exit__(kind, error, where)


def held_out_episodes(config: Config) -> list[EpisodeSpec]:
    """Return the episodes that every evaluation of a run plays."""
    return evaluation_episodes(
        config.env.sources,
        first_start_state=config.eval.first_start_state,
        count=config.eval.episodes,
        seed=config.seed,
        perturb=config.eval.perturb,
    )


def evaluation_noise(config: Config, engine: HybridEngine) -> list[torch.Generator] | None:
    """Return the random streams of actions in an evaluation, for each block that this process decides for; the same for
    every evaluation of a run. None without `eval.sample`."""
    if not config.eval.sample:
        return None
    seeds = [derive_seed(config.seed, "evaluation", *block_indices(number)) for number in engine.blocks.here]
    return [torch.Generator(engine.device).manual_seed(seed) for seed in seeds]


def evaluate(
    manager: EpisodePlayer,
    engine: HybridEngine,
    episodes: Sequence[EpisodeSpec],
    video: TileRecorder | None = None,
    noise: Sequence[torch.Generator] | None = None,
    overlap: Overlap = ONE_AFTER_ANOTHER,
    on_episode: Callable[[int, EpisodeRecord], None] | None = None,
) -> Evaluation:
    """Play `episodes` in this process alone and return the result; see `play_share`. `on_episode` is called with
    each episode as soon as it ended, with its number among `episodes`."""
    start = time.perf_counter()
    recorded = 0 if video is None else video.count

    def tell(finished: FinishedEpisode) -> None:
        if on_episode is not None:
            on_episode(finished.number, record_of(finished, episodes[finished.number]))

    finished = play_share(manager, engine, episodes, recorded, video, noise, overlap, tell)
    seconds = time.perf_counter() - start
    return Evaluation.of_episodes(finished, episodes, seconds=seconds, sampled=noise is not None)


def play_share(
    manager: EpisodePlayer,
    engine: HybridEngine,
    episodes: Sequence[EpisodeSpec],
    recorded: int = 0,
    video: TileRecorder | None = None,
    noise: Sequence[torch.Generator] | None = None,
    overlap: Overlap = ONE_AFTER_ANOTHER,
    on_episode: Callable[[FinishedEpisode], None] = lambda finished: None,
) -> list[FinishedEpisode]:
    """Play those of `episodes` that the blocks of this process are dealt. A slot that finishes begins the next episode;
    slots without an episode left are neither stepped nor inferred. An episode that is lost with its simulator is played
    again.

    Without `noise` the policy takes its most likely actions; then neither the number of slots nor the recording changes
    a result. With `noise` actions are drawn, and the same number of slots and blocks draws the same ones.

    Args:
        manager: the simulators.
        engine: chooses the chunks.
        episodes: of the whole evaluation.
        recorded: number of episodes that are recorded, the first ones.
        video: records them, in the process that has the first block.
        noise: random streams of the actions of each block.
        overlap: of chunks.
        on_episode: called with each episode as soon as it ended.
    """
    dealt = share_of_episodes(len(episodes), recorded, engine.blocks)
    choose = _Choice(engine, manager, noise, overlap)
    finished: list[FinishedEpisode] = []
    count = sum(map(len, dealt.values()))
    with (
        engine.rollout_mode(),
        engine.clock.measure(Phase.record),
        task("evaluating", count, "episodes") as progress,
    ):

        def hear(ended: FinishedEpisode) -> None:
            progress.advance()
            on_episode(ended)

        # Recorded episodes are stepped one action at a time with an image each; the others at full speed afterwards.
        if video is not None:
            finished += _play(manager, choose, episodes, {0: dealt[0][:recorded]}, video.step, hear)
            dealt[0] = dealt[0][recorded:]
        step: Step = lambda slots, _, *chunk: manager.step(slots, *chunk)  # noqa: E731
        return finished + _play(manager, choose, episodes, dealt, step, hear)


def share_of_episodes(count: int, recorded: int, blocks: Blocks) -> dict[int, list[int]]:
    """Return the numbers of the episodes that each block of this process plays, by its number in this process: blocks
    take turns, and the first also plays those that are recorded."""
    others = range(recorded, count)
    return {
        index: [*range(recorded if number == 0 else 0), *others[number :: blocks.count]]
        for index, number in enumerate(blocks.here)
    }


def _play(
    manager: EpisodePlayer,
    choose: _Choice,
    episodes: Sequence[EpisodeSpec],
    dealt: Mapping[int, Sequence[int]],
    step: Step,
    on_episode: Callable[[FinishedEpisode], None],
) -> list[FinishedEpisode]:
    """Play the episodes with these numbers, by block."""
    size, clock = choose.block_size, choose.engine.clock
    waiting = {
        block * size + slot: deque(numbers[slot :: min(size, len(numbers))])
        for block, numbers in dealt.items()
        for slot in range(min(size, len(numbers)))
    }
    # Dealt out beforehand: which slot plays which episode must not depend on how fast simulators are.
    slots = np.array(sorted(waiting), np.int64)
    if not len(slots):
        return []
    playing = np.zeros(manager.num_envs, np.int64)
    playing[slots] = [waiting[slot].popleft() for slot in slots]
    tracker = EpisodeTracker(manager.num_envs)
    finished: list[FinishedEpisode] = []
    lost: dict[int, list[int]] = {block: [] for block in dealt}
    choose.begin(slots)
    with clock.measure(Phase.simulate):
        observation = manager.reset(slots, [episodes[number] for number in playing[slots]])
    while len(slots):
        actions = choose(slots, observation)
        following = [episodes[waiting[slot][0]] if waiting[slot] else None for slot in slots]
        with clock.measure(Phase.simulate):
            result = step(slots, playing[slots], actions, following)
        ended = [replace(each, number=int(playing[each.slot])) for each in tracker.update(slots, result)]
        for each in ended:
            on_episode(each)
        finished += ended
        for slot in slots[result.lost]:
            lost[slot // size].append(int(playing[slot]))
        over = result.ended | result.lost
        choose.begin(slots[over])
        # A slot continues if its episode does, or if another one waits for it, which its worker has begun already.
        running = np.array([bool(waiting[slot]) for slot in slots]) | ~over
        for slot in slots[over & running]:
            playing[slot] = waiting[slot].popleft()
        slots, observation = slots[running], result.observation.take(running)
    return finished + _play(manager, choose, episodes, lost, step, on_episode)


class _Choice:
    """Chooses the actions of an evaluation.

    Args:
        engine: chooses the chunks.
        manager: the simulators, which execute `manager.chunk_size` actions between two decisions.
        noise: random streams of each block; None: the policy takes its most likely actions.
        overlap: of chunks.
    """

    def __init__(
        self,
        engine: HybridEngine,
        manager: EpisodePlayer,
        noise: Sequence[torch.Generator] | None,
        overlap: Overlap,
    ) -> None:
        self.engine = engine
        self.block_size = manager.num_envs // len(engine.blocks.here)
        """Slots of a block."""
        self._executed, self._delay = manager.chunk_size, overlap.delay
        self._noise = noise
        self._queue = None
        if overlap != ONE_AFTER_ANOTHER:
            chunk_size = engine.policy.spec.chunk_size
            self._queue = ActionQueue.acting_in(
                manager.spec, manager.num_envs, chunk_size, overlap, executed=self._executed
            )
        self._plans = Plans.of(engine.policy, manager.num_envs)

    def begin(self, slots: NDArray[np.int64]) -> None:
        """Forget the episodes that these slots played before."""
        for each in (self._queue, self._plans):
            if each is not None:
                each.begin(slots)

    def __call__(self, slots: NDArray[np.int64], observation: Observation) -> NDArray[np.float32]:
        """Return the actions `[B, executed, D]` of these slots: slots of different blocks are decided on separately."""
        blocks, chunks = slots // self.block_size, []
        for block in np.unique(blocks).tolist():
            rows = blocks == block
            own = observation if rows.all() else observation.take(rows)
            chunks.append(self._chosen(block, slots[rows], own))
        chosen: NDArray[np.float32] = np.concatenate(chunks)
        return chosen[:, : self._executed] if self._queue is None else self._queue.act(slots, chosen)

    def _chosen(self, block: int, slots: NDArray[np.int64], observation: Observation) -> NDArray[np.float32]:
        """Return the chunks `[B, C, D]` of slots of a block."""
        mode: Literal["train", "eval"] = "eval" if self._noise is None else "train"
        noise = None if self._noise is None else self._noise[block]
        if self._plans is None:
            return self.engine.actions_of(self.engine.act(observation, mode, noise))
        further = self._plans.inputs(slots, self._executed, self._delay)
        decision = self.engine.act(observation, mode, noise, further)
        if decision.plan is not None:
            self._plans.keep(slots, decision.plan)
        return self.engine.actions_of(decision)


@contextmanager
def borrowed(manager: Simulators, clock: Clock, in_progress: bool) -> Iterator[None]:
    """Save the training episodes before a block that uses their simulators, and restore them after it."""
    slots = list(range(manager.num_envs))
    with clock.measure(Phase.simulate):
        states = manager.get_state(slots) if in_progress else None
    yield
    if states is not None:
        with clock.measure(Phase.simulate):
            manager.set_state(slots, states)
