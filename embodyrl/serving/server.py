"""A policy behind a WebSocket.

One event loop talks to all clients; one thread computes. Nothing that a client does ends the server or another client.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import signal
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from embodyrl.errors import MissingPackageError, RunError, UserError, did_you_mean, listed, without_controls
from embodyrl.messages import MessageError
from embodyrl.serving.batching import Batcher, Figures
from embodyrl.serving.observing import Observer, RequestError
from embodyrl.serving.openpi import OpenPiSession
from embodyrl.serving.session import Session
from embodyrl.serving.vla_eval import VLAEvalSession
from embodyrl.version import __version__

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

    from embodyrl.runner.playing import LoadedPolicy

PROTOCOLS: dict[str, type[Session]] = {"openpi": OpenPiSession, "vla-eval": VLAEvalSession}
"""How a client may speak to a server."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
MOST_CLIENTS = 64
SMALLEST_LIMIT = 8 * 2**20
"""Bytes that a message may always have, so that an image that is too large is refused by its size in pixels."""
IN_A_ROW = 10
"""Refused messages in a row after which a client is disconnected."""
OPEN_S, CLOSE_S, PING_S, FINISH_S = 10.0, 5.0, 20.0, 10.0
"""Seconds that a handshake, a farewell, an answer to a ping, and the requests under way at the end may take [s]."""


class PolicyServer:
    """Serves a policy until it is closed; within a `with` block, from a thread of its own.

    Args:
        policy: acts.
        host: address to listen at; any but a loopback one lets other machines in.
        port: 0: any that is free, see `port`.
        protocol: a name of `PROTOCOLS`.
        keys, resize: see `Observer`.
        token: clients must send it; None: whoever reaches the port may ask.
        max_batch: most clients that one forward pass answers.
        wait_ms: milliseconds that a request waits for others [ms].

    Raises:
        UserError: a value is none, or the policy cannot be served.
        MissingPackageError: websockets or msgpack are not installed.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        *,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        protocol: str = "openpi",
        keys: Mapping[str, str] | None = None,
        resize: bool = False,
        token: str | None = None,
        max_batch: int = 16,
        wait_ms: float = 2.0,
    ) -> None:
        check_options(port=port, protocol=protocol, token=token, max_batch=max_batch, wait_ms=wait_ms)
        self._host, self._asked_port, self._token = host, port, token
        self._observer = Observer(policy.simulator, keys, resize=resize)
        self._batcher = Batcher(policy.act, most=max_batch, wait_s=wait_ms / 1000.0)
        self._session = PROTOCOLS[protocol]
        self.metadata = metadata_of(policy, self._observer)
        """What clients are told of the policy."""
        images = policy.simulator.num_images * policy.simulator.image_size[0] * policy.simulator.image_size[1] * 3
        self._max_bytes = max(SMALLEST_LIMIT, 2**20 + 4 * images)
        self._under_way = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self.port = port
        """Where it listens."""

    @property
    def figures(self) -> Figures:
        """What has been answered."""
        return self._batcher.figures

    @property
    def clients(self) -> int:
        """Clients that are connected."""
        return self._batcher.clients

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"ws://{host}:{self.port}"

    # ---- in a thread

    def __enter__(self) -> Self:
        begun, failed = threading.Event(), list[BaseException]()

        def work() -> None:
            try:
                asyncio.run(self.serve(begun.set))
            except BaseException as error:
                failed.append(error)
            begun.set()

        self._thread = threading.Thread(target=work, name="serve", daemon=True)
        self._thread.start()
        begun.wait()
        if failed:
            raise failed[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish the requests under way and end. May be called again."""
        if self._thread is not None and self._loop is not None and self._stop is not None:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(FINISH_S + CLOSE_S + 5.0)
            self._thread = None

    # ---- in an event loop

    async def serve(self, begun: Callable[[], object], signals: tuple[signal.Signals, ...] = ()) -> None:
        """Serve until `close` is called or one of these signals comes.

        Args:
            begun: called once clients can connect.
            signals: end it.

        Raises:
            RunError: the address cannot be listened at.
        """
        from websockets.asyncio.server import serve

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        for each in signals:
            self._loop.add_signal_handler(each, self._stop.set)
        try:
            server = await serve(
                self._talk,
                self._host,
                self._asked_port,
                process_request=self._admit,
                compression=None,  # images hardly shrink, and it costs more than it saves
                max_size=self._max_bytes,
                max_queue=1,
                open_timeout=OPEN_S,
                close_timeout=CLOSE_S,
                ping_interval=PING_S,
                ping_timeout=PING_S,
                server_header=None,
            )
        except OSError as error:
            raise RunError(
                f"cannot listen at {self._host}:{self._asked_port}: {error.strerror or error} - choose another --port "
                "(0: any that is free), or end the program that has it"
            ) from error
        self.port = server.sockets[0].getsockname()[1] if not self._asked_port else self._asked_port
        working = asyncio.create_task(self._batcher.run())
        begun()
        try:
            stopped = asyncio.create_task(self._stop.wait())
            # The batcher never ends by itself: if it does, its error is the server's.
            await asyncio.wait({stopped, working}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if working.done():
                working.result()
            await self._finish()
        finally:
            for each in signals:
                self._loop.remove_signal_handler(each)
            server.close()
            await server.wait_closed()
            working.cancel()

    async def _finish(self) -> None:
        """Wait for the requests under way."""
        until = asyncio.get_running_loop().time() + FINISH_S
        while self._under_way and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer what is no WebSocket, and whoever has no business here; None: come in."""
        if request.path in ("/healthz", "/health"):
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if self._token is not None:
            given = request.headers.get("Authorization", "").removeprefix("Api-Key ").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "the token is missing or another one\n")
        if self._stop is not None and self._stop.is_set():
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "the server is ending\n")
        if self.clients >= MOST_CLIENTS:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_CLIENTS} clients are here already\n")
        return None

    async def _talk(self, connection: ServerConnection) -> None:
        """Answer one client until it goes."""
        from websockets.exceptions import ConnectionClosed

        session = self._session(self._observer, self._batcher, self.metadata)
        self._batcher.clients += 1
        refused = 0
        try:
            if (first := session.first()) is not None:
                await connection.send(first)
            async for data in connection:
                self._under_way += 1
                try:
                    answer, refused = await self._answer(session, data, refused)
                    if answer is not None:
                        await connection.send(answer)
                finally:
                    self._under_way -= 1
                if refused >= IN_A_ROW:
                    await connection.close(1008, f"{IN_A_ROW} refused messages in a row")
                    return
        except ConnectionClosed:
            pass  # in the middle of a message or an answer; nobody is there to be told
        finally:
            self._batcher.clients -= 1

    async def _answer(self, session: Session, data: str | bytes, refused: int) -> tuple[bytes | str | None, int]:
        """Return the answer to a message, and how many were refused in a row."""
        try:
            if isinstance(data, str):
                raise MessageError("this is a text: send msgpack, as bytes")
            return await session.answer(data), 0
        except (MessageError, RequestError) as error:
            self.figures.refused += 1
            return session.refusal(error), refused + 1
        except Exception as error:
            print(without_controls(f"a request failed: {type(error).__name__}: {error}"), flush=True)
            return session.refusal(error), refused + 1


def metadata_of(policy: LoadedPolicy, observer: Observer) -> dict[str, Any]:
    """Return what clients are told of a policy."""
    simulator = policy.simulator
    return {
        "server": f"embodyrl {__version__}",
        "model": str(policy.config.model.name),
        "chunk_size": policy.chunk_size,
        "action_dim": policy.action_dim,
        "control_frequency": simulator.control_frequency,
        "cameras": list(simulator.cameras),
        "image_size": list(simulator.image_size),
        "state_dim": simulator.proprio_dim,
        "keys": {name: list(keys) for name, keys in observer.keys().items()},
    }


def check_options(*, port: int, protocol: str, token: str | None, max_batch: int, wait_ms: float) -> None:
    """Check all that can be known of a server before its policy is loaded.

    Raises:
        UserError, MissingPackageError: see `PolicyServer`.
    """
    check_packages()
    if protocol not in PROTOCOLS:
        hint = did_you_mean(protocol, PROTOCOLS, lead=" - ")
        raise UserError(f"protocol {protocol!r} is unknown{hint} (protocols: {listed(PROTOCOLS)})")
    for name, value, low, high in (
        ("port", port, 0, 65535),
        ("max_batch", max_batch, 1, 1024),
        ("wait_ms", wait_ms, 0, 1000),
    ):
        if isinstance(value, bool) or not low <= value <= high:
            raise UserError(f"{name} = {value!r}: want {low} .. {high}")
    if token is not None and not token.strip():
        raise UserError("the token is empty: give one that cannot be guessed, or none")


def check_packages() -> None:
    """Check that what serving needs is installed.

    Raises:
        MissingPackageError: it is not.
    """
    try:
        import msgpack  # noqa: F401
        import websockets.asyncio.server  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(f"serving needs {error.name}: pip install 'embodyrl[serve]'") from None
