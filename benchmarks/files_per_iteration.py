"""Count the files and functions of embodyrl that one training iteration executes in the main process.

    python benchmarks/files_per_iteration.py [metaworld_reach] [key=value ...] [--list]

The experiment runs for three iterations. A sink starts the profiler when the first iteration, the warm-up, is logged,
and stops it when the second is logged. Everything in between counts, in all threads of the main process. Simulator
processes are left out, and so are evaluation and checkpoints.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import embodyrl
from embodyrl.cli.train import run
from embodyrl.config import load_config
from embodyrl.registry import SINKS
from embodyrl.tracking import SinkContext

PACKAGE = str(Path(embodyrl.__file__).parent)
SINK = "tracer"
WARM_UP, TRACED = 1, 2
"""Numbers of the iteration before the profiler starts, and of the profiled one."""


class Tracer:
    """A sink that records which code of the package runs between two iterations."""

    codes: set[CodeType]

    def __init__(self, context: SinkContext) -> None:
        Tracer.codes = set()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Switch the profiler on after the warm-up, and off one iteration later."""
        if iteration == WARM_UP:
            threading.setprofile(self._note)  # threads that start from now on
            sys.setprofile(self._note)
        elif iteration == TRACED:
            sys.setprofile(None)
            threading.setprofile(None)

    def message(self, text: str) -> None:
        """Ignore the values."""

    def close(self) -> None:
        """Do nothing; no file is open."""

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.codes.add(frame.f_code)


def trace_iteration(experiment: str, overrides: list[str]) -> dict[str, set[str]]:
    """Names of the functions that an iteration calls, by file."""
    SINKS.register(SINK, Tracer, summary="records which code an iteration runs")
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"run.dir={folder}/run",
            "run.iterations=3",
            "run.eval_every=0",
            "run.save_every=0",
            "eval.episodes=1",
            f"tracking.sinks=[{SINK}]",
        ]
        run(load_config(experiment, [*settings, *overrides]))
    functions = defaultdict(set)
    for code in Tracer.codes:
        # Comprehensions and lambdas are parts of the function they are in.
        name = code.co_qualname.partition(".<locals>")[0].removesuffix(".<lambda>")
        functions[str(Path(code.co_filename).relative_to(PACKAGE))].add(name)
    return functions


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", default="metaworld_reach")
    parser.add_argument("overrides", nargs="*", help="settings, key=value")
    parser.add_argument("--list", action="store_true", help="print every file with its functions")
    arguments = parser.parse_args()
    functions = trace_iteration(arguments.experiment, arguments.overrides)
    if arguments.list:
        for file, names in sorted(functions.items()):
            print(f"{file} ({len(names)}): {', '.join(sorted(names))}")
    count = sum(len(names) for names in functions.values())
    print(f"{arguments.experiment}: an iteration runs through {len(functions)} files and {count} functions")


if __name__ == "__main__":
    main()
