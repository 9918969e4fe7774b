"""`embodyrl` in which memory runs out in the third iteration: `python exhausted.py WHERE HOW ARGUMENTS...`.

WHERE: `collect` or `learn`. HOW: `torch` or `python` really ask for more than this process may have (RLIMIT_AS); `cuda`
raises what torch raises on a GPU.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

import torch

from embodyrl.cli.main import main
from embodyrl.methods.on_policy.learner import OnPolicyLearner
from embodyrl.rollout.collector import Collector


def ask_for_too_much(how: str) -> None:
    if how == "cuda":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore advice")
    resource.setrlimit(resource.RLIMIT_AS, (2**36, resource.RLIM_INFINITY))
    held = torch.empty(2**40, dtype=torch.uint8) if how == "torch" else bytearray(2**40)
    raise AssertionError(f"{len(held)} bytes were there")


def fail_at(number: int, kind: type, method: str, how: str) -> None:
    original: Callable[..., Any] = getattr(kind, method)
    count = 0

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            ask_for_too_much(how)
        return original(self, *arguments)

    setattr(kind, method, counted)


where, how, *sys.argv[1:] = sys.argv[1:]
if where == "learn":
    fail_at(3, OnPolicyLearner, "update", how)
else:
    fail_at(60, Collector, "_receive", how)  # of the 25 chunks that each of them receives, amid the third rollout
main()
