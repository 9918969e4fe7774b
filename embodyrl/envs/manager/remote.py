"""RemoteManager: simulators on another machine, with the methods of an EnvManager."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodyrl.envs.manager.memory import Slots, StepResult, Work
from embodyrl.envs.manager.messages import Message, Place, Results, error_of, own_memory
from embodyrl.envs.types import EpisodeSpec, Observation, SimulatorSpec
from embodyrl.files import Closing
from embodyrl.placement.launcher import WorkerError
from embodyrl.placement.transport.line import Address, LineError, connect, understood

T = TypeVar("T")
SLACK_S = 10.0
"""Time that a call may take beyond the deadlines of the simulators [s]."""
_CLOSE_S = 8.0
"""Longest time for the simulators to close [s]."""
_WITHOUT_PROCESSES = ("offload", "take_deaths", "take_mismatches", "take_work", "count_restarts")
"""Methods that do not start the processes again after `offload`."""


class RemoteManager(Closing):
    """The simulators of a `SimulatorHost`, which end with this object.

    It has the methods, results, errors and deadlines of `EnvManager`, and images stay valid as long. An error of a
    simulator process says on which machine it was. If the host dies, hangs or cannot be reached, a call raises a
    `LineError` that names its address, and only `close` still works.

    Args:
        address: of the host.
        timeout_s: longest time to reach it [s].

    Raises:
        LineError: it cannot be reached, or refuses the token.
    """

    spec: SimulatorSpec
    num_envs: int
    chunk_size: int

    def __init__(self, address: Address, *, timeout_s: float = 30.0) -> None:
        self.address = address
        self._closed = self._offloaded = False
        self._line = connect(address, timeout_s)
        self._step_timeout_s = self._startup_timeout_s = 0.0
        try:
            self._ask("describe", read=self._take_description)
        except BaseException:
            self._line.close()
            raise
        self._results = Results(list(self.spec.tasks.values()))
        self._images = _Images(self.num_envs)
        self._told: dict[int, EpisodeSpec | None] = {}
        """Episode of each slot that the host knows: it is not sent again until it changes."""
        self._under_way = np.zeros(self.num_envs, np.int64)
        """Number of the `send` whose chunk a slot executes; 0: none."""
        self._sent = 0

    def _take_description(self, answer: Message) -> None:
        offered = answer.header
        self.spec = described(offered["spec"])
        self.num_envs, self.chunk_size = (positive(offered[name]) for name in ("num_envs", "chunk_size"))
        self._step_timeout_s, self._startup_timeout_s = (
            seconds(offered[name]) for name in ("step_timeout_s", "startup_timeout_s")
        )

    def reset(self, slots: Slots, episodes: Sequence[EpisodeSpec]) -> Observation:
        """Start an episode in each slot; see `EnvManager.reset`."""
        chosen = _numbers(slots)
        sent = self._telling(chosen, episodes)
        asked = {"slots": chosen, "episodes": sent}
        return self._ask("reset", asked, place=self._images.of(chosen), read=self._observation_of(len(chosen)))

    def step(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> StepResult:
        """Execute a chunk in each slot and wait for the result; see `EnvManager.step`."""
        return self._chunk("step", slots, actions, next_episodes, read=self._step_of(len(slots)))

    def send(self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None) -> None:
        """Start executing a chunk in each slot; see `EnvManager.send`. Waits until the host has taken it, not more."""
        self._chunk("send", slots, actions, next_episodes, read=nothing)
        self._sent += 1
        self._under_way[_numbers(slots)] = self._sent

    def receive(self, slots: Slots) -> StepResult:
        """Wait for the chunks of these slots; see `EnvManager.receive`."""
        chosen = _numbers(slots)
        read = self._step_of(len(chosen))
        result = self._ask("receive", {"slots": chosen}, place=self._images.of(chosen), read=read)
        self._under_way[chosen] = 0
        return result

    def receive_ready(self, at_least: int) -> tuple[NDArray[np.int64], StepResult]:
        """Wait for the chunks of any slots; see `EnvManager.receive_ready`."""
        # A process executes what it was sent one after the other, each within the deadline.
        rounds = len(np.unique(self._under_way[self._under_way > 0]))

        def read(answer: Message) -> tuple[NDArray[np.int64], StepResult]:
            ready = np.array(self._slots(answer.header["slots"]), np.int64)
            return ready, self._step_of(len(ready))(answer)

        place = self._images.of(None)
        ready, result = self._ask("receive_ready", {"at_least": at_least}, rounds=rounds, place=place, read=read)
        self._under_way[ready] = 0
        return ready, result

    def step_recorded(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> tuple[StepResult, list[NDArray[np.uint8]]]:
        """Step and record a video; see `EnvManager.step_recorded`."""

        def read(answer: Message) -> tuple[StepResult, list[NDArray[np.uint8]]]:
            videos = [answer.arrays[f"video_{number}"] for number in range(len(slots))]
            frames = (None, None, None, 3)
            return self._step_of(len(slots))(answer), [fitting("a video", each, "u", frames) for each in videos]

        return self._chunk("step_recorded", slots, actions, next_episodes, read=read)

    def get_state(self, slots: Slots) -> list[bytes]:
        """Return one state per slot; see `EnvManager.get_state`."""

        def read(answer: Message) -> list[bytes]:
            if len(answer.blobs) != len(slots):
                raise ValueError(f"{len(answer.blobs)} states of {len(slots)} envs")
            return [bytes(blob) for blob in answer.blobs]

        return self._ask("get_state", {"slots": _numbers(slots)}, read=read)

    def set_state(self, slots: Slots, states: Sequence[bytes]) -> list[int]:
        """Continue slots from states; see `EnvManager.set_state`."""
        return self._ask("set_state", {"slots": _numbers(slots)}, blobs=states, read=self._slots_of)

    def observe(self, slots: Slots) -> Observation:
        """Return the current observations of slots; see `EnvManager.observe`."""
        chosen = _numbers(slots)
        read = self._observation_of(len(chosen))
        return self._ask("observe", {"slots": chosen}, place=self._images.of(chosen), read=read)

    def render(self, slots: Slots) -> NDArray[np.uint8]:
        """Return images of slots for people; see `EnvManager.render`."""

        def read(answer: Message) -> NDArray[np.uint8]:
            return fitting("images", answer.arrays["images"], "u", (len(slots), None, None, 3))

        return self._ask("render", {"slots": _numbers(slots)}, read=read)

    def offload(self) -> int:
        """End the processes until they are needed again; returns the bytes that this frees on the other machine."""
        return self._ask("offload", read=lambda answer: int(answer.header["value"]))

    def onload(self) -> None:
        """Start the processes again; see `EnvManager.onload`."""
        self._ask("onload", read=nothing)

    def take_deaths(self) -> list[WorkerError]:
        """Return the errors of processes that died and were replaced since the last call."""

        def read(answer: Message) -> list[WorkerError]:
            found = [error_of(plain, self.address.host) for plain in answer.header["value"]]
            return [error for error in found if isinstance(error, WorkerError)]

        return self._ask("take_deaths", read=read)

    def take_mismatches(self) -> list[int]:
        """Return the slots that were not restored bit for bit since the last call; one entry each time."""
        return self._ask("take_mismatches", read=self._slots_of)

    def count_restarts(self, restarts: int) -> None:
        """Set how many processes were replaced in the run so far, by all who play."""
        self._ask("count_restarts", {"restarts": restarts}, read=nothing)

    def take_work(self) -> Work:
        """Return the processes' working time since the last call."""
        return self._ask("take_work", read=lambda answer: Work(*map(seconds, answer.header["value"])))

    def close(self) -> None:
        """End the processes, within a few seconds even if they hang. May be called again."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(LineError), self._line:  # without a line they end by themselves
            Message({"method": "close"}).send(self._line, timeout_s=1.0)
            Message.receive(self._line, timeout_s=_CLOSE_S, place=own_memory)

    # ---- talking to the host

    def _chunk(
        self,
        method: str,
        slots: Slots,
        actions: ArrayLike,
        next_episodes: Sequence[EpisodeSpec | None] | None,
        read: Callable[[Message], T],
    ) -> T:
        chosen, chunk = _numbers(slots), {"actions": np.asarray(actions, np.float32)}
        sent = None if next_episodes is None else self._telling(chosen, next_episodes)
        asked, place = {"slots": chosen, "episodes": sent}, self._images.of(chosen)
        return self._ask(method, asked, arrays=chunk, place=place, read=read)

    # ---- answers, which are a `LineError` if they are anything else

    def _observation_of(self, count: int) -> Callable[[Message], Observation]:
        """Return what reads the observation of so many slots."""
        return lambda answer: self._fitting(self._results.observation(answer), count)

    def _step_of(self, count: int) -> Callable[[Message], StepResult]:
        """Return what reads the result of a chunk of so many slots."""

        def read(answer: Message) -> StepResult:
            result = self._results.step(answer)
            for name, kind in (("rewards", "f"), ("success", "b")):
                fitting(name, getattr(result, name), kind, (count, self.chunk_size))
            for name, kind in (("terminated", "b"), ("truncated", "b"), ("steps", "iu"), ("lost", "b")):
                fitting(name, getattr(result, name), kind, (count,))
            for each in (result.observation, result.final_observation):
                self._fitting(each, count)
            return result

        return read

    def _fitting(self, observation: Observation, count: int) -> Observation:
        """Check the sizes of an observation of so many slots."""
        spec = self.spec
        for name, array, kind, shape in (
            ("proprio", observation.proprio, "f", (spec.proprio_dim,)),
            ("images", observation.images, "u", (spec.num_images, *spec.image_size, 3)),
        ):
            if array is not None:
                fitting(name, array, kind, (count, *shape))
            elif math.prod(shape):
                raise ValueError(f"there are no {name}")
        if len(observation.task_descriptions) != count:
            raise ValueError(f"{len(observation.task_descriptions)} task descriptions of {count} envs")
        return observation

    def _slots_of(self, answer: Message) -> list[int]:
        return self._slots(answer.header["value"])

    def _slots(self, numbers: Any) -> list[int]:
        if not all(type(number) is int and 0 <= number < self.num_envs for number in numbers):
            raise ValueError(f"envs {numbers!r} of {self.num_envs}")
        return list(numbers)

    def _ask(
        self,
        method: str,
        header: dict[str, Any] | None = None,
        *,
        arrays: dict[str, NDArray[Any]] | None = None,
        blobs: Sequence[bytes] = (),
        place: Place = own_memory,
        rounds: int = 1,
        read: Callable[[Message], T],
    ) -> T:
        """Call a method of the other side's manager; returns what `read` makes of the answer.

        Args:
            method: its name.
            header, arrays, blobs: its arguments.
            place: memory for arrays of the answer.
            rounds: times that a simulator may take its longest.
            read: may raise any error of a wrong type, name or size.
        """
        if self._closed:
            raise RuntimeError("this RemoteManager is closed")
        timeout_s = max(1, rounds) * self._step_timeout_s + SLACK_S
        if self._offloaded and method not in _WITHOUT_PROCESSES:  # they are started first
            timeout_s += self._startup_timeout_s + self._step_timeout_s
        try:
            Message({"method": method, **(header or {})}, arrays or {}, blobs).send(self._line, timeout_s=timeout_s)
            answer = Message.receive(self._line, timeout_s=timeout_s, place=place)
            while (more_s := answer.header.get("more_s")) is not None:  # it replaces a process that died
                with understood("the answer"):
                    longest_s = seconds(more_s) + SLACK_S
                answer = Message.receive(self._line, timeout_s=longest_s, place=place)
            with understood("the answer"):
                failure = error_of(answer.header["error"], self.address.host) if "error" in answer.header else None
                found = read(answer) if failure is None else None
        except LineError as error:
            self._line.interrupt()
            raise type(error)(f"the simulators at {self.address} failed in {method!r}: {error}") from None
        except BaseException:
            # The answer that is still to come would be taken for that of the next call.
            self._line.interrupt()
            raise
        self._offloaded = method == "offload" or (self._offloaded and method in _WITHOUT_PROCESSES)
        if failure is not None:
            raise failure
        return cast("T", found)

    def _telling(self, slots: Sequence[int], episodes: Sequence[EpisodeSpec | None]) -> list[Any]:
        """Return episodes for a message: their fields, None for none, True for one that the host has."""
        if len(episodes) != len(slots):
            raise ValueError(f"got {len(episodes)} episodes for {len(slots)} envs")
        sent: list[Any] = []
        for slot, episode in zip(slots, episodes, strict=True):
            known = slot in self._told and self._told[slot] is episode
            sent.append(True if known else None if episode is None else episode.to_plain())
            self._told[slot] = episode
        return sent


LONGEST_S = 86400.0
"""Longest deadline that a host may ask for [s]."""


def nothing(answer: Message) -> None:
    """Read nothing of an answer."""


def seconds(value: Any) -> float:
    """Return a number of seconds."""
    if isinstance(value, bool) or not 0.0 <= float(value) <= LONGEST_S:
        raise ValueError(f"{value!r} seconds")
    return float(value)


def positive(value: Any) -> int:
    """Return a count of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no count")
    return value


def fitting(name: str, array: NDArray[Any], kinds: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """Return an array of some kinds of numbers and a shape; None: any size."""
    fits = array.ndim == len(shape) and all(
        want in (None, size) for want, size in zip(shape, array.shape, strict=False)
    )
    if array.dtype.kind not in kinds or not fits:
        raise ValueError(f"{name} are {array.dtype} {array.shape}, expected {shape}")
    return array


def described(plain: Any) -> SimulatorSpec:
    """Return the spec that a host describes."""
    spec = SimulatorSpec.from_plain(plain)
    texts = [*spec.tasks.keys(), *spec.tasks.values(), *spec.cameras, *(field.name for field in spec.actions)]
    counts = [spec.proprio_dim, spec.max_episode_steps, spec.frames, *spec.image_size]
    numbers = [spec.control_frequency, *(limit for field in spec.actions for limit in (*field.low, *field.high))]
    if (
        not all(isinstance(text, str) for text in texts)
        or not all(type(count) is int and count >= 0 for count in counts)
        or not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        or len(spec.image_size) != 2
        or not (spec.tasks and spec.actions)
    ):
        raise ValueError(f"{spec} describes no simulator")
    return spec


def _numbers(slots: Slots) -> list[int]:
    index = np.asarray(slots, np.int64)
    if index.ndim != 1:
        raise ValueError(f"slots must be a list of different slots, got {list(slots)}")
    numbers: list[int] = index.tolist()
    return numbers


class _Images:
    """Memory in which images land: two buffers for each slot, which take turns as those of an EnvManager do, so that no
    page is touched for the first time in every step."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._turn = np.zeros(num_envs, np.int8)
        """Which buffer of a slot holds its last images."""
        self._buffers: list[NDArray[np.uint8]] = []

    def of(self, slots: Sequence[int] | None) -> Place:
        """Return where the images of these slots go, if they are consecutive; None: it is not known which come."""

        def place(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
            if name != "images" or not slots or list(slots) != list(range(slots[0], slots[0] + len(slots))):
                return np.empty(shape, dtype)
            return self._next(slice(slots[0], slots[0] + len(slots)), shape[1:])

        return place

    def _next(self, slots: slice, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        if not self._buffers:
            self._buffers = [np.zeros((self._num_envs, *shape), np.uint8) for _ in range(2)]
        self._turn[slots] ^= 1
        turns = self._turn[slots]
        if turns.min() != turns.max():
            return np.empty((slots.stop - slots.start, *shape), np.uint8)
        images: NDArray[np.uint8] = self._buffers[turns[0]][slots]
        return images
