"""A metric sink in one file: the success of training episodes as CSV. `embodyrl run examples/custom_sink.yaml`."""

from __future__ import annotations

from collections.abc import Mapping

from embodyrl.registry import SINKS
from embodyrl.tracking.sinks import SinkContext


class CsvSink:
    def __init__(self, context: SinkContext) -> None:
        path = context.run_dir / "success.csv"
        rows = path.read_text().splitlines() if path.exists() else ["iteration,return,success"]
        # A resume does again what followed its checkpoint.
        rows = rows[:1] + [row for row in rows[1:] if int(row.partition(",")[0]) <= context.start_iteration]
        self.file = path.open("w")
        self.file.writelines(f"{row}\n" for row in rows)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.file.write(f"{iteration},{metrics.get('env/return', '')},{metrics.get('env/success_once', '')}\n")

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        self.file.close()


SINKS.register("success_csv", target=CsvSink, summary="return and success as CSV")
