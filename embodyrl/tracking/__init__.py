"""Where metrics go."""

from embodyrl.tracking.sinks import Sink, SinkContext

__all__ = ["Sink", "SinkContext"]
