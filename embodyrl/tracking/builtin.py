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
for _name, _module, _what in (
    ("wandb", "wandb", "Weights & Biases, offline or online"),
    ("trackio", "trackio", "trackio, on this machine, in a Space or on a server"),
    ("swanlab", "swanlab", "SwanLab, offline or online"),
    ("mlflow", "mlflow", "MLflow, in a file or on a server"),
):
    SINKS.register(
        _name,
        target=f"embodyrl.tracking.services:{_name.capitalize()}Sink",
        requires=[Requirement(module=_module, install=f"pip install 'embodyrl[{_name}]'")],
        summary=_what,
    )
