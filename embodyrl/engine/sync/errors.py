"""Errors of a transfer of weights."""

from __future__ import annotations

from embodyrl.errors import RunError


class SyncError(RunError):
    """Raised when weights did not arrive. Whoever was to receive them still has those that it received before, whole;
    its `version` is None if there are none."""


class LayoutError(SyncError):
    """Raised when sender and receiver have different tensors: names, shapes or types; each is named."""


class VersionError(SyncError):
    """Raised when a version comes twice or out of order, or was overwritten by a newer one."""


class ChecksumError(SyncError):
    """Raised when what arrived is not what was sent."""


class SyncTimeout(SyncError):
    """Raised when the other side does not answer in time."""


class PeerLost(SyncError):
    """Raised when the process on the other side has ended."""
