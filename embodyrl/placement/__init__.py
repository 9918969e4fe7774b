"""Where processes live: a plan of workers, and launchers that run them."""

from embodyrl.placement.errors import RemoteError, WorkerDied, WorkerError, WorkerTimeout

__all__ = ["RemoteError", "WorkerDied", "WorkerError", "WorkerTimeout"]
