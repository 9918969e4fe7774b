"""Mistakes that only a GPU shows, and things that make a CPU wait for it, each made on purpose on the stand-in.

    python tests/gpu/mistakes.py

prints as JSON what the stand-in says to each: its error, or what it counted.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from standin import events
from standin.device import gpu
from torch import Tensor, nn

ERRORS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum of both devices": lambda here, there: here + there,
    "product of both devices": lambda here, there: here[None] @ there[:, None],
    "written from the CPU by an operation": lambda here, there: there.add_(here),
    "one list of both devices": lambda here, there: torch.cat([here, there]),
    "layer on the CPU": lambda here, there: nn.Linear(4, 4)(there),
    "row of the CPU by an index of the GPU": lambda here, there: here[there.long()],
    "selected by an index of the CPU": lambda here, there: there.index_select(0, here.long()),
    "random numbers of the GPU from a generator of the CPU": lambda here, there: torch.randn(
        3, device="cuda", generator=torch.Generator().manual_seed(1)
    ),
    "random numbers of the CPU from a generator of the GPU": lambda here, there: torch.randperm(
        3, generator=torch.Generator("cuda")
    ),
    "written by a generator of the CPU": lambda here, there: there.normal_(generator=torch.Generator()),
    "numpy": lambda here, there: there.numpy(),
    "numpy without a word": lambda here, there: np.asarray(there),
    "numpy of a gradient's tensor": lambda here, there: there.clone().requires_grad_().detach().numpy(),
    "pinned on the GPU": lambda here, there: there.pin_memory(),
    "a second GPU": lambda here, there: here.to("cuda:1"),
}
ALLOWED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum with a single number of the CPU": lambda here, there: there + torch.tensor(2.0),
    "copy within the GPU": lambda here, there: there.clone(),
    "layer on the GPU": lambda here, there: nn.Linear(4, 4, device="cuda")(there).sum().backward(),
    "threads of autograd": lambda here, there: (there.clone().requires_grad_() ** 2).sum().backward(),
    "deep copy": lambda here, there: copy.deepcopy(there),
    "random numbers": lambda here, there: torch.rand(3, device="cuda", generator=torch.Generator("cuda")),
    "comparison with a number of the GPU": lambda here, there: torch.arange(4, device="cuda") == there.argmax(),
}
COUNTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "number": lambda here, there: there.sum().item(),
    "condition": lambda here, there: bool((there > 0).all()),
    "range": lambda here, there: range(there.argmax()),
    "list": lambda here, there: there.tolist(),
    "mask": lambda here, there: there[there > 0],
    "nonzero": lambda here, there: there.nonzero(),
    "unique": lambda here, there: torch.unique(there),
    "equal": lambda here, there: torch.equal(there, there),
    "device": lambda here, there: torch.cuda.synchronize(),
    "event": lambda here, there: torch.cuda.Event(enable_timing=True).synchronize(),
    "download": lambda here, there: there.cpu(),
    "download not waited for": lambda here, there: there.to("cpu", non_blocking=True),
    "upload": lambda here, there: here.to("cuda"),
    "upload of a literal": lambda here, there: torch.tensor([1.0, 2.0], device="cuda"),
    "upload in place": lambda here, there: there.copy_(here),
    "index of the CPU": lambda here, there: there[torch.tensor([0, 1])],
}


def make(mistake: Callable[[Tensor, Tensor], Any]) -> dict[str, Any]:
    """Return what the stand-in says."""
    here, there = torch.arange(4.0), torch.arange(4.0, device="cuda")
    before = events.SEEN.copy()
    try:
        mistake(here, there)
    except (RuntimeError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seen = events.since(before)
    return {"syncs": events.totals(seen)[0], "copies": events.totals(seen)[1], "lines": events.lines(seen)}


def main() -> None:
    """Make them all."""
    found = {}
    with gpu():
        for name, mistake in (ERRORS | ALLOWED | COUNTED).items():
            number = mistake.__code__.co_firstlineno
            found[name] = make(mistake) | {"at": f"{Path(__file__).relative_to(events.REPOSITORY)}:{number}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
