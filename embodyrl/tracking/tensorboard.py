"""Event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from embodyrl.tracking.sink import SinkContext


class TensorboardSink:
    """Writes every metric as a scalar under `tensorboard/`, over the iterations."""

    def __init__(self, context: SinkContext) -> None:
        purge = context.start_iteration + 1 if context.start_iteration else None
        self._writer = SummaryWriter(str(context.run_dir / "tensorboard"), purge_step=purge)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write one point per metric."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, iteration)

    def message(self, text: str) -> None:
        """Messages are for people, not for these files."""

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
