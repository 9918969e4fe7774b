"""Sinks for metrics, reports and videos."""

from embodyrl.tracking.sinks import Sink, SinkContext

__all__ = ["Sink", "SinkContext"]
