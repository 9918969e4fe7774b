"""The protocol of metric sinks, and the sinks that write files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from embodyrl.config.schema import ServiceConfig
from embodyrl.files import write_whole
from embodyrl.runs import METRICS_FILE, TENSORBOARD
from embodyrl.runs.metrics import read_rows


@dataclass(frozen=True, kw_only=True)
class SinkContext:
    """Facts about the run for a sink."""

    run_dir: Path
    """Folder of the run; exists."""
    iterations: int
    """Iterations that the run will have at its end."""
    start_iteration: int
    """Iterations that were done before (0, or more when a run is resumed); a sink's records of later ones are invalid.
    """
    name: str = "run"
    """Name of the run."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The whole config, by the full names of its settings (`env.num_envs`)."""
    service: ServiceConfig = field(default_factory=ServiceConfig)
    """Options of sinks that are tracking services."""
    warn: Callable[[str], None] = print
    """Shows a line to people, and writes it to run.log."""


class Sink(Protocol):
    """Receives the metrics of a run. Built by calling the registered target with a `SinkContext`."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one finished iteration (1, 2, ...; 0 is the evaluation before training)."""
        ...

    def message(self, text: str) -> None:
        """Show a line for people: an evaluation, a checkpoint, a warning."""
        ...

    def close(self) -> None:
        """Write everything that is still in memory; the run is over."""
        ...


class JsonlSink:
    """Appends to metrics.jsonl; numbers that JSON cannot hold (nan, inf) become null."""

    def __init__(self, context: SinkContext) -> None:
        path = context.run_dir / METRICS_FILE
        if path.exists():
            rows = [row for row in read_rows(path)[0] if row["iteration"] <= context.start_iteration]
            write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = path.open("a", buffering=1)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write one line."""
        row = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"iteration": iteration} | row) + "\n")

    def message(self, text: str) -> None:
        """Ignore messages, which are for people."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


LAYOUT = {
    "run": {
        "success held out": ["Margin", ["eval/success_once", "eval/success_low", "eval/success_high"]],
        "success in training": ["Multiline", ["env/success_once", "env/success_recent"]],
        "return": ["Multiline", ["env/return", "env/return_recent", "eval/return"]],
    },
    "learning": {
        "losses": ["Multiline", ["train/policy_loss", "train/value_loss", "train/loss", "train/critic_loss"]],
        "entropy": ["Multiline", ["train/entropy"]],
        "KL divergence": ["Multiline", ["train/approx_kl", "train/reference_kl"]],
        "clipped": ["Multiline", ["train/clip_fraction"]],
        "explained variance": ["Multiline", ["train/explained_variance"]],
    },
    "time": {
        "env steps per second": ["Multiline", ["time/env_steps_per_s"]],
        "phases [s]": ["Multiline", ["time/simulate", "time/render", "time/infer", "time/train", "time/sync"]],
    },
}
"""Pages and charts of TensorBoard's Custom Scalars."""
COMPARED = ("eval/success_once", "eval/return", "env/return")
"""Metrics by which TensorBoard's HParams compares runs."""


class TensorboardSink:
    """Writes every metric as a scalar under `tensorboard/`, over the iterations; with a page of the charts that people
    read first (Custom Scalars), and the config (HParams)."""

    def __init__(self, context: SinkContext) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports torch

        purge = context.start_iteration + 1 if context.start_iteration else None
        self._writer = SummaryWriter(str(context.run_dir / TENSORBOARD), purge_step=purge)
        if not context.start_iteration:
            self._writer.add_custom_scalars(LAYOUT)
            self._add_settings(context.settings)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write one point per metric."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, iteration)

    def _add_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings for the table of runs, beside the metrics by which these are compared."""
        from torch.utils.tensorboard.summary import hparams

        shown = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}
        # Not `add_hparams`, which writes a run of its own.
        for summary in hparams(shown, dict.fromkeys(COMPARED, 0.0)):
            self._writer._get_file_writer().add_summary(summary)

    def message(self, text: str) -> None:
        """Messages are for people, not for these files."""

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
