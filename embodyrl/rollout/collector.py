"""Collector: moves observations to the policy and chunks of actions to the simulators, in the order of a schedule."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.config.schema import Episodes, RolloutConfig, Schedule
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.manager import Simulators, StepResult
from embodyrl.envs.perturb.words import with_paraphrases
from embodyrl.models.policy import ActOutput
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.episodes import EpisodeSource, EpisodeTracker, FinalObservations, FinishedEpisode, Rollout
from embodyrl.rollout.hooks import Decision, Hook
from embodyrl.screen import task
from embodyrl.tracking.clock import Phase

Mode = Literal["train", "eval", "random"]
Zeros = Callable[[tuple[int, ...], "np.dtype[Any]"], NDArray[Any]]
"""Returns an array of zeros of a shape and type."""


class RolloutBuffer:
    """Columns `[K, B, ...]`, allocated at their first write; rows that are never written stay zero.

    They are numpy arrays while they fill up, because writing a few numbers costs numpy a tenth of what it costs torch.

    Args:
        chunks: `K`.
        columns: `B`.
        zeros: allocates a column.
    """

    def __init__(self, chunks: int, columns: int, zeros: Zeros = np.zeros) -> None:
        self._size = (chunks, columns)
        self._every = np.arange(columns).tobytes()
        self._zeros = zeros
        self._columns: dict[str, NDArray[Any]] = {}

    def write(self, rows: NDArray[np.int64], slots: NDArray[np.int64], values: Mapping[str, NDArray[Any]]) -> None:
        """Write several columns: row `rows[i]` of slot `slots[i]`; every value is `[len(slots), ...]`."""
        first = rows.item(0)
        # All slots at the same row, as in lockstep, are one block of memory: a quarter of the time.
        one_row = rows.tobytes() == first.to_bytes(rows.itemsize, sys.byteorder) * self._size[1]
        whole = one_row and slots.tobytes() == self._every
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = self._zeros((*self._size, *value.shape[1:]), value.dtype)
            if whole:
                column[first] = value
            else:
                column[rows, slots] = value

    def columns(self, chunks: int) -> dict[str, Tensor]:
        """Return all columns as tensors that share this memory, cut to the first `chunks` rows."""
        return {name: torch.from_numpy(column[:chunks]) for name, column in self._columns.items()}


@dataclass(kw_only=True)
class _Progress:
    """State of a rollout while it is collected."""

    buffer: RolloutBuffer
    decided: NDArray[np.int64]
    """Chunks chosen in each column of the batch, `[B]`; the next one goes to this row."""
    finished: list[tuple[int, FinishedEpisode]] = field(default_factory=list)
    """Row of the chunk in which each episode ended, and the episode."""
    env_steps: int = 0
    invalid: list[tuple[int, int]] = field(default_factory=list)
    """Column and number of each episode that was lost with its simulator; nothing is learned from it."""
    cut_rows: list[int] = field(default_factory=list)
    """Rows of the chunks whose following observation is no row of the batch, so that the critic needs it separately."""
    cut_columns: list[int] = field(default_factory=list)
    cut_observations: list[Observation] = field(default_factory=list)


class Collector:
    """Collects rollouts of `K` chunks in each of `B` slots: those of this process, a share of the run's.

    Schedules: lockstep infers for all slots, then simulates all. pipeline has two halves of the slots take turns: one
    is simulated while the policy infers for the other. ready_batch infers for the slots that are ready. All of them
    choose `K` chunks in every slot and play the same episodes.

    Episodes: continuous slots reset themselves and episodes span rollouts. With whole episodes every rollout is
    `episodes_per_slot` of them in every slot, each a column of the batch. A slot that finishes an episode begins the
    next at once; one that has played all of them is neither stepped nor inferred.

    Blocks: slots of different blocks are never decided on together, and each block has noise of its own. A row of a
    matrix product depends on its neighbours, so only then do numbers not depend on who shares the process.

    Args:
        manager: the simulators.
        engine: chooses the chunks.
        source: training episodes of its slots.
        config: of rollouts.
        critic: keep the critic's values in the batch.
        images: keep the images in the batch.
        following: keep the observations that are in no row, see `FinalObservations`.
        first_slot: number in the run of this process's slot 0.
        slots: of the run; None: only those of this process.
        paraphrases: episodes may show paraphrases of their task description.
        hooks: change actions and results, each what the one before it has left.
    """

    def __init__(
        self,
        manager: Simulators,
        engine: HybridEngine,
        *,
        source: EpisodeSource,
        config: RolloutConfig,
        critic: bool,
        images: bool = True,
        following: bool = False,
        first_slot: int = 0,
        slots: int | None = None,
        paraphrases: bool = False,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.manager = manager
        self.engine = engine
        self.config = config
        self.critic = critic
        self.images = images
        self.following = following
        self.first_slot = first_slot
        self._slots_of_run = manager.num_envs if slots is None else slots
        self.clock = engine.clock
        own = list(manager.spec.tasks.values())
        self.task_descriptions = list(dict.fromkeys(with_paraphrases(own) if paraphrases else own))
        self._whole = config.episodes is Episodes.whole
        self._columns = manager.num_envs * config.episodes_per_slot
        """Columns of a batch: the first episodes of all slots, then their second ones, and so on."""
        self._index_of_description = {
            task_description: index for index, task_description in enumerate(self.task_descriptions)
        }
        self._source = source
        self._all = np.arange(manager.num_envs)
        self._block = np.arange(manager.num_envs) * len(engine.noise) // manager.num_envs
        """Block of each slot, `[num_envs]`."""
        self._scheduler = make_scheduler(manager, config, self._block)
        self._column = self._all.copy()
        """Column that each slot is filling, `[num_envs]`."""
        self._numbers = np.full(manager.num_envs, -1, np.int64)
        self._playing = {name: np.zeros(manager.num_envs, np.int64) for name in ("group", "start_state", "seed")}
        """Columns of the episode that each slot plays, `[num_envs]`."""
        self._next: list[EpisodeSpec | None] = [None] * manager.num_envs
        """The episode that each slot begins if its present one ends; None where it plays no other in this rollout."""
        self._described: tuple[list[str], NDArray[np.int64]] = [], np.zeros(0, np.int64)
        """Task descriptions that were seen last, and their numbers."""
        self._tracker = EpisodeTracker(manager.num_envs)
        self._hooks = tuple(hooks)
        self._mode: Mode = "train"
        self._held: list[tuple[NDArray[np.int64], Observation]] = []
        """Slots in an episode and their observations, with which the next rollout begins. Copies, because evaluation
        may use the simulators in between."""

    @property
    def in_progress(self) -> bool:
        """True while episodes continue in the simulators between rollouts."""
        return bool(self._held)

    def collect(self, zeros: Zeros = np.zeros, mode: Mode = "train") -> Rollout:
        """Run the policy; returns the rollout of this process's slots.

        Args:
            zeros: allocates the columns of its batch.
            mode: the policy's own actions as in training, its most likely ones, or random ones.
        """
        with self.clock.measure(Phase.record):
            self._mode = mode
            return self._collect(zeros)

    def _collect(self, zeros: Zeros) -> Rollout:
        collected = _Progress(
            buffer=RolloutBuffer(self.config.num_chunks, self._columns, zeros),
            decided=np.zeros(self._columns, np.int64),
        )
        # With whole episodes slot i fills columns i, i + num_envs, i + 2 num_envs, ... one after the other.
        self._column[:] = self._all
        with self.clock.measure(Phase.simulate, detail="onload"):
            self.manager.onload()
        observation = self._begin()
        self._note_episodes(self._all)
        # Fill the pipe: every group gets its first chunk before the first result is awaited. Afterwards each result
        # that comes back is answered with the next chunk, in the order that the schedule chooses.
        with task("collecting", self.config.num_chunks * self._columns, "chunks") as progress:
            for slots in self._scheduler.groups:
                self._decide_and_send(slots, observation.take(slots), collected)
            while (received := self._receive(collected)) is not None:
                progress.done = int(collected.decided.sum())
                if len(received[0]):
                    self._decide_and_send(*received, collected)
        # Slots finish in an order that depends on timing under ready_batch; sorted, metrics do not.
        finished = sorted(collected.finished, key=lambda pair: (pair[0], pair[1].slot))
        return Rollout(
            batch=self._batch(collected),
            finished=[replace(episode, row=row) for row, episode in finished],
            env_steps=collected.env_steps,
            following=self._following_chunks(collected) if self.following else None,
        )

    def _of_source(self, finished: FinishedEpisode) -> FinishedEpisode:
        """Return an episode that has just ended with the simulator that played it."""
        number = int(self._numbers[finished.slot])
        return replace(finished, source=self._source.episode(finished.slot, number).source)

    def give_up_episodes(self) -> None:
        """Begin new episodes with the next rollout, after a rollout that failed half way."""
        self._held = []

    def offload(self) -> int:
        """End the simulator processes until the next rollout; returns the bytes of memory that this frees."""
        with self.clock.measure(Phase.simulate, detail="offload"):
            return self.manager.offload()

    def _begin(self) -> Observation:
        """Return the observations of all slots, in slot order: first ones of new episodes, or of those in progress."""
        if self._held:
            # Slots were held in the order in which they finished the last rollout, which depends on timing.
            order = np.argsort(np.concatenate([slots for slots, _ in self._held]))
            observation = Observation.concat([observation for _, observation in self._held]).take(order)
            self._held = []
            return observation
        self._numbers += 1
        episodes = [self._source.episode(slot, number) for slot, number in enumerate(self._numbers.tolist())]
        with self.clock.measure(Phase.simulate):
            observation = self.manager.reset(self._all, episodes)
        self._tracker.begin(self._all)
        for hook in self._hooks:
            hook.begin(self._all)
        return observation

    def _decide_and_send(self, slots: NDArray[np.int64], observation: Observation, collected: _Progress) -> None:
        """Choose a chunk for each of some slots, send it to the simulators, and record it while they work."""
        noise = self.engine.noise[self._block[slots[0]]]
        decision = self.engine.act(observation, self._mode, noise)
        actions = self.engine.actions_of(decision)
        # Each hook sees the actions that the one before it has left, and may add columns to the rollout.
        replaced: dict[str, NDArray[Any]] = {}
        for hook in self._hooks:
            replaced |= hook.decide(
                Decision(
                    slots=slots,
                    numbers=self._numbers[slots],
                    observation=observation,
                    actions=actions,
                    random=self._mode == "random",
                    tracker=self._tracker,
                    noise=noise,
                )
            )
            actions = replaced.get("actions", actions)
        with self.clock.measure(Phase.simulate):
            self.manager.send(slots, actions, [self._next[slot] for slot in slots.tolist()])
        self._scheduler.sent(slots)
        # Written only after the simulators have begun: copying images into the batch costs no time of theirs. The
        # observation is still intact, because the next images are drawn into the other bank (see EnvManager).
        columns = self._column[slots]
        decided = self._decided(slots, observation, decision, actions) | replaced
        collected.buffer.write(collected.decided[columns], columns, decided)
        collected.decided[columns] += 1

    def _has_more(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the slots that play another episode in this rollout when the present one ends."""
        return np.full(len(slots), not self._whole) | (self._column[slots] + len(self._all) < self._columns)

    def _note_episodes(self, slots: NDArray[np.int64]) -> None:
        """Note what these slots play now and next."""
        # The next episode is sent with each chunk, so that a simulator resets itself without another round trip.
        self._playing["group"][slots] = self._columns_of_the_run(slots) // self.config.group_size
        for slot, more in zip(slots.tolist(), self._has_more(slots).tolist(), strict=True):
            number = int(self._numbers[slot])
            episode = self._source.episode(slot, number)
            self._playing["start_state"][slot], self._playing["seed"][slot] = episode.start_state, episode.seed
            self._next[slot] = self._source.episode(slot, number + 1) if more else None

    def _receive(self, collected: _Progress) -> tuple[NDArray[np.int64], Observation] | None:
        """Wait for chunks and record their results; returns the slots that continue and their observations, or None if
        no chunk was under way."""
        with self.clock.measure(Phase.simulate):
            received = self._scheduler.receive()
        if received is None:
            return None
        slots, result = received
        result, judged = self._judged(slots, result)
        columns = self._column[slots]
        rows, ended = collected.decided[columns] - 1, result.ended
        last = rows + 1 == self.config.num_chunks
        collected.buffer.write(rows, columns, _outcome(result) | judged)
        finished = [self._of_source(each) for each in self._tracker.update(slots, result)]
        collected.finished += zip(rows[ended].tolist(), finished, strict=True)
        collected.env_steps += int(result.steps.sum())
        collected.invalid += zip(columns[result.lost].tolist(), self._numbers[slots[result.lost]].tolist(), strict=True)
        over = ended | result.lost
        # The value of the following observation bootstraps the return (Pardo et al. 2018, arXiv:1712.00378): a time
        # limit is no end of the task, nor is the last row of the batch. Both need the observation from before the
        # reset, which is in no row of the batch. A termination has no following value, a lost episode is not learned
        # from.
        cut = result.truncated | (last & ~over)
        if cut.any():
            collected.cut_rows += rows[cut].tolist()
            collected.cut_columns += columns[cut].tolist()
            collected.cut_observations.append(result.final_observation.take(cut))
        if self._whole:
            # A new episode goes to the slot's next column and starts at its row 0. A slot whose episode is over and
            # that has no column left drops out, as does one that reached row K without an end.
            begins = over & self._has_more(slots)
            self._column[slots[begins]] += len(self._all)
            goes_on = begins | ~(last | over)
        else:
            begins, goes_on = over, ~last
            if last.any():
                # `take` copies: these images would be overwritten by whoever uses the simulators next.
                self._held.append((slots[last], result.observation.take(last)))
        if begins.any():
            self._numbers[slots[begins]] += 1
            self._note_episodes(slots[begins])
        return (slots, result.observation) if goes_on.all() else (slots[goes_on], result.observation.take(goes_on))

    def _judged(self, slots: NDArray[np.int64], result: StepResult) -> tuple[StepResult, dict[str, NDArray[Any]]]:
        """Let hooks judge the results of some slots, and begin the next episode of those that they end; returns the
        results, and the columns that hooks add."""
        if not self._hooks:
            return result, {}
        before, judged = result.ended, dict[str, NDArray[Any]]()
        for hook in self._hooks:
            result, more = hook.judge(slots, result)
            judged |= more
        ends = result.ended & ~before & self._has_more(slots)
        if not ends.any():
            return result, judged
        episodes = [each for slot in slots[ends].tolist() if (each := self._next[slot]) is not None]
        with self.clock.measure(Phase.simulate):
            begun = self.manager.reset(slots[ends], episodes)
        # What was observed at the end of the others, then of these.
        order = np.argsort(np.concatenate([np.flatnonzero(~ends), np.flatnonzero(ends)]))
        observation = Observation.concat([result.observation.take(~ends), begun]).take(order)
        return replace(result, observation=observation), judged

    def _decided(
        self, slots: NDArray[np.int64], observation: Observation, decision: ActOutput, actions: NDArray[np.float32]
    ) -> dict[str, NDArray[Any]]:
        """Return the columns that are known when chunks are chosen, each `[len(slots), ...]`."""
        if self._described[0] != observation.task_descriptions:
            numbers = [self._index_of_description[each] for each in observation.task_descriptions]
            self._described = list(observation.task_descriptions), np.array(numbers)
        columns: dict[str, NDArray[Any]] = {
            "task_index": self._described[1],
            "actions": actions,
            "logprobs": decision.logprobs.cpu().numpy(),
            "valid": np.ones(len(slots), np.bool_),
            "episode": self._numbers[slots],
            "version": np.full(len(slots), self.engine.version),
            **{name: column[slots] for name, column in self._playing.items()},
        }
        if observation.proprio is not None:
            columns["proprio"] = observation.proprio
        if observation.images is not None and self.images:
            columns["images"] = observation.images
        for name, column in (("counted", decision.counted), ("invalid_actions", decision.invalid)):
            if column is not None:
                columns[name] = column.cpu().numpy()
        if self.critic and decision.values is not None:
            columns["values"] = decision.values.cpu().numpy()
        return columns | {f"trace/{name}": value.cpu().numpy() for name, value in decision.trace.items()}

    def _columns_of_the_run(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the column that each slot is filling, as numbered in the joint batch of all processes."""
        # The joint batch holds the first episodes of all slots of the run, then the second ones (`join_rollouts`), so
        # that the members of a group stay neighbours whatever the number of processes.
        round_, slot = np.divmod(self._column[slots], len(self._all))
        return round_ * self._slots_of_run + self.first_slot + slot

    def _batch(self, collected: _Progress) -> TrajectoryBatch:
        columns = collected.buffer.columns(int(collected.decided.max()))
        # A lost episode has no true end, so all of its rows are invalid, not only the last. A column of a continuous
        # slot may hold other episodes, which stay.
        for column, number in collected.invalid:
            columns["valid"][:, column] &= columns["episode"][:, column] != number
        for hook in self._hooks:
            hook.complete(columns)
        trace = {name.removeprefix("trace/"): columns.pop(name) for name in list(columns) if name.startswith("trace/")}
        if "values" in columns:
            columns["next_values"] = self._next_values(columns, collected)
        return TrajectoryBatch(columns | {"trace": trace}, self.task_descriptions)

    def _next_values(self, columns: dict[str, Tensor], collected: _Progress) -> Tensor:
        """Critic's values `[K, B]` of the observations that followed each chunk, before any reset; 0 after a
        termination."""
        # Mostly the value of the next row, which the rollout has computed already.
        following = torch.zeros_like(columns["values"])
        following[:-1] = columns["values"][1:]
        following[columns["terminated"]] = 0.0
        if collected.cut_rows:
            observation = Observation.concat(collected.cut_observations)
            cut_columns = np.array(collected.cut_columns)
            following[collected.cut_rows, cut_columns] = self._in_blocks(observation, cut_columns, self._values)
        return following

    def _values(self, observation: Observation) -> Tensor:
        """Critic's values `[M]` of these observations."""
        values = self.engine.act(observation, "eval").values
        assert values is not None, "the same policy gave values in the rollout"
        return values.cpu()

    def _in_blocks(
        self, observation: Observation, columns: NDArray[np.int64], compute: Callable[[Observation], Tensor]
    ) -> Tensor:
        """Compute `[M, ...]` from observations of these columns: those of a block together, and as many at a time as it
        has slots, which takes no more memory than acting does."""
        blocks, most = self._block[columns % len(self._all)], len(self._all) // len(self.engine.noise)
        order = np.argsort(blocks, kind="stable")
        parts = [
            which[start : start + most]
            for which in (order[blocks[order] == block] for block in np.unique(blocks))
            for start in range(0, len(which), most)
        ]
        computed = torch.cat([compute(observation.take(part)) for part in parts])
        found = torch.empty_like(computed)
        found[torch.from_numpy(np.concatenate(parts))] = computed
        return found

    def _following_chunks(self, collected: _Progress) -> FinalObservations | None:
        """Return the observations that are in no row of the batch, or their features if the policy keeps these; None if
        there are none."""
        if not collected.cut_rows:
            return None
        rows, slots = np.array(collected.cut_rows), np.array(collected.cut_columns)
        order = np.lexsort((slots, rows))  # slots were received in an order that may depend on timing
        observation = Observation.concat(collected.cut_observations).take(order)
        if self.engine.policy.keeps_features:
            kept = {"features": self._in_blocks(observation, slots[order], self.engine.stored_features).numpy()}
        else:
            seen = {"images": observation.images, "proprio": observation.proprio}
            kept = {name: column for name, column in seen.items() if column is not None}
        return FinalObservations(rows=rows[order], slots=slots[order], columns=kept)

    def state_dict(self) -> dict[str, Any]:
        """Return episode numbers and totals of the episodes in progress. Simulator states are the manager's."""
        return {
            "numbers": self._numbers.tolist(),
            "in_progress": self.in_progress,
            "tracker": self._tracker.state_dict(),
            **{hook.state_name: hook.state(self._numbers) for hook in self._hooks if hook.state_name},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the manager's slots must have been restored before."""
        self._numbers[:] = state["numbers"]
        self._tracker.load_state_dict(state["tracker"])
        self._held = [(self._all, self.manager.observe(self._all).take(self._all))] if state["in_progress"] else []
        for hook in self._hooks:
            if hook.state_name and self._held:
                hook.restore(self._numbers, state[hook.state_name])


def _outcome(result: StepResult) -> dict[str, NDArray[Any]]:
    """Return the result of chunks as columns `[len(slots), ...]`."""
    columns = {
        "rewards": result.rewards,
        "success": result.success,
        "terminated": result.terminated,
        "truncated": result.truncated,
        "steps": result.steps.astype(np.int64),
    }
    kept = {"step_images": result.step_images, "step_proprio": result.step_proprio}
    return columns | {name: array for name, array in kept.items() if array is not None}


# ---- schedules: the order in which the collector waits for slots


class Scheduler(Protocol):
    """Notes which slots were sent chunks, and receives them in an order of its own."""

    groups: Sequence[NDArray[np.int64]]
    """All slots, in the groups in which the first chunks of a rollout are chosen."""

    def sent(self, slots: NDArray[np.int64]) -> None:
        """Note that chunks were sent to these slots."""
        ...

    def receive(self) -> tuple[NDArray[np.int64], StepResult] | None:
        """Wait for the next slots; returns them and the results of their chunks, or None if no chunk is under way."""
        ...


def make_scheduler(manager: Simulators, config: RolloutConfig, block: NDArray[np.int64]) -> Scheduler:
    """Return the scheduler for `rollout.schedule`, given the block of each slot."""
    if config.schedule is Schedule.ready_batch:
        # Fewer ready slots mean less waiting but smaller batches for the policy; a quarter is a compromise.
        auto = config.ready_slots == "auto"
        return ReadyFirst(manager, max(1, manager.num_envs // 4) if auto else int(config.ready_slots))
    halves = 2 if config.schedule is Schedule.pipeline else 1
    blocks = [np.flatnonzero(block == number) for number in np.unique(block)]
    return InTurn(manager, [part for slots in blocks for part in np.array_split(slots, min(halves, len(slots)))])


class InTurn:
    """Receives slots in the groups in which they were sent, the oldest first.

    One group is lockstep. With more, one group simulates while the policy computes for another.
    """

    def __init__(self, manager: Simulators, groups: Sequence[NDArray[np.int64]]) -> None:
        self.groups: Sequence[NDArray[np.int64]] = groups
        self._manager = manager
        self._under_way: deque[NDArray[np.int64]] = deque()

    def sent(self, slots: NDArray[np.int64]) -> None:
        """Chunks were sent to these slots."""
        self._under_way.append(slots)

    def receive(self) -> tuple[NDArray[np.int64], StepResult] | None:
        """Wait for the group that was sent first."""
        if not self._under_way:
            return None
        slots = self._under_way.popleft()
        return slots, self._manager.receive(slots)


class ReadyFirst:
    """Receives slots as soon as `at_least` of them are ready, or as many as are left."""

    def __init__(self, manager: Simulators, at_least: int) -> None:
        self.groups: Sequence[NDArray[np.int64]] = [np.arange(manager.num_envs)]
        self._manager = manager
        self._at_least = at_least
        self._under_way = 0

    def sent(self, slots: NDArray[np.int64]) -> None:
        """Chunks were sent to these slots."""
        self._under_way += len(slots)

    def receive(self) -> tuple[NDArray[np.int64], StepResult] | None:
        """Wait for enough slots, whichever they are."""
        if not self._under_way:
            return None
        slots, result = self._manager.receive_ready(min(self._at_least, self._under_way))
        self._under_way -= len(slots)
        return slots, result
