"""The same numbers again (`engine.deterministic`)."""

from __future__ import annotations

import os

import torch


def be_deterministic() -> None:
    """Have torch choose algorithms that give the same bits every time on the same machine, and raise an error where it
    has none. For the whole process, and before it first multiplies matrices on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
