"""metrics.jsonl: one JSON object per iteration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from embodyrl.tracking.sink import SinkContext

METRICS_FILE = "metrics.jsonl"


class JsonlSink:
    """Appends to metrics.jsonl; numbers that JSON has no word for (nan, inf) become null."""

    def __init__(self, context: SinkContext) -> None:
        path = context.run_dir / METRICS_FILE
        if path.exists():
            lines = [line for line in path.read_text().splitlines() if _is_valid(line, context.start_iteration)]
            temporary = path.with_name(f".{METRICS_FILE}.tmp")  # a kill in between leaves the old file
            temporary.write_text("".join(line + "\n" for line in lines))
            temporary.replace(path)
        self._file = path.open("a", buffering=1)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write one line."""
        row = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"iteration": iteration} | row) + "\n")

    def message(self, text: str) -> None:
        """Messages are for people, not for this file."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_valid(line: str, last_iteration: int) -> bool:
    """Whether a line written before a resume still counts: complete, and not of an iteration that is done again."""
    try:
        return bool(json.loads(line)["iteration"] <= last_iteration)
    except (json.JSONDecodeError, KeyError):
        return False
