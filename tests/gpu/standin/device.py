"""What `torch.cuda` says and does with the stand-in."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from standin import build
from standin.events import Kind, note
from standin.graphs import CUDAGraph
from standin.tensor import Device, Generator

MEMORY = 80 * 2**30
"""Of the device [bytes]."""
PROPERTIES = SimpleNamespace(name="stand-in", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132)


class Stream:
    """A stream or an event: all that was queued is done already."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        note(Kind.sync, "stream or event")

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Stream) -> float:
        return 0.0

    def record_event(self, *_: Any) -> Stream:
        return Stream()

    def record(self, *_: Any) -> None:
        pass

    wait = wait_stream = wait_event = record


CUDART = SimpleNamespace(cudaHostRegister=lambda start, size, flags: 0, cudaHostUnregister=lambda start: 0)


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def always(value: Any) -> Any:
    """Return a function that returns `value`."""
    return lambda *_, **__: value


SAYS = {
    "is_available": True,
    "is_initialized": True,
    "_is_compiled": True,
    "is_bf16_supported": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": PROPERTIES.name,
    "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
    "get_device_properties": PROPERTIES,
    "mem_get_info": (MEMORY, MEMORY),
    "memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "cudart": CUDART,
}
DOES_NOTHING = ("_lazy_init", "set_device", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all")
DOES_NOTHING += ("reset_peak_memory_stats", "set_rng_state")


@functools.cache
def install() -> None:
    """Make torch believe that there is a GPU, for the rest of the process."""
    build.load()
    changed = {name: always(value) for name, value in SAYS.items()} | dict.fromkeys(DOES_NOTHING, nothing)
    changed |= {
        "is_current_stream_capturing": lambda: CUDAGraph.recording is not None,
        "synchronize": lambda *_: note(Kind.sync, "device"),
        "Stream": Stream,
        "Event": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "CUDAGraph": CUDAGraph,
        "stream": lambda stream: stream or Stream(),
        "device": lambda *_: contextlib.nullcontext(),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    }
    for name, value in changed.items():
        setattr(torch.cuda, name, value)
    torch.Generator = Generator
    torch._C._host_emptyCache = nothing
    # Literals such as `torch.tensor([1.0], device="cuda")` are made on the CPU and then copied, so that we see them.
    torch._C._set_only_lift_cpu_tensors(True)
    # `module.to(device)` cannot write a tensor of the stand-in into the memory of one of the CPU.
    torch.__future__.set_overwrite_module_params_on_conversion(True)


@contextlib.contextmanager
def gpu() -> Iterator[None]:
    """Have a GPU inside, in threads that begin there too."""
    install()
    run = threading.Thread.run

    def run_with_gpu(thread: threading.Thread) -> None:
        with Device():
            run(thread)

    threading.Thread.run = run_with_gpu
    try:
        with Device():
            yield
    finally:
        threading.Thread.run = run
