"""Where metrics go."""

from embodyrl.tracking.sink import Sink, SinkContext

__all__ = ["Sink", "SinkContext"]
