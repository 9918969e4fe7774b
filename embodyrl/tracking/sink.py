"""The Sink protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class SinkContext:
    """What a sink may want to know about the run."""

    run_dir: Path
    """Folder of the run; exists."""
    iterations: int
    """Iterations that the run will have at its end."""
    start_iteration: int
    """Iterations that were done before (0, or more when a run is resumed); what a sink wrote of later ones is void."""


class Sink(Protocol):
    """Receives the metrics of a run. Built by calling the registered target with a `SinkContext`."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one finished iteration (1, 2, ...; 0 is the evaluation before training)."""
        ...

    def message(self, text: str) -> None:
        """A line for people: an evaluation, a checkpoint, a warning."""
        ...

    def close(self) -> None:
        """The run is over; write what is still in memory."""
        ...
