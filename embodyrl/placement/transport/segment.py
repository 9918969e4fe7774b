"""Shared memory of processes of one machine."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

from embodyrl.errors import RunError


class MemoryGone(RunError):
    """Raised when memory that another process of this machine shares cannot be mapped."""


class Segment:
    """Memory without a name (a memfd), so that nothing is left behind however the processes end. Who started the others
    hands them its file descriptor; others of the same user open its `address`.

    Args:
        fd: of the memory; the segment owns it from now on. What has been mapped stays when it is closed, after which
            `fd` is -1.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, kind: str, num_bytes: int = 0) -> Segment:
        """Make a segment of zeros, which the kernel lists as `embodyrl-<kind>`.

        Raises:
            OSError: it cannot be so large.
        """
        segment = cls(os.memfd_create(_name(kind), os.MFD_CLOEXEC))
        segment.resize(num_bytes)
        return segment

    @classmethod
    def open(cls, address: str, kind: str) -> Segment:
        """Open another process's segment anew, so that locks on it are this object's.

        Raises:
            OSError: there is none; the process has ended.
            ValueError: it is something else.
        """
        segment = cls(os.open(address, os.O_RDWR | os.O_CLOEXEC))
        if _name(kind) not in str(Path(f"/proc/self/fd/{segment.fd}").readlink()):
            segment.close()
            raise ValueError(f"{address} is no segment of {kind}")
        return segment

    @property
    def address(self) -> str:
        """Path at which processes of the same user on the same machine find it, while it is open here."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return os.fstat(self.fd).st_size

    def resize(self, num_bytes: int) -> None:
        """Change the size; what is added is 0 and takes memory once it is written to."""
        os.ftruncate(self.fd, num_bytes)

    def map(self, num_bytes: int, offset: int = 0, *, copied: bool = False) -> mmap.mmap:
        """Map a part.

        Args:
            num_bytes: at least 1.
            offset: where it begins; a multiple of the page size.
            copied: pages are shared until they are written to, which others do not see.
        """
        access = mmap.ACCESS_COPY if copied else mmap.ACCESS_WRITE
        return mmap.mmap(self.fd, num_bytes, access=access, offset=offset)

    def close(self) -> None:
        """Close the file; the memory is freed once nobody maps it any more. May be called again."""
        self._close()
        self.fd = -1  # another file may get its number


def _name(kind: str) -> str:
    return f"embodyrl-{kind}"
