"""Lines between machines: TCP connections that carry JSON headers and raw buffers, opened by a token.

Nothing that arrives is unpickled. A frame is a prefix (magic, kind, length of the header, number of buffers), the sizes
of the buffers, the header, and the buffers themselves, which are sent from where they are and received to where they
are wanted.

A line opens with a challenge in both directions: each side proves with HMAC-SHA256 over the nonces of both that it has
the token, which itself never travels. What follows is neither encrypted nor signed: lines belong in a network whose
wires can be trusted, as that of a cluster.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import RunError
from embodyrl.files import Closing

Header = Mapping[str, Any]
"""What JSON can hold."""
Buffer = bytes | bytearray | memoryview | NDArray[Any]
"""Memory to send: contiguous, in rows."""
Room = Callable[[dict[str, Any], list[int]], Sequence[Buffer]]
"""Returns the memory that buffers of these sizes [bytes] go to, given the header that came with them."""

MAX_HEADER: Final = 1 << 22
"""Longest header [bytes]; what is larger travels in a buffer."""
MAX_BUFFERS: Final = 1 << 16
"""Most buffers of a frame."""
MAX_BYTES: Final = 1 << 36
"""Most bytes of all buffers of a frame."""

OPENING_S: Final = 5.0
"""Longest time that a stranger may take to prove that it has the token [s]."""
GONE_S: Final = 9.0
"""Time without a sign of life after which the other machine counts as gone [s]."""

_PREFIX = struct.Struct("<4sBII")
_MAGIC = b"eRL1"
_MESSAGE, _FAILURE = 0, 1
_AT_ONCE = 1024
"""Most buffers in one system call (IOV_MAX)."""
_NONCE, _PROOF = 32, 32
_MAX_STRANGERS = 64
_TRYING_S = 2.0
"""Time within which a connection that fails is tried again [s]: the other side may be short of something just now."""
_PAUSE_S = 0.1
"""Pause before something that failed for want of files, memory or threads is tried again [s]."""
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOOK_S = 1.0
"""Pause between two looks at whether the other machine still acknowledges what was sent [s]."""
_TCP_INFO_SIZE, _UNACKED_AT, _LAST_ACK_AT = 104, 24, 56
"""Of the kernel's `struct tcp_info`: its size, and where `tcpi_unacked` and `tcpi_last_ack_recv` [ms] are."""


class LineError(RunError):
    """Raised when a line cannot be opened or used; names the other side's host and port."""


class LineLost(LineError):
    """Raised when the other side of a line has gone."""


class LineTimeout(LineError):
    """Raised when the other side of a line was too slow."""


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Read what the other side has sent, in a block that need not check each part of it.

    Raises:
        LineError: it is something else than the block expects.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise LineError(f"{what} cannot be understood ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class Address:
    """Where a process listens, and the token that opens a line to it. Travels as `dataclasses.asdict` in JSON."""

    host: str
    port: int
    token: str = field(repr=False)
    """A secret: whoever has it can open a line."""

    def __str__(self) -> str:
        return _name(self.host, self.port)


class Line(Closing):
    """An open line. One thread may send while another one receives. A deadline that passes or a damaged frame ends the
    line, since what follows could not be understood: every later call raises the same error.

    Args:
        connection: whose other side has proved itself; the line owns it from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.name = _name(*connection.getpeername()[:2])
        """Host and port of the other side."""
        self._ended: LineError | None = None
        connection.setblocking(False)
        # Sizes of the kernel's buffers are left alone: they grow to megabytes by themselves, but not once one was set.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def fileno(self) -> int:
        """Return the file descriptor to wait on for frames; -1 once closed."""
        return self._socket.fileno()

    def send(self, header: Header, buffers: Sequence[Buffer] = (), *, timeout_s: float) -> None:
        """Send a frame; returns once the kernel has taken all of it.

        Args:
            header: what JSON can hold, at most `MAX_HEADER` bytes of it.
            buffers: sent from where they are.
            timeout_s: longest time [s].

        Raises:
            ValueError: the frame is too large, or a buffer is not contiguous.
            LineError: see the class.
        """
        self._send(_MESSAGE, header, buffers, timeout_s)

    def send_failure(self, text: str, *, timeout_s: float) -> None:
        """Send the reason why a request cannot be answered: `receive` of the other side raises it as a `LineError`."""
        self._send(_FAILURE, {"text": text}, (), timeout_s)

    def _send(self, kind: int, header: Header, buffers: Sequence[Buffer], timeout_s: float) -> None:
        self._check_open()
        data, views = json.dumps(header, separators=(",", ":")).encode(), [_bytes_of(buffer) for buffer in buffers]
        sizes = [view.nbytes for view in views]
        if len(data) > MAX_HEADER or len(sizes) > MAX_BUFFERS or sum(sizes) > MAX_BYTES:
            raise ValueError(
                f"a frame of {len(data)} bytes of header and {len(sizes)} buffers of {sum(sizes)} bytes is too large: "
                f"at most {MAX_HEADER}, {MAX_BUFFERS} and {MAX_BYTES}"
            )
        head = _PREFIX.pack(_MAGIC, kind, len(data), len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + data
        wait = _Wait(self, select.POLLOUT, timeout_s, "take what was sent")
        _move([memoryview(head), *views], self._socket.sendmsg, wait)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something has arrived or the other side has gone; returns False if time is up.

        Args:
            timeout_s: longest time [s]; None: any.

        Raises:
            LineLost: the other machine no longer answers.
        """
        self._check_open()
        return _Wait(self, select.POLLIN, timeout_s, "say anything").once()

    def receive(self, *, timeout_s: float, room: Room | None = None) -> tuple[dict[str, Any], list[memoryview]]:
        """Receive a frame; returns its header and its buffers.

        Args:
            timeout_s: longest time until all of it is there [s].
            room: see `Room`; None: memory of their own.

        Raises:
            LineError: see the class; or the other side sent a failure, which does not end the line.
        """
        self._check_open()
        wait = _Wait(self, select.POLLIN, timeout_s, "answer")
        magic, kind, length, count = _PREFIX.unpack(self._read(_PREFIX.size, wait))
        if magic != _MAGIC or kind not in (_MESSAGE, _FAILURE) or length > MAX_HEADER or count > MAX_BUFFERS:
            raise self._end(LineError(f"{self.name} sent what is no frame, so the line to it was closed"))
        rest = self._read(8 * count + length, wait)
        sizes = list(struct.unpack_from(f"<{count}Q", rest))
        header = self._decoded(rest[8 * count :])
        if sum(sizes) > MAX_BYTES:
            raise self._end(LineError(f"{self.name} announced {sum(sizes)} bytes, so the line to it was closed"))
        if room is None or kind == _FAILURE:  # what explains a failure is not what there is room for
            views = [np.empty(size, np.uint8).data for size in sizes]
        else:
            views = self._room(room, header, sizes)
        _move(list(views), self._socket_receive, wait)
        if kind == _FAILURE:
            raise LineError(f"{self.name} could not answer: {header.get('text')}")
        return header, views

    def ask(
        self, header: Header, buffers: Sequence[Buffer] = (), *, timeout_s: float, room: Room | None = None
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Send a request and receive its answer, within `timeout_s` each. See `send` and `receive`."""
        self.send(header, buffers, timeout_s=timeout_s)
        return self.receive(timeout_s=timeout_s, room=room)

    def _room(self, room: Room, header: dict[str, Any], sizes: list[int]) -> list[memoryview]:
        try:
            views = [_bytes_of(buffer) for buffer in room(header, sizes)]
            if [view.nbytes for view in views] != sizes:
                raise ValueError(f"{self.name} sent buffers of {sizes} bytes, and there is room for other sizes")
        except BaseException as error:
            # What is under way would be taken for the next frame.
            self._end(LineError(f"the line to {self.name} was closed, because there was no room for a frame: {error}"))
            raise
        return views

    def _decoded(self, data: bytearray) -> dict[str, Any]:
        try:
            header = json.loads(data)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise self._end(LineError(f"{self.name} sent a header that is no JSON object, so the line was closed"))
        return header

    def _read(self, size: int, wait: _Wait) -> bytearray:
        data = bytearray(size)
        _move([memoryview(data)], self._socket_receive, wait)
        return data

    def _socket_receive(self, views: list[memoryview]) -> int:
        moved = self._socket.recvmsg_into(views)[0]
        if moved == 0:
            raise ConnectionResetError("it closed the line")
        return moved

    def lost(self, why: object) -> LineLost:
        """End the line; returns the error that says that the other side has gone."""
        error = LineLost(f"{self.name} is gone: {why}")
        self._end(error)
        return error

    def late(self, what: str, timeout_s: float) -> LineTimeout:
        """End the line; returns the error that says that the other side was too slow."""
        error = LineTimeout(f"{self.name} did not {what} within {timeout_s:g} s")
        self._end(error)
        return error

    def _end(self, error: LineError) -> LineError:
        self._ended = self._ended or error
        with contextlib.suppress(OSError):  # the other side may have gone; ours learns of the end at once
            self._socket.shutdown(socket.SHUT_RDWR)
        return error

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self._socket.fileno() < 0:
            raise LineLost(f"the line to {self.name} has been closed")

    def silent_s(self) -> float:
        """Return for how long the other machine has left unacknowledged what was sent [s]; 0 if it has not."""
        # TCP_USER_TIMEOUT would also end a line whose other side lives and is merely too busy to read: with a full
        # window nothing is unacknowledged, which this tells apart.
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        unacked, last_ack = (struct.unpack_from("=I", info, at)[0] for at in (_UNACKED_AT, _LAST_ACK_AT))
        return last_ack / 1e3 if unacked else 0.0

    def interrupt(self) -> None:
        """End calls of other threads on this line, which raise `LineLost`; `close` follows once they have."""
        self._end(LineLost(f"the line to {self.name} has been closed"))

    def close(self) -> None:
        """Close this side; the other one finds the line lost. May be called again."""
        self._socket.close()


class _Wait:
    """Waits for a line within one deadline.

    Args:
        line: to wait for.
        event: POLLIN or POLLOUT.
        timeout_s: longest time for all waits together [s]; None: any.
        what: the other side is to do, for the error.
    """

    def __init__(self, line: Line, event: int, timeout_s: float | None, what: str) -> None:
        self.line, self._timeout_s, self._what = line, timeout_s, what
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._poll = select.poll()
        self._poll.register(line.fileno(), event)

    def once(self) -> bool:
        """Wait; returns False if time is up."""
        while True:
            left = _LOOK_S if self._deadline is None else self._deadline - time.monotonic()
            if self._poll.poll(max(0.0, min(left, _LOOK_S)) * 1e3):
                return True
            if self.line.silent_s() > GONE_S:
                raise self.line.lost(f"its machine has not answered for {GONE_S:g} s")
            if left <= 0.0:
                return False

    def until_ready(self) -> None:
        """Wait.

        Raises:
            LineTimeout: time is up.
            LineLost: the other machine no longer answers.
        """
        if not self.once():
            raise self.line.late(self._what, self._timeout_s or 0.0)


def _move(views: list[memoryview], move: Callable[[list[memoryview]], int], wait: _Wait) -> None:
    """Call `move`, which sends from or receives into some of these views, until all of them are done."""
    first = 0
    try:
        while first < len(views):
            if not views[first].nbytes:
                first += 1
                continue
            try:
                moved = move(views[first : first + _AT_ONCE])
            except BlockingIOError:
                wait.until_ready()
                continue
            while moved:
                step = min(moved, views[first].nbytes)
                views[first] = views[first][step:]
                moved -= step
                first += not views[first].nbytes
    except OSError as error:
        raise wait.line.lost(error.strerror or error) from None
    except BaseException:
        # Also on Ctrl-C: half a frame is under way.
        wait.line.interrupt()
        raise


def _bytes_of(buffer: Buffer) -> memoryview:
    """Return a view of the bytes of a buffer, without copying."""
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    if not array.flags.c_contiguous:
        raise ValueError(f"a buffer of shape {array.shape} is not contiguous: copy it first")
    return array.reshape(-1).view(np.uint8).data


class Listener(Closing):
    """Listens on one address of this machine, at a port of the kernel's choice, for lines that a new token opens.

    Strangers that fail, or say nothing for `OPENING_S`, are dropped, and others do not wait for them.

    Args:
        host: address of this machine, or a name of it; never all of its addresses.

    Raises:
        ValueError: it stands for all addresses.
        LineError: this machine does not have it.
    """

    def __init__(self, host: str) -> None:
        try:
            found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, where = found[0][0], found[0][4]
            if not host or ipaddress.ip_address(where[0]).is_unspecified:
                raise ValueError(f"{host!r} stands for every address of this machine: name the one to listen on")
            self._socket = socket.create_server((str(where[0]), 0), family=family, backlog=_MAX_STRANGERS)
        except OSError as error:
            raise LineError(f"cannot listen on {host}: {error.strerror or error}") from None
        self._socket.setblocking(False)
        bound: tuple[str, int] = self._socket.getsockname()[:2]
        self.address = Address(*bound, secrets.token_hex(32))
        """Give it to those who are to open a line."""
        self._strangers: dict[int, _Stranger] = {}
        self._short_of, self._short_until = "", 0.0
        """What the process lacks to accept a line, and until when it is not tried again."""
        self._accepting = threading.Lock()
        self._closed = False

    def accept(self, timeout_s: float | None) -> Line:
        """Wait for the next line; one thread at a time.

        Args:
            timeout_s: longest time [s]; None: any.

        Raises:
            LineTimeout: time is up.
            LineLost: the listener has been closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._accepting:
            while not self._closed:
                self._drop_slow()
                ready = self._wait(deadline)
                if self._closed:
                    break
                if self._socket.fileno() in ready:
                    self._meet()
                for fd in ready & self._strangers.keys():
                    if (line := self._strangers[fd].listen()) is not None:
                        del self._strangers[fd]
                        return line
                    if self._strangers[fd].failed:
                        self._strangers.pop(fd).close()
                if not ready and deadline is not None and time.monotonic() >= deadline:
                    why = f" ({self._short_of})" if self._short_of else ""
                    raise LineTimeout(f"nobody opened a line to {self.address} within {timeout_s:g} s{why}")
        raise LineLost(f"{self.address} no longer listens")

    def _wait(self, deadline: float | None) -> set[int]:
        """Return the file descriptors on which something has happened, until `deadline` or the next stranger's."""
        poll, ends = select.poll(), [stranger.deadline for stranger in self._strangers.values()]
        # Whoever cannot be accepted waits; without the event, `close` still wakes the poll.
        is_short = time.monotonic() < self._short_until
        poll.register(self._socket.fileno(), 0 if is_short else select.POLLIN)
        for fd in self._strangers:
            poll.register(fd, select.POLLIN)
        if is_short:
            ends.append(self._short_until)
        if deadline is not None:
            ends.append(deadline)
        left = max(0.0, min(ends) - time.monotonic()) * 1e3 if ends else None
        return {fd for fd, _ in poll.poll(left)}

    def _meet(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _SHORT_OF:  # which others may give back
                self._short_of, self._short_until = error.strerror or str(error), time.monotonic() + _PAUSE_S
            return  # or it went away again
        self._short_of = ""
        if len(self._strangers) >= _MAX_STRANGERS:
            self._strangers.pop(next(iter(self._strangers))).close()
        self._strangers[connection.fileno()] = _Stranger(connection, self.address.token)

    def _drop_slow(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, stranger in self._strangers.items() if stranger.deadline <= now]:
            self._strangers.pop(fd).close()

    def close(self) -> None:
        """Stop listening, also in another thread; open lines stay open. May be called again."""
        self._closed = True
        with contextlib.suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        with self._accepting:
            while self._strangers:
                self._strangers.popitem()[1].close()
            self._socket.close()


class _Stranger:
    """A connection whose other side has not proved yet that it has the token."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.deadline = time.monotonic() + OPENING_S
        self.failed = False
        self._socket, self._token, self._nonce, self._said = connection, token, secrets.token_bytes(_NONCE), b""
        connection.setblocking(False)
        self._tell(_MAGIC + self._nonce)

    def listen(self) -> Line | None:
        """Read what has arrived; returns the line once the proof is there. Sets `failed` if it is wrong."""
        try:
            data = self._socket.recv(_NONCE + _PROOF - len(self._said))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self.failed, self._said = self.failed or not data, self._said + data
        if len(self._said) < _NONCE + _PROOF:
            return None
        nonce, proof = self._said[:_NONCE], self._said[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._token, b"caller", self._nonce, nonce)):
            self.failed = True
            return None
        self._tell(_proof(self._token, b"listener", self._nonce, nonce))
        try:
            return None if self.failed else Line(self._socket)
        except OSError:  # gone just now
            self.failed = True
            return None

    def _tell(self, data: bytes) -> None:
        # Dozens of bytes always fit into a new connection's buffer.
        try:
            self._socket.send(data)
        except OSError:
            self.failed = True

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def connect(address: Address, timeout_s: float) -> Line:
    """Open a line.

    Raises:
        LineLost: nobody listens there, also when tried again for a while, or whoever does refuses the token.
        LineTimeout: it did not answer in time.
        LineError: whoever listens there does not have the token.
    """
    deadline = time.monotonic() + timeout_s
    connection: socket.socket | None = None
    try:
        connection, greeting = _greeted(address, deadline)
        nonce = secrets.token_bytes(_NONCE)
        if not greeting.startswith(_MAGIC):
            raise LineError(f"what listens at {address} is not embodyrl, or another version of it")
        theirs = greeting[len(_MAGIC) :]
        connection.sendall(nonce + _proof(address.token, b"caller", theirs, nonce))
        proof = _exactly(connection, _PROOF, deadline)
        if not hmac.compare_digest(proof, _proof(address.token, b"listener", theirs, nonce)):
            raise LineError(f"whoever listens at {address} does not have the token of this run")
        return Line(connection)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, TimeoutError):
            raise LineTimeout(f"{address} did not open a line within {timeout_s:g} s") from None
        if isinstance(error, OSError):
            raise LineLost(f"cannot open a line to {address}: {error.strerror or error}") from None
        raise


def _greeted(address: Address, deadline: float) -> tuple[socket.socket, bytes]:
    """Open a connection and read the greeting of the listener. What fails before that is tried again: no listener is
    there yet, too many others open lines, or a process has no file left."""
    last = min(deadline, time.monotonic() + _TRYING_S)
    while True:
        connection: socket.socket | None = None
        try:
            left = max(1e-3, deadline - time.monotonic())
            connection = socket.create_connection((address.host, address.port), timeout=left)
            return connection, _exactly(connection, len(_MAGIC) + _NONCE, deadline)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, TimeoutError) or not isinstance(error, OSError) or time.monotonic() >= last:
                raise
        time.sleep(_PAUSE_S)


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it hung up, as it does if the token is wrong")
        data += more
    return data


def _proof(token: str, role: bytes, listener: bytes, caller: bytes) -> bytes:
    """Return the proof that a side has the token. It names the side, so that none can be sent back as the other's."""
    return hmac.digest(token.encode(), b"embodyrl line 1\0" + role + b"\0" + listener + caller, "sha256")


def _name(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


Answer = Callable[[dict[str, Any], list[memoryview]], tuple[Header, Sequence[Buffer]]]
"""Returns the answer to a request, header and buffers each; called by several threads at once. What it raises is sent
back, see `Line.send_failure`."""


class Service(Closing):
    """Answers requests on every line that is opened, each in a thread of its own, until it is closed.

    Args:
        listener: the service owns it from now on.
        answer: see `Answer`.
        timeout_s: longest time for a frame to come or to go, once it has begun [s].
    """

    def __init__(self, listener: Listener, answer: Answer, *, timeout_s: float) -> None:
        self.address = listener.address
        self._listener, self._answer, self._timeout_s = listener, answer, timeout_s
        self._lines: dict[Line, threading.Thread] = {}
        self._lock = threading.Lock()
        self._thread = self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name=f"service at {self.address}", daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(LineLost):  # closed
            while True:
                line = self._listener.accept(None)
                try:
                    with self._lock:
                        self._lines[line] = self._start(self._serve, line)
                except RuntimeError:  # no thread can be started now: whoever asks may open another line
                    line.close()
                    time.sleep(_PAUSE_S)

    def _serve(self, line: Line) -> None:
        # A lost line is the end of this thread alone: whoever opened it may open another.
        try:
            with contextlib.suppress(LineError), line:
                while line.wait(None):
                    self._answer_one(line)
        finally:
            with self._lock:
                self._lines.pop(line, None)

    def _answer_one(self, line: Line) -> None:
        header, buffers = line.receive(timeout_s=self._timeout_s)
        try:
            answer = self._answer(header, buffers)
        except Exception as error:
            line.send_failure(f"{type(error).__name__}: {error}", timeout_s=self._timeout_s)
        else:
            line.send(*answer, timeout_s=self._timeout_s)

    def close(self) -> None:
        """Stop listening, close all lines and end their threads. May be called again."""
        self._listener.close()
        self._thread.join()
        with self._lock:
            left = dict(self._lines)
        for line, thread in left.items():
            line.interrupt()
            thread.join(self._timeout_s)
