"""The built-in metric sinks, declared by name."""

from __future__ import annotations

from embodyrl.registry import SINKS, Requirement

SINKS.register(
    "console",
    target="embodyrl.tracking.console:ConsoleSink",
    summary="live table, or plain lines in a pipe",
)
SINKS.register(
    "jsonl",
    target="embodyrl.tracking.sinks:JsonlSink",
    summary="metrics.jsonl, one JSON object per iteration",
)
SINKS.register(
    "tensorboard",
    target="embodyrl.tracking.sinks:TensorboardSink",
    requires=[Requirement(module="tensorboard", install="pip install tensorboard")],
    summary="event files for TensorBoard",
)
