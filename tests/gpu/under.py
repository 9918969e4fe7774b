"""Run a program, a Python file, with a stand-in for a CUDA device.

    python tests/gpu/under.py FAMILY PROGRAM ARGUMENT ..

FAMILY is the kind of model that it uses (`cases.FAMILIES`). Programs that this one starts have no GPU.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import cases
from standin.device import gpu


def main() -> None:
    """Run it."""
    family, program, *arguments = sys.argv[1:]
    cases.load_families([family])
    warnings.filterwarnings("ignore")
    with gpu():
        sys.argv = [program, *arguments]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
