"""Scripts of `benchmarks/`, which is no package, as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


def load(name: str) -> ModuleType:
    """Import the script of that name, as the scripts import each other."""
    sys.path.insert(0, BENCHMARKS)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(BENCHMARKS)
