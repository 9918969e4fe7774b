"""What the program needs of whoever starts it: streams to print to, and address space for torch."""

from __future__ import annotations

import importlib.util
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from embodyrl.errors import RunError

COMPUTING = ("run", "resume", "eval", "verify", "export", "collect")
"""Commands that import torch, unless they have one of the options in `LIGHT`."""
LIGHT = {"-h", "--help", "--print-config"}
SPACE_OF_TORCH = 1.75
"""Address space that torch and what a run imports with it take, in sizes of its libraries; measured for torch 2.13 on
the CPU."""


def check_surroundings(arguments: Sequence[str]) -> None:
    """Check what a command needs, before it does anything.

    Raises:
        RunError: stdout or stderr is closed, so that the next file would take its place; or `ulimit -v` leaves too
            little for torch. Within an import, a lack of memory shows as any error, or as several.
    """
    for name, silence in (("stdout", ">/dev/null"), ("stderr", "2>/dev/null")):
        if getattr(sys, name) is None:
            raise RunError(f"{name} is closed, and embodyrl prints there: to see nothing of it, write {silence}")
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if command in COMPUTING and not LIGHT.intersection(arguments) and limit != resource.RLIM_INFINITY:
        needed = space_of_torch()
        if needed > limit:
            raise RunError(
                f"this shell allows a process {limit / 1e9:.1f} GB of address space (ulimit -v {limit // 1024}), and "
                f"torch alone needs about {needed / 1e9:.1f} GB: raise the limit, as with ulimit -v unlimited"
            )


def space_of_torch() -> int:
    """Return the address space of this process once it has imported torch [bytes], estimated without importing it."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    spec = importlib.util.find_spec("torch")
    if "torch" in sys.modules or spec is None or spec.origin is None:
        return taken
    libraries = (Path(spec.origin).parent / "lib").glob("*.so*")
    return taken + int(SPACE_OF_TORCH * sum(path.stat().st_size for path in libraries))
