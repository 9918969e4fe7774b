"""Framed messages over a stream socket: the control line between a parent and one worker process.

A frame is its length (4 bytes) and its bytes. File descriptors may travel with a frame. The parent's end never blocks
without a deadline; the worker's end blocks until something arrives.
"""

from __future__ import annotations

import array
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence

_LENGTH = struct.Struct("<I")
_READ = 4096
_MAX_READ = 1 << 20
_FD_SPACE = socket.CMSG_SPACE(8 * array.array("i").itemsize)


class Channel:
    """One end of the line.

    Args:
        sock: a connected stream socket; the channel owns it from now on.
        blocking: whether reading and writing wait as long as it takes. That is the worker's end, which alone is sent
            file descriptors.
    """

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        sock.setblocking(blocking)
        self._socket = sock
        self._takes_fds = blocking
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self.at_end = False
        """Whether the other side has closed its end. Frames that arrived before may still be there."""

    def fileno(self) -> int:
        """File descriptor to wait on for reading."""
        return self._socket.fileno()

    def send(self, message: bytes, *, fds: Sequence[int] = (), deadline: float | None = None) -> None:
        """Send one frame.

        Args:
            message: its bytes.
            fds: file descriptors that travel with it; the receiver gets its own copies from `take_fds`.
            deadline: `time.monotonic()` at which to give up; None: never.

        Raises:
            TimeoutError: the deadline passed (the line is then unusable: half a frame may be under way).
            OSError: the other side is gone.
        """
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while rest:
            try:
                sent = socket.send_fds(self._socket, [rest], list(fds)) if fds else self._socket.send(rest)
            except BlockingIOError:
                self._wait_until_writable(deadline)
                continue
            rest = rest[sent:]
            fds = ()

    def _wait_until_writable(self, deadline: float | None) -> None:
        """Wait for room, reading meanwhile: the other side may be stuck in sending to us."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT | (0 if self.at_end else select.POLLIN))
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
        ready = poll.poll(timeout)
        if not ready:
            raise TimeoutError("the other side does not read its messages")
        if ready[0][1] & select.POLLIN:
            self.fill()

    def fill(self) -> bool:
        """Read what has arrived, once; returns whether there may be more. Sets `at_end` if the other side closed."""
        size = max(_READ, self._missing())
        try:
            if self._takes_fds:
                data, ancillary, _, _ = self._socket.recvmsg(size, _FD_SPACE)
                self._keep_fds(ancillary)
            else:
                data = self._socket.recv(size)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        self._buffer += data
        self.at_end = not data
        return len(data) == size

    def _missing(self) -> int:
        """Bytes of the next frame that have not arrived yet, as far as its length is known."""
        if len(self._buffer) < _LENGTH.size:
            return 0
        return min(_LENGTH.size + int(_LENGTH.unpack_from(self._buffer)[0]) - len(self._buffer), _MAX_READ)

    def _keep_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)

    def next_frame(self) -> bytes | None:
        """The next complete frame among what has been read, or None."""
        buffer = self._buffer
        if len(buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + int(_LENGTH.unpack_from(buffer)[0])
        if len(buffer) < end:
            return None
        frame = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        return frame

    def receive(self) -> bytes:
        """The next frame, waiting as long as it takes (blocking end only).

        Raises:
            EOFError: the other side has closed its end.
        """
        while (frame := self.next_frame()) is None:
            if self.at_end:
                raise EOFError("the other side has closed the line")
            self.fill()
        return frame

    def take_fds(self, count: int) -> list[int]:
        """The next `count` file descriptors that arrived; the caller owns them."""
        return [self._fds.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close this end."""
        while self._fds:
            socket.close(self._fds.popleft())
        self._socket.close()
