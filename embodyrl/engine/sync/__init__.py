"""Weight sync: what a policy that acts in other processes needs to be the one that learns here.

Processes of the same machine map the memory that holds the weights, others read it. A transfer has a version and a
checksum, the first one carries everything (or nothing that both sides have read from the same files), later ones only
what changes (parameters that learn, and buffers), and whoever receives acts on a whole version or on the one before.
"""

from embodyrl.engine.sync.errors import ChecksumError, LayoutError, PeerLost, SyncError, SyncTimeout, VersionError
from embodyrl.engine.sync.layout import Entry, held_by
from embodyrl.engine.sync.shared import SharedReceiver, SharedSender

__all__ = [
    "ChecksumError",
    "Entry",
    "LayoutError",
    "PeerLost",
    "SharedReceiver",
    "SharedSender",
    "SyncError",
    "SyncTimeout",
    "VersionError",
    "held_by",
]
