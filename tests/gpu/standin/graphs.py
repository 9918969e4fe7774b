"""CUDA graphs of the stand-in: operations that are written down once, and repeated on the same memory.

As in a real one, what Python does is done once, while the graph is recorded: sizes, numbers and choices are fixed then.
What waits for the GPU or copies is refused then, and so is a generator that is not registered. Memory that was there
before belongs to its owner: a graph that reads it after it was freed is an error here, and garbage on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from standin import events
from standin.nested import leaves, mapped

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"


class CUDAGraph:
    """What `torch.cuda.graph` records into."""

    recording: CUDAGraph | None = None
    """The one that is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._operations: list[Callable[[], None]] = []
        self._generators: set[int] = set()
        self._made: dict[int, Tensor] = {}
        """Memory of the graph, by the id of its tensor."""

    def register_generator_state(self, generator: torch._C.Generator) -> None:
        """Let operations draw from a generator, at every replay its next numbers."""
        self._generators.add(generator._cdata)

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Write down all operations from here on."""
        CUDAGraph.recording = self
        events.refuse = refuse

    def capture_end(self) -> None:
        """End the recording."""
        CUDAGraph.recording = events.refuse = None

    def write_down(self, func: Any, args: Any, kwargs: dict[str, Any], numbers: list[Tensor]) -> Any:
        """Compute an operation on tensors of the CPU, and write it down. Those of `numbers` are the CPU's own: single
        numbers, which are fixed."""
        for each in leaves((args, kwargs)):
            if isinstance(each, torch._C.Generator) and each._cdata not in self._generators:
                raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
        self._made |= {id(each): each for each in numbers}
        kept, made = mapped(self._keep, (args, kwargs)), func(*args, **kwargs)
        results = tensors(made)
        self._made |= {id(each): each for each in results}

        def repeat() -> None:
            again_args, again_kwargs = mapped(lambda value: value() if isinstance(value, _Memory) else value, kept)
            for target, source in zip(results, tensors(func(*again_args, **again_kwargs)), strict=True):
                if target.numel() and target.data_ptr() != source.data_ptr():  # else it is a view, or was written to
                    target.copy_(source)

        self._operations.append(repeat)
        return made

    def _keep(self, value: Any) -> Any:
        return _Memory(value, own=id(value) in self._made) if isinstance(value, Tensor) else value

    def replay(self) -> None:
        """Repeat all operations."""
        with torch.inference_mode(), _disable_current_modes():
            for operation in self._operations:
                operation()


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors of nested values."""
    return [each for each in leaves(value) if isinstance(each, Tensor)]


class _Memory:
    """A tensor that an operation reads or writes.

    Args:
        tensor: on the CPU.
        own: it belongs to the graph.
    """

    def __init__(self, tensor: Tensor, *, own: bool) -> None:
        self._held = tensor if own else None
        self._found = weakref.ref(tensor)

    def __call__(self) -> Tensor:
        found = self._found()
        if found is None:
            raise RuntimeError("CUDA error: a graph reads memory that was freed after it was recorded")
        return found


def refuse(what: str) -> None:
    """Refuse what a graph cannot record."""
    raise RuntimeError(f"{NOT_PERMITTED} ({what} at {events.line()})")
