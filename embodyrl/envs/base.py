"""A simulator made of single environments: the code that all such backends share.

A backend implements a `Slot` (one environment that plays one task) and a `SlotSimulator` that builds it. Stepping a
chunk, time limits, checks of inputs and outputs, task switching, and saving and restoring states come from this module.

Shapes: `B` simulator slots (envs), `C` actions in a chunk, `D` action dims, `S` proprio dims, `V` cameras,
`H, W` pixels.
"""

from __future__ import annotations

import math
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.infos import MOST_EPISODE_STEPS
from embodyrl.envs.images import timed_rendering
from embodyrl.envs.perturb.kinds import level_of
from embodyrl.envs.perturb.noise import ImageNoise
from embodyrl.envs.perturb.words import described as paraphrased
from embodyrl.envs.perturb.words import has_paraphrases, known_verbs
from embodyrl.envs.states import StateError, pack, unpack
from embodyrl.envs.types import ChunkResult, EpisodeSpec, Observation, SimulatorSpec, nothing_executed
from embodyrl.errors import RunError, UnknownNameError, UserError, did_you_mean


class SimulatorError(RunError):
    """Raised when a simulator was used wrongly or failed; the run cannot continue with it."""


class NotFiniteError(SimulatorError):
    """Raised when a simulator returned a reward or an observation that is NaN or infinite."""


class EpisodeOverError(SimulatorError):
    """Raised when a slot without a running episode is stepped."""


class ActionError(SimulatorError, ValueError):
    """Raised when actions have the wrong shape, type or value."""


class RenderError(SimulatorError):
    """Raised when a simulator cannot render images here; the text names what is missing."""


class WrongResult(SimulatorError, UserError):
    """Raised when a simulator returned something else than it declares.

    Args:
        slots: those at fault, as the simulator numbers them.
        text: what returned what, what was wanted, and the remedy.
        where: name of the slots for people; None: their numbers.
    """

    def __init__(self, slots: Sequence[int], text: str, *, where: str | None = None) -> None:
        super().__init__(f"{where or f'slots {list(slots)}'}: {text}")
        self.slots = slots
        self.text = text


class RestoreMismatchWarning(RuntimeWarning):
    """Warns that a restored episode differs from the saved one, for instance on a machine with another processor."""


class Transition(NamedTuple):
    """Result of one action."""

    reward: float
    terminated: bool
    """The episode reached a final state."""
    success: bool | None
    """The task's success condition holds now; None: the environment does not say."""
    truncated: bool = False
    """The environment itself cut the episode off. `SlotSimulator` counts the run's time limit."""


class Slot(ABC):
    """One environment that plays one task.

    It must be deterministic: equal episodes and actions give equal trajectories, bit for bit, whatever was played
    before and in whichever process. Saving states by replay relies on this, unless the slot offers a `snapshot`.
    """

    time_limit: int | None = None
    """Control steps after which episodes of its task are cut off; None: `SimulatorSpec.max_episode_steps`, which is
    never exceeded."""
    perturbs: frozenset[str] = frozenset()
    """Kinds of `EpisodeSpec.perturb` that its `reset` and `observe` follow, beside those of `SlotSimulator`."""

    @abstractmethod
    def reset(self, episode: EpisodeSpec) -> None:
        """Start `episode`: `start_state` decides the layout, `seed` everything random afterwards."""

    @abstractmethod
    def step(self, action: NDArray[np.float32]) -> Transition:
        """Execute one action `[D]`, in the simulator's units and within its bounds. The array must not be kept."""

    @abstractmethod
    def observe(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32] | None]:
        """Return images `[V, H, W, 3]` or None, and proprio `[S]` or None: new arrays that the slot does not change
        later."""

    def snapshot(self) -> Mapping[str, NDArray[Any]] | None:
        """Return everything that decides the current observation and the rest of the running episode, as named arrays
        of numbers or bools. None (the default): states are saved by replay.

        Useful where steps are expensive. The continuation must be exact, bit for bit, in another process too.
        """
        return None

    def restore(self, episode: EpisodeSpec, snapshot: Mapping[str, NDArray[Any]]) -> None:
        """Continue `episode` from its `snapshot`, whatever was played here before."""
        raise NotImplementedError(f"{type(self).__name__} offers snapshots, but does not restore them")

    def render(self) -> NDArray[np.uint8]:
        """Render an image for people, `[H, W, 3]`."""
        raise RenderError(f"{type(self).__name__} renders no images")

    def close(self) -> None:
        """Release all resources; called once. Most environments have none."""
        return


FOR_ALL = frozenset({"noise", "words"})
"""Kinds of perturbation that `SlotSimulator` does for every slot."""
FIRST_ACTIONS = 256
"""Actions of an episode for which there is room at first."""


class _Seat:
    """Place of a slot: its current environment and episode."""

    def __init__(self, number: int, action_dim: int) -> None:
        self.number = number
        self.slot: Slot | None = None
        self.episode: EpisodeSpec | None = None
        self.task_description = ""
        self.noise: ImageNoise | None = None
        """That of the episode's images; None without."""
        self.steps = 0
        self.over = True
        self.says_success = False
        """Whether the environment has said in this episode if the task is solved."""
        self.actions: NDArray[np.float32] = np.empty((FIRST_ACTIONS, action_dim), np.float32)
        """Those of the episode, and room for more; arbitrary numbers before the snapshot that it was restored from."""
        self.images: NDArray[np.uint8] | None = None
        self.proprio: NDArray[np.float32] | None = None

    def remember(self, actions: NDArray[np.float32], first: int) -> None:
        """Record actions `[C, D]`, the first of which was number `first` of the episode."""
        needed = first + len(actions)
        if needed > len(self.actions):
            # Twice as many each time: an episode without a time limit may be of any length.
            longer = np.empty((2 * needed, actions.shape[1]), np.float32)
            longer[: len(self.actions)] = self.actions
            self.actions = longer
        self.actions[first:needed] = actions

    def where(self) -> str:
        """Return text that names the slot, the step and the episode, for messages."""
        if self.episode is None:
            return f"slot {self.number}"
        episode = self.episode
        return (
            f"slot {self.number}, step {self.steps} "
            f"(task {episode.task!r}, start state {episode.start_state}, seed {episode.seed})"
        )


class SlotSimulator(ABC):
    """A `Simulator` made of `num_slots` single environments.

    Args:
        spec: the simulator's spec.
        num_slots: `B`, slots in this process.
        spare: environments that are already built, as (task, slot), for instance to determine `spec`.
        most_spare: environments that are kept for a later episode of their task, those played last; None: all.
    """

    spec: SimulatorSpec
    perturbs_episodes = True
    """Whether it follows `EpisodeSpec.perturb`, or refuses what it cannot do."""

    def __init__(
        self,
        spec: SimulatorSpec,
        num_slots: int,
        spare: Iterable[tuple[str, Slot]] = (),
        most_spare: int | None = None,
    ) -> None:
        self.spec = spec
        self._low, self._high = spec.action_low, spec.action_high
        self._seats = [_Seat(number, spec.action_dim) for number in range(num_slots)]
        self._idle: dict[str, list[Slot]] = {}
        """Environments that are kept, by task; the task that was put away last comes last."""
        self._most_idle = most_spare
        self._closed = False
        for task, slot in spare:
            self._idle.setdefault(task, []).append(slot)
        if len(spec.tasks) == 1:
            # Build now, within the time limit of the start, not that of the first reset. With several tasks it is not
            # known yet which environments will be needed.
            (task,) = spec.tasks
            idle = self._idle.setdefault(task, [])
            idle.extend(self.make_slot(task) for _ in range(num_slots - len(idle)))

    @abstractmethod
    def make_slot(self, task: str) -> Slot:
        """Build an environment for `task`, one of `spec.tasks`."""

    def reset(self, slots: Sequence[int], episodes: Sequence[EpisodeSpec]) -> Observation:
        """Start `episodes[i]` in slot `slots[i]`; returns the first observation of these slots, in that order."""
        check_episodes(slots, episodes)
        seats = self._take(slots)
        for seat, episode in zip(seats, episodes, strict=True):
            self._start(seat, episode)
            self._look(seat)
        return self._observation(seats)

    def step_chunk(self, slots: Sequence[int], actions: NDArray[np.float32]) -> ChunkResult:
        """Execute `actions [B, C, D]` (simulator units), stopping each slot at its own end of episode.

        Actions beyond the declared bounds are clipped to them.
        """
        seats = self._take(slots)
        actions = check_actions(actions, len(seats), self._low, self._high)
        result, says_success = nothing_executed(*actions.shape[:2]), []
        for row, seat in enumerate(seats):
            steps, terminated, truncated = self._run(seat, actions[row], result.rewards[row], result.success[row])
            result.steps[row], result.terminated[row], result.truncated[row] = steps, terminated, truncated
            says_success.append(seat.says_success)
            self._look(seat)
        result.success_known = np.array(says_success, np.bool_)
        result.observation = self._observation(seats)
        return result

    def observe(self, slots: Sequence[int]) -> Observation:
        """Return the current observation of these slots, that of the last reset, step_chunk or set_state."""
        return self._observation([self._playing(seat) for seat in self._take(slots)])

    def get_state(self, slots: Sequence[int]) -> list[bytes]:
        """Return a self-contained state per slot: the episode, and a snapshot or the actions so far. Never a pickle."""
        return [self._save(self._playing(seat)) for seat in self._take(slots)]

    def set_state(self, slots: Sequence[int], states: Sequence[bytes]) -> list[int]:
        """Continue from states of `get_state`, bit for bit: from the snapshot, or by replaying the actions.

        Returns:
            The slots whose observation differs from the saved one, each with a `RestoreMismatchWarning`.
        """
        if len(slots) != len(states):
            raise SimulatorError(f"set_state got {len(slots)} slots and {len(states)} states: one state per slot")
        seats = self._take(slots)
        return [seat.number for seat, state in zip(seats, states, strict=True) if not self._restore(seat, state)]

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """Render images for people, `[B, H, W, 3]`."""
        images = []
        for seat in self._take(slots):
            slot = self._playing(seat).slot
            assert slot is not None
            with timed_rendering():
                images.append(_with_noise(seat, slot.render()[None])[0])
        return np.stack(images)

    def close(self) -> None:
        """Release all resources; may be called twice."""
        if self._closed:
            return
        self._closed = True
        slots = [slot for idle in self._idle.values() for slot in idle]
        slots += [seat.slot for seat in self._seats if seat.slot is not None]
        self._idle, self._seats = {}, []
        for slot in slots:
            slot.close()

    def _take(self, slots: Sequence[int]) -> list[_Seat]:
        """Return the seats with these numbers."""
        if self._closed:
            raise SimulatorError("the simulator is closed")
        check_slots(slots, len(self._seats))
        return [self._seats[slot] for slot in slots]

    @staticmethod
    def _playing(seat: _Seat) -> _Seat:
        """Return the seat, after checking that an episode was started there."""
        if seat.episode is None:
            raise EpisodeOverError(f"slot {seat.number} has no episode yet: reset it first")
        return seat

    def _start(self, seat: _Seat, episode: EpisodeSpec) -> None:
        """Start `episode` at `seat`, with an environment of its task."""
        slot = self._admit(seat, episode)
        try:
            slot.reset(episode)
        except Exception as error:
            error.add_note(f"while resetting {seat.where()}")
            raise
        seat.over = False

    def _admit(self, seat: _Seat, episode: EpisodeSpec) -> Slot:
        """Record `episode` at `seat`; returns an environment of its task, not yet reset."""
        seat.over = True  # remains if the start fails
        if seat.slot is None or seat.episode is None or seat.episode.task != episode.task:
            self._switch(seat, episode.task)
        seat.episode, seat.steps, seat.task_description = episode, 0, self.spec.tasks[episode.task]
        seat.says_success = False
        seat.noise = None
        assert seat.slot is not None
        if episode.perturb:
            check_perturbations(episode, self.spec, FOR_ALL | seat.slot.perturbs)
            seat.task_description = paraphrased(seat.task_description, episode.seed, episode.perturb)
            seat.noise = ImageNoise.of(episode.seed, episode.perturb)
        return seat.slot

    def _switch(self, seat: _Seat, task: str) -> None:
        """Give `seat` an environment of `task`. The previous one is kept for the next seat that needs its task."""
        check_tasks([task], self.spec.tasks, "this simulator")
        idle = self._idle.get(task)
        found = idle.pop() if idle else None
        if seat.slot is not None and seat.episode is not None:
            self._put_away(seat.slot, seat.episode.task)
            seat.slot, seat.episode = None, None
        seat.slot = found or self.make_slot(task)

    def _put_away(self, slot: Slot, task: str) -> None:
        """Keep an environment for a later episode of its task, in place of the one that was put away longest ago if
        there are too many."""
        self._idle[task] = [*self._idle.pop(task, []), slot]
        if self._most_idle is not None and sum(map(len, self._idle.values())) > self._most_idle:
            next(slots for slots in self._idle.values() if slots).pop(0).close()

    def _run(
        self, seat: _Seat, chunk: NDArray[np.float32], rewards: NDArray[np.float32], success: NDArray[np.bool_]
    ) -> tuple[int, bool, bool]:
        """Execute `chunk [C, D]` at `seat` and fill `rewards, success [C]`; returns (steps, terminated, truncated)."""
        if seat.over:
            raise not_steppable(seat.number, seat.episode)
        assert seat.slot is not None
        seat.over = True  # remains if the environment fails
        step, isfinite = seat.slot.step, math.isfinite
        first, limit = seat.steps, min(self.spec.max_episode_steps, seat.slot.time_limit or MOST_EPISODE_STEPS)
        terminated = truncated = False
        try:
            for index in range(min(len(chunk), limit - first)):
                outcome = step(chunk[index])
                seat.steps += 1
                try:
                    reward, terminated, succeeded, truncated = outcome
                    if not isfinite(reward):
                        raise NotFiniteError(f"{seat.where()}: reward is {reward}, want a finite number")
                    rewards[index], success[index] = reward, succeeded
                    seat.says_success |= succeeded is not None
                    if terminated or truncated:
                        break
                except (TypeError, ValueError):
                    raise WrongResult([seat.number], _wrong_transition(seat.slot, outcome)) from None
        except SimulatorError:
            raise
        except Exception as error:
            error.add_note(f"after {seat.where()}")
            raise
        steps = seat.steps - first
        seat.remember(chunk[:steps], first)
        truncated = not terminated and (truncated or seat.steps >= limit)
        seat.over = bool(terminated or truncated)
        return steps, bool(terminated), truncated

    def _look(self, seat: _Seat) -> None:
        """Read and check the current observation of `seat`'s environment."""
        assert seat.slot is not None
        if self.spec.cameras:  # with images, reading the state takes negligible time
            with timed_rendering():
                seen = seat.slot.observe()
        else:
            seen = seat.slot.observe()
        source = f"{type(seat.slot).__name__}.observe()"
        if not isinstance(seen, (tuple, list)) or len(seen) != 2:
            text = f"{source} returned {described(seen)}, want a pair (images or None, proprio or None)"
            raise WrongResult([seat.number], text)
        images, proprio = seen
        wrong = wrong_proprio(source, proprio, self.spec) or wrong_images(source, images, self.spec)
        if wrong is not None:
            raise WrongResult([seat.number], wrong)
        if proprio is not None and not np.isfinite(proprio).all():
            entry = int(np.argmin(np.isfinite(proprio)))
            seat.over = True
            raise NotFiniteError(f"{seat.where()}: proprio[{entry}] is {proprio[entry]}, want a finite number")
        seat.images, seat.proprio = None if images is None else _with_noise(seat, images), proprio

    def _observation(self, seats: Sequence[_Seat]) -> Observation:
        """Return the last observations of `seats` as one batch."""
        images = proprio = None
        if self.spec.cameras:
            images = np.stack([seat.images for seat in seats if seat.images is not None])
        if self.spec.proprio_dim:
            proprio = np.stack([seat.proprio for seat in seats if seat.proprio is not None])
        return Observation(images=images, proprio=proprio, task_descriptions=[seat.task_description for seat in seats])

    def _save(self, seat: _Seat) -> bytes:
        """Return the state of `seat`: the episode, and a snapshot of its environment or the actions so far."""
        episode, slot = seat.episode, seat.slot
        assert episode is not None and slot is not None
        snapshot = slot.snapshot()
        header: dict[str, Any] = {
            "simulator": type(self).__name__,
            **episode.to_plain(),
            "steps": seat.steps,
            "action_dim": self.spec.action_dim,
            "over": seat.over,
            "check": _fingerprint(seat),
            "saved_by": "replay" if snapshot is None else "snapshot",
        }
        return pack(header, {"actions": seat.actions[: seat.steps]} if snapshot is None else snapshot)

    def _restore(self, seat: _Seat, state: bytes) -> bool:
        """Restore the episode of `state` at `seat`; returns whether it equals the saved one."""
        header, arrays = unpack(state)
        self._check_header(header)
        episode = EpisodeSpec.from_plain(header)
        if header["saved_by"] == "snapshot":
            self._restore_snapshot(seat, episode, arrays)
            seat.steps, seat.over = header["steps"], header["over"]
        else:
            self._start(seat, episode)
            actions = arrays["actions"]
            if len(actions):
                self._run(seat, actions, np.empty(len(actions), np.float32), np.empty(len(actions), np.bool_))
        self._look(seat)
        is_exact = (seat.steps, seat.over, _fingerprint(seat)) == (header["steps"], header["over"], header["check"])
        if not is_exact:
            warnings.warn(
                f"{seat.where()}: the restored episode is not bit for bit the one that was saved, which is lost (a "
                f"reset or step that depends on more than the episode? another processor, or other versions of the "
                f"simulator, than where it was saved?)",
                RestoreMismatchWarning,
                stacklevel=3,
            )
        return is_exact

    def _restore_snapshot(self, seat: _Seat, episode: EpisodeSpec, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the snapshot in `seat`'s environment."""
        slot = self._admit(seat, episode)
        try:
            slot.restore(episode, arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the state does not fit this environment of {episode.task!r}: {error}") from error

    def _check_header(self, header: Mapping[str, Any]) -> None:
        """Raise `StateError` if a state with this header does not belong to this simulator."""
        if header["simulator"] != type(self).__name__:
            raise StateError(f"the state is one of {header['simulator']}, this simulator is {type(self).__name__}")
        want = self.spec.action_dim, self.spec.max_episode_steps
        if header["action_dim"] != want[0] or header["steps"] > want[1]:
            raise StateError(
                f"the state has {header['action_dim']} action dims and {header['steps']} steps, this simulator "
                f"{want[0]} action dims and at most {want[1]} steps"
            )


def _with_noise(seat: _Seat, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images `[V, H, W, 3]` of a seat as its episode shows them."""
    return images if seat.noise is None else seat.noise.apply(images, seat.steps)


def check_perturbations(episode: EpisodeSpec, spec: SimulatorSpec, able: Iterable[str]) -> None:
    """Raise `UserError` if an episode is perturbed in a way that its simulator is not able to do."""
    can = [kind for kind in able if kind != "noise" or spec.cameras]
    for kind, _ in episode.perturb:
        if kind not in can:
            raise UserError(
                f"episodes of {episode.task!r} cannot be perturbed by {kind!r} here (possible: "
                f"{', '.join(sorted(can)) or 'nothing'}): leave it out of env.perturb and eval.perturb"
            )
    text = spec.tasks[episode.task]
    if level_of(episode.perturb, "words") and not has_paraphrases(text):
        raise UserError(
            f"there are no paraphrases of {text!r}, the task description of {episode.task!r}: leave words out of "
            f"env.perturb and eval.perturb, or begin it with a verb such as {', '.join(known_verbs()[:4])}"
        )


def check_slots(slots: Sequence[int], count: int) -> None:
    """Raise `SimulatorError` unless `slots` are different numbers from 0 to `count` - 1, at least one."""
    if len(slots) == 0:
        raise SimulatorError("got no slots: name at least one")
    if min(slots) < 0 or max(slots) >= count:
        raise SimulatorError(f"got slots {list(slots)}, want numbers from 0 to {count - 1}")
    if len(set(slots)) != len(slots):
        raise SimulatorError(f"got slots {list(slots)}, want each slot once")


def check_actions(
    actions: NDArray[np.float32], batch: int, low: NDArray[np.float32], high: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Check the shape, type and values of actions `[B, C, D]`; returns them clipped to `low, high [D]`.

    Raises:
        ActionError: they are wrong.
    """
    if not isinstance(actions, np.ndarray) or actions.dtype != np.float32:
        raise ActionError(f"actions are {getattr(actions, 'dtype', type(actions).__name__)}, want float32 numpy")
    want = (batch, max(actions.shape[1], 1) if actions.ndim == 3 else "C", len(low))
    if actions.shape != want:
        raise ActionError(f"actions have shape {actions.shape}, want [slots, chunk, action dims] = {want}")
    if not np.isfinite(actions).all():
        row, index, entry = (int(i) for i in np.argwhere(~np.isfinite(actions))[0])
        raise ActionError(f"actions[{row}, {index}, {entry}] is {actions[row, index, entry]}: want finite numbers")
    return np.clip(actions, low, high)


def check_episodes(slots: Sequence[int], episodes: Sequence[EpisodeSpec]) -> None:
    """Raise `SimulatorError` unless a reset has one episode per slot."""
    if len(slots) != len(episodes):
        raise SimulatorError(f"reset got {len(slots)} slots and {len(episodes)} episodes: one episode per slot")


def not_steppable(slot: int, episode: EpisodeSpec | None) -> EpisodeOverError:
    """Return the error for stepping a slot without a running episode; `episode` is its last one."""
    state = "its episode is over" if episode is not None else "it has no episode yet"
    return EpisodeOverError(f"slot {slot} was stepped but {state}: reset it first")


def check_tasks(tasks: Iterable[str], known: Iterable[str], backend: str) -> None:
    """Raise `UnknownNameError` for the first of `tasks` that `backend` does not know, with near match and full list."""
    names = list(known)
    for task in tasks:
        if task not in names:
            hint = did_you_mean(task, names, lead=" - ")
            raise UnknownNameError(f"{backend} has no task {task!r}{hint} (tasks: {', '.join(names) or 'none'})")


def check_task_list(tasks: Sequence[str], backend: str) -> None:
    """Raise `UserError` if `env.tasks` is empty or names a task twice."""
    if not tasks:
        raise UserError(f"env.tasks is empty: name at least one task of {backend}")
    if len(set(tasks)) != len(tasks):
        twice = next(task for task in tasks if list(tasks).count(task) > 1)
        raise UserError(f"env.tasks names {twice!r} twice: name each task once")


def check_cameras(cameras: Sequence[str], known: Iterable[str], backend: str) -> None:
    """Raise `UserError` if `env.cameras` names one twice or one that `backend` does not have."""
    names = list(known)
    for index, camera in enumerate(cameras):
        if camera not in names:
            hint = did_you_mean(camera, names, lead=" - ")
            raise UnknownNameError(f"{backend} has no camera {camera!r}{hint} (cameras: {', '.join(names) or 'none'})")
        if camera in cameras[:index]:
            raise UserError(f"env.cameras names {camera!r} twice: name each camera once")


def wrong_proprio(source: str, found: object, spec: SimulatorSpec, batch: tuple[int, ...] = ()) -> str | None:
    """Describe what is wrong with the state observation that a simulator returned; None: it is as declared.

    Args:
        source: what returned it, such as `Block.observe()`.
        found: float32 `[*batch, S]`, or None if S is 0.
        spec: of the simulator.
        batch: leading dimensions.
    """
    size = spec.proprio_dim
    shape = (*batch, size)
    if size == 0:
        return None if found is None else f"{source} returned proprio, but SimulatorSpec.proprio_dim is 0: return None"
    if isinstance(found, np.ndarray) and found.shape == shape and found.dtype == np.float32:
        return None
    remedy = f"return {size} numbers, or declare in SimulatorSpec how many there are"
    if isinstance(found, np.ndarray) and found.shape == shape:
        remedy = "convert it with .astype(np.float32)"
    return (
        f"{source} returned proprio {described(found)}, want float32 {shape}, the SimulatorSpec.proprio_dim = {size} "
        f"numbers{' of each env' if batch else ''}: {remedy}"
    )


def wrong_images(source: str, found: object, spec: SimulatorSpec, batch: tuple[int, ...] = ()) -> str | None:
    """Describe what is wrong with the images that a simulator returned; None: they are as declared.

    Args:
        source: what returned them.
        found: uint8 `[*batch, V, H, W, 3]`, or None without cameras.
        spec: of the simulator.
        batch: leading dimensions.
    """
    views = len(spec.cameras)
    shape = (*batch, views, *spec.image_size, 3)
    if views == 0:
        return None if found is None else f"{source} returned images, but SimulatorSpec.cameras is empty: return None"
    if isinstance(found, np.ndarray) and found.shape == shape and found.dtype == np.uint8:
        return None
    return (
        f"{source} returned images {described(found)}, want uint8 {shape}, that is "
        f"({'envs, ' * len(batch)}views, height, width, 3) with env.cameras = {list(spec.cameras)} and "
        f"env.image_size = {list(spec.image_size)}: {_remedy_of_images(found, shape)}"
    )


def _remedy_of_images(found: object, shape: tuple[int, ...]) -> str:
    if not isinstance(found, np.ndarray):
        return "return a numpy array with one image per camera"
    if found.ndim >= 3 and found.shape[-3] == 3 and found.shape[-1] != 3:
        return "channels come last: np.moveaxis(images, -3, -1)"
    if found.shape == shape:
        scale = "(255 * images).round()" if found.dtype.kind == "f" else "images"
        return f"colours are whole numbers from 0 to 255: {scale}.astype(np.uint8)"
    if found.shape == (*shape[:-4], *shape[-3:]):
        return "stack the images of the cameras, also if there is one: np.stack([image])"
    if found.ndim == len(shape) and found.shape[-1] == 3 and found.shape[:-3] == shape[:-3]:
        return "render at env.image_size, or embodyrl.envs.images.resize(image, *config.image_size) for each image"
    return "stack one RGB image per camera, in the order of env.cameras"


def _wrong_transition(slot: Slot | None, found: object) -> str:
    parts = found if isinstance(found, tuple) else ()
    what = f"{type(found).__name__}({', '.join(described(part) for part in parts)})" if parts else described(found)
    return (
        f"{type(slot).__name__}.step() returned {what}, want Transition(reward, terminated, success, truncated), a "
        "number and three bools: return Transition(reward=float(...), terminated=bool(...), success=bool(...))"
    )


def described(value: object) -> str:
    """Describe a value by its type, and an array by its shape too."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    return "None" if value is None else type(value).__name__


def _fingerprint(seat: _Seat) -> int:
    """Return a checksum of the last observation."""
    check = 0
    for array in (seat.images, seat.proprio):
        if array is not None:
            check = zlib.crc32(np.ascontiguousarray(array).data, check)
    return check
