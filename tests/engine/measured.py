"""Peak memory of a block, as torch's allocators saw it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(block: Callable[[], object], device: torch.device) -> int:
    """Most bytes that `block` had allocated at once, beyond those that were allocated before."""
    gc.collect()  # what nobody holds any more is not freed in the midst of it
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        block()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        block()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


def least_peak_bytes(block: Callable[[], object], device: torch.device, times: int = 4) -> int:
    """Least of several `peak_bytes` of a block that can be run again, for one in which several processes communicate:
    what a thread of gloo frees is not seen, so that single measurements are too large, never too small."""
    return min(peak_bytes(block, device) for _ in range(times))
