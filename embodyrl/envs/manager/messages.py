"""What a RemoteManager and its SimulatorHost say to each other: small things as JSON, arrays and states as raw buffers.

Observations carry each image once: of the last observations of episodes, only those of slots whose episode ended.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.manager.manager import InvalidResult
from embodyrl.envs.manager.memory import RESULTS, StepResult, TaskDescriptions
from embodyrl.envs.manager.pool import TooManyDeaths
from embodyrl.envs.types import Observation
from embodyrl.errors import RunError, UserError
from embodyrl.placement.launcher import RemoteError, WorkerDied, WorkerError, WorkerTimeout
from embodyrl.placement.transport.line import Buffer, Line, understood

Arrays = dict[str, NDArray[Any]]
Place = Callable[[str, tuple[int, ...], "np.dtype[Any]"], NDArray[Any]]
"""Returns the memory for an array of this name, shape and type."""

_NUMBERS = "biuf"
"""Kinds of arrays that travel: bool, int, uint, float."""
_SMALL = (*RESULTS, "lost")
_KEPT = ("step_images", "step_proprio")
_FINAL = "final_"

_WORKER_ERRORS: dict[str, type[WorkerError]] = {
    kind.__name__: kind for kind in (WorkerDied, WorkerTimeout, InvalidResult, TooManyDeaths, WorkerError)
}
_OTHER_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (UserError, ValueError, RunError, RuntimeError)
}


@dataclass
class Message:
    """A request or its answer."""

    header: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    blobs: Sequence[Buffer] = ()
    """Bytes without a shape, such as states."""

    def send(self, line: Line, *, timeout_s: float) -> None:
        """Send it; see `Line.send`."""
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        described = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
        line.send({**self.header, "arrays": described}, [*arrays.values(), *self.blobs], timeout_s=timeout_s)

    @classmethod
    def receive(cls, line: Line, *, timeout_s: float, place: Place) -> Message:
        """Receive one, the arrays into memory that `place` chooses; see `Line.receive`. What is no message is a
        `LineError`, which ends the line."""
        arrays: Arrays = {}

        def room(header: dict[str, Any], sizes: list[int]) -> list[Buffer]:
            with understood(f"what {line.name} sent"):
                for (name, dtype, shape), size in zip(header["arrays"], sizes, strict=False):
                    # Anything else than numbers would be pointers.
                    if (kind := np.dtype(dtype)).kind not in _NUMBERS:
                        raise ValueError(f"array {name!r} of type {dtype} is not of numbers")
                    if min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != size:
                        raise ValueError(f"array {name!r} of type {dtype} and shape {shape} has {size} bytes")
                    arrays[name] = place(name, tuple(shape), kind)
                if len(arrays) != len(header["arrays"]):
                    raise ValueError(f"{len(header['arrays'])} arrays in {len(sizes)} buffers")
                return [*arrays.values(), *(bytearray(size) for size in sizes[len(arrays) :])]

        header, views = line.receive(timeout_s=timeout_s, room=room)
        return cls(header, arrays, views[len(arrays) :])


def own_memory(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return memory of the receiver's own, see `Place`."""
    return np.empty(shape, dtype)


class Results:
    """Observations and results as messages, and back.

    Args:
        descriptions: task descriptions of the simulators, which travel as their numbers.
    """

    def __init__(self, descriptions: Sequence[str]) -> None:
        self._descriptions = TaskDescriptions(descriptions)

    def of_observation(self, observation: Observation, prefix: str = "") -> Message:
        """Return the message with an observation."""
        arrays: Arrays = {}
        if observation.proprio is not None:
            arrays[prefix + "proprio"] = observation.proprio
        if observation.images is not None:
            arrays[prefix + "images"] = observation.images
        return Message({prefix + "tasks": self._descriptions.numbers(observation.task_descriptions)}, arrays)

    def observation(self, message: Message, prefix: str = "") -> Observation:
        """Return the observation of a message."""
        return Observation(
            images=message.arrays.get(prefix + "images"),
            proprio=message.arrays.get(prefix + "proprio"),
            task_descriptions=self._descriptions.texts(message.header[prefix + "tasks"]),
        )

    def of_step(self, result: StepResult) -> Message:
        """Return the message with a result."""
        message = self.of_observation(result.observation)
        if result.final_observation is not result.observation:
            # Where no episode ended, it is the same.
            last = self.of_observation(result.final_observation.take(result.ended), _FINAL)
            message.header |= last.header
            message.arrays |= last.arrays
        kept = {name: getattr(result, name) for name in _KEPT}
        message.arrays |= {name: getattr(result, name) for name in _SMALL}
        message.arrays |= {name: array for name, array in kept.items() if array is not None}
        return message

    def step(self, message: Message) -> StepResult:
        """Return the result of a message."""
        arrays = message.arrays
        now = final = self.observation(message)
        if _FINAL + "tasks" in message.header:
            rows = np.flatnonzero(arrays["terminated"] | arrays["truncated"])
            final = replaced(now, rows, self.observation(message, _FINAL))
        columns: dict[str, Any] = {name: arrays[name] for name in (*_SMALL, *_KEPT) if name in arrays}
        return StepResult(observation=now, final_observation=final, **columns)


def replaced(observation: Observation, rows: NDArray[np.int64], part: Observation) -> Observation:
    """Return a copy of an observation with other rows in some places."""
    whole = observation.take(np.arange(len(observation.task_descriptions)))
    if whole.images is not None and part.images is not None:
        whole.images[rows] = part.images
    if whole.proprio is not None and part.proprio is not None:
        whole.proprio[rows] = part.proprio
    for row, text in zip(rows.tolist(), part.task_descriptions, strict=True):
        whole.task_descriptions[row] = text
    return whole


def of_error(error: Exception) -> dict[str, Any]:
    """Describe an error, for `error_of` on the other side."""
    text = "; ".join([str(error), *getattr(error, "__notes__", [])])
    kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _OTHER_ERRORS), None)
    if isinstance(error, WorkerError):
        plain = {name: getattr(error, name) for name in ("role", "rank", "pid")}
        if isinstance(error, RemoteError):
            names = ("type_name", "remote_message", "remote_traceback", "is_user_error")
            plain["failure"] = {name: getattr(error, name) for name in names}
        return {"kind": type(error).__name__, "text": text, **plain}
    if kind is None:
        return {"kind": "RuntimeError", "text": "".join(traceback.format_exception(error))}
    return {"kind": kind, "text": text}


def error_of(plain: Mapping[str, Any], host: str) -> Exception:
    """Return the error that was described; that of a process of the other side says on which machine it was."""
    kind, text = plain["kind"], plain["text"]
    if kind in _OTHER_ERRORS:
        return _OTHER_ERRORS[kind](text)
    where = {name: plain[name] for name in ("role", "rank", "pid")}
    if "failure" in plain:
        return RemoteError(f"on {host}, {text}", **where, **plain["failure"])
    return _WORKER_ERRORS.get(kind, WorkerError)(f"on {host}, {text}", **where)
