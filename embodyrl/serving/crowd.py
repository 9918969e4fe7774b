"""Clients that are many, slow, silent or greedy: what they may hold of a server, and for how long.

WebSockets bound the size of a message. Not bounded by them are the connections that have not asked for anything yet,
the time that a message may take, the messages of all clients together, pings, and answers that nobody reads.
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import suppress
from typing import Any, cast

from websockets.asyncio.server import Server, ServerConnection
from websockets.exceptions import ProtocolError
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import SEND_EOF, State
from websockets.server import ServerProtocol

MOST_SILENT = 64
"""Connections that have not completed their handshake; one more, and the oldest of them ends."""
MESSAGE_S = 30.0
"""Seconds that a message may take from its first byte to its last [s]."""
UNREAD_S, MOST_UNREAD = 20.0, 2**20
"""Seconds that answers may wait for a client that does not read [s], and their bytes."""
CLOSE_S = 5.0
"""Seconds that a farewell may take [s]."""
MOST_FRAMES = 5000
"""Frames, pings among them, that a client may send within a second."""
IDLE_S = 60.0
"""Seconds without a message after which a client gives its place to another, if there is no other place [s]."""
LARGEST_AT_ONCE = 16
"""Messages of the largest size that the server holds, of all clients together, in bytes."""
LOOK_S = 1.0
"""Seconds between two looks at the clocks of connections [s]."""


class Crowd:
    """All connections of a server.

    Args:
        most_clients: clients that may talk.
        most_bytes: largest size of a message.
    """

    def __init__(self, most_clients: int, most_bytes: int) -> None:
        self._most_clients, self._most_held = most_clients, LARGEST_AT_ONCE * most_bytes
        self._silent, self._talking = dict[Connection, None](), dict[Connection, None]()
        self._held = 0
        self._farewells: set[asyncio.Task[None]] = set()
        self.factory = cast(type[ServerConnection], functools.partial(Connection, self))
        """What the server makes connections with."""

    def begin(self, connection: Connection) -> None:
        """Let a connection shake hands, in the place of the oldest one that has not, if there are too many."""
        self._silent[connection] = None
        if len(self._silent) > MOST_SILENT:
            self.end(next(iter(self._silent)))

    def admit(self, connection: Connection) -> bool:
        """Give a connection a place; False: there is none, and every client has asked for something lately."""
        if len(self._talking) >= self._most_clients:
            idle = min((each for each in self._talking if not each.held), key=lambda each: each.last, default=None)
            if idle is None or idle.last > connection.loop.time() - IDLE_S:
                return False
            self._forget(idle)
            farewell = asyncio.create_task(_part(idle))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)
        self._silent.pop(connection, None)
        self._talking[connection] = None
        connection.last = connection.loop.time()
        return True

    def hold(self, connection: Connection, held: int) -> None:
        """Count the bytes of unanswered messages; if they are too many, the client that has most of them goes."""
        self._held += held - connection.held
        connection.held = held
        if self._held > self._most_held:
            self.end(max([connection, *self._talking], key=lambda each: each.held))

    def end(self, connection: Connection) -> None:
        """Drop a connection at once."""
        self._forget(connection)
        connection.transport.abort()

    def end_all(self) -> None:
        """Drop whoever is still there."""
        for each in [*self._silent, *self._talking]:
            self.end(each)

    async def watch(self) -> None:
        """Drop connections that take too long, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for each in list(self._talking):
                if each.late():
                    self.end(each)

    def _forget(self, connection: Connection) -> None:
        self._silent.pop(connection, None)
        self._talking.pop(connection, None)
        self._held -= connection.held
        connection.held, connection.gone = 0, True

    lost = _forget


async def _part(idle: Connection) -> None:
    """Tell a client why it loses its place; one that does not want to hear it is dropped."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await idle.close(1013, f"nothing came for {IDLE_S:g} s, and another client waits for the place")
    idle.transport.abort()


class Connection(ServerConnection):
    """A connection that knows what it holds.

    Args:
        crowd: all of them.
        protocol, server, options: see `ServerConnection`.
    """

    def __init__(self, crowd: Crowd, protocol: ServerProtocol, server: Server, **options: Any) -> None:
        super().__init__(protocol, server, **options)
        self._crowd = crowd
        self.last = 0.0
        """When a piece of a message came, or one was answered last."""
        self.held, self.gone = 0, False
        """Bytes of messages that are not answered, as the crowd knows them; and whether it has forgotten this one."""
        self._whole = 0
        """Of these, bytes of complete frames."""
        self._begun: float | None = None
        """When the message that is not complete began."""
        self._stuck: float | None = None
        """Since when answers wait for the client to read them."""
        self._closing: float | None = None
        """Since when the client is asked to go."""
        self._fragments = False
        self._second, self._frames = 0.0, 0
        self._receive = protocol.recv_frame
        protocol.recv_frame = self._counted  # type: ignore[method-assign]  # before the next one is read

    def answered(self, message: str | bytes) -> None:
        """Give up what a message held."""
        self._whole -= len(message.encode() if isinstance(message, str) else message)
        self.last = self.loop.time()
        self._look()

    def late(self) -> bool:
        """Tell whether the client takes too long to send, to read, or to go."""
        now = self.loop.time()
        if self._begun is not None and not self.transport.is_reading():  # it waits for us
            self._begun = now
        if self._closing is None and self.state is not State.OPEN:
            self._closing = now
        clocks = ((self._begun, MESSAGE_S), (self._stuck, UNREAD_S), (self._closing, CLOSE_S))
        return any(since is not None and now - since > most for since, most in clocks)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Say farewell, and read on although messages wait: the client's farewell comes after them."""
        self.transport.resume_reading()
        await super().close(code, reason)

    # ---- what asyncio and websockets call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)
        self._crowd.begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._crowd.lost(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read."""
        super().data_received(data)
        if self.transport.get_write_buffer_size() > MOST_UNREAD:
            self._crowd.end(self)
        self._look()

    def process_event(self, event: Request | Frame) -> None:  # type: ignore[override]
        """Note how far a message is."""
        super().process_event(event)
        if isinstance(event, Frame) and event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._whole += len(event.data)
            self.last = self.loop.time()
            self._fragments = not event.fin
            if event.fin:
                self._begun = None

    def send_data(self) -> None:
        """Write thousands of pongs as one piece."""
        pieces = self.protocol.data_to_send()
        if len(pieces) > 1:
            pieces = [b"".join(pieces), *([SEND_EOF] if SEND_EOF in pieces else [])]
        self.protocol.writes = pieces
        super().send_data()

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        self._stuck = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that it does."""
        self._stuck = None
        super().resume_writing()

    def _look(self) -> None:
        if self.gone:
            return
        started = len(self.protocol.reader.buffer)
        if not started and not self._fragments:
            self._begun = None
        elif self._begun is None:
            self._begun = self.loop.time()
        self._crowd.hold(self, self._whole + started)

    def _counted(self, frame: Frame) -> None:
        now = self.loop.time()
        if now - self._second > 1.0:
            self._second, self._frames = now, 0
        self._frames += 1
        if self._frames > MOST_FRAMES:
            raise ProtocolError(f"more than {MOST_FRAMES:,} frames within a second")
        self._receive(frame)
