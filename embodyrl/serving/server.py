"""A policy behind a WebSocket.

One event loop talks to all clients; one thread computes. Nothing that a client does ends the server or another client.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import hmac
import http
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from embodyrl.errors import RunError, without_controls
from embodyrl.messages import MessageError
from embodyrl.serving.batching import Batcher, EndedError, Figures
from embodyrl.serving.deciding import Decider
from embodyrl.serving.observing import Observer, RequestError
from embodyrl.serving.openpi import OpenPiSession
from embodyrl.serving.options import ServeOptions
from embodyrl.serving.session import Served, Session
from embodyrl.serving.vla_eval import VLAEvalSession
from embodyrl.version import __version__

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

    from embodyrl.runner.playing import LoadedPolicy
    from embodyrl.serving.crowd import Connection, Crowd

SESSIONS: dict[str, type[Session]] = {"openpi": OpenPiSession, "vla-eval": VLAEvalSession}
"""What talks to a client, by protocol."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MOST_CLIENTS = 64
SMALLEST_LIMIT = 8 * 2**20
"""Bytes that a message may always have, so that an image that is too large is refused by its size in pixels."""
IN_A_ROW = 10
"""Refused messages in a row after which a client is disconnected."""
OPEN_S, CLOSE_S, PING_S, FINISH_S = 10.0, 5.0, 20.0, 10.0
"""Seconds that a handshake, a farewell, an answer to a ping, and the requests under way at the end may take [s]; what
else is limited is in `crowd`."""


class PolicyServer:
    """Serves a policy until it is closed; within a `with` block, from a thread of its own.

    Args:
        policy: acts.
        options: how, see there.

    Raises:
        UserError: a value is none, or the policy cannot be served.
        MissingPackageError: websockets or msgpack are not installed.
    """

    def __init__(self, policy: LoadedPolicy, options: ServeOptions) -> None:
        options.check()
        self.options = options
        seen = policy.simulator
        if not policy.policy.spec.proprio_dim:  # a client need not send what is not read
            seen = dataclasses.replace(seen, proprio_dim=0)
        self._observer = Observer(seen, options.keys, resize=options.resize)
        self._batcher = Batcher(Decider(policy), most=options.max_batch, wait_s=options.wait_ms / 1000.0)
        self._session = SESSIONS[options.protocol]
        self.metadata = metadata_of(policy, self._observer)
        """What clients are told of the policy."""
        seed = policy.config.seed if options.seed is None else options.seed
        self._served = Served(
            policy=policy,
            observer=self._observer,
            batcher=self._batcher,
            metadata=self.metadata,
            seed=seed if options.sample or policy.config.eval.sample else None,  # as it is evaluated
        )
        self._session(self._served, 0)  # says what is wrong with the policy's settings before anybody comes
        images = policy.simulator.num_images * policy.simulator.image_size[0] * policy.simulator.image_size[1] * 3
        self._max_bytes = max(SMALLEST_LIMIT, 2**20 + 4 * images)
        self._under_way = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._crowd: Crowd | None = None
        self._failed: list[BaseException] = []
        self.port = options.port
        """Where it listens."""

    @property
    def figures(self) -> Figures:
        """What has been answered."""
        return self._batcher.figures

    @property
    def seed(self) -> int | None:
        """Seed of the actions that are drawn; None: they are the most likely ones."""
        return self._served.seed

    @property
    def executed(self) -> str:
        """How chunks are executed, for people; empty: as a client likes, or one after the other."""
        config = self._served.policy.config
        parts = {"eval.actions": config.eval.actions, "eval.ensemble": config.eval.ensemble, "eval.delay": config.delay}
        settings = ", ".join(f"{name} = {value}" for name, value in parts.items() if value)
        if not settings or self.options.protocol == "vla-eval":
            return settings
        return f"are executed by the clients, whatever {settings} says; --protocol vla-eval does so here"

    @property
    def clients(self) -> int:
        """Clients that are connected."""
        return self._batcher.clients

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"ws://{host}:{self.port}"

    # ---- in a thread

    def __enter__(self) -> Self:
        begun = threading.Event()

        def work() -> None:
            try:
                asyncio.run(self.serve(begun.set))
            except BaseException as error:
                self._failed.append(error)  # raised below, or by `close`
            begun.set()

        self._thread = threading.Thread(target=work, name="serve", daemon=True)
        self._thread.start()
        begun.wait()
        self._raise()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish the requests under way and end. May be called again.

        Raises:
            RunError: it does not end, because the policy is still computing.
            Exception: whatever ended it before.
        """
        if self._thread is not None and self._loop is not None and self._stop is not None:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(FINISH_S + CLOSE_S + 5.0)
            if self._thread.is_alive():
                raise RunError(f"{self.url} does not end: its policy is still computing")
            self._thread = None
            self._raise()

    def _raise(self) -> None:
        if self._failed:
            raise self._failed.pop()

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

        from embodyrl.serving.crowd import Crowd

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._crowd = crowd = Crowd(MOST_CLIENTS, self._max_bytes)
        for each in signals:
            self._loop.add_signal_handler(each, self._stop.set)
        try:
            server = await serve(
                self._talk,
                self.options.host,
                self.options.port,
                process_request=self._admit,
                compression=None,  # images hardly shrink, and it costs more than it saves
                max_size=self._max_bytes,
                max_queue=0,  # beside the message that is being answered there is one more at most
                open_timeout=OPEN_S,
                close_timeout=CLOSE_S,
                ping_interval=PING_S,
                ping_timeout=PING_S,
                server_header=None,
                create_connection=crowd.factory,
            )
        except OSError as error:
            raise not_free(self.options.host, self.options.port, error) from error
        self.port = self.options.port or server.sockets[0].getsockname()[1]
        work = (self._batcher.run(), crowd.watch(), self._stop.wait())
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(each) for each in work]
        begun()
        try:
            # Of these the last one alone ends by itself: if another does, its error is the server's.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
            await self._finish()
        finally:
            for number in signals:
                self._loop.remove_signal_handler(number)
            for task in tasks:  # whoever still waits for an answer is told that there will be none
                task.cancel()
            server.close()
            try:
                async with asyncio.timeout(CLOSE_S):
                    await server.wait_closed()
            except TimeoutError:
                crowd.end_all()
                await server.wait_closed()

    async def _finish(self) -> None:
        """Wait for the requests under way."""
        until = asyncio.get_running_loop().time() + FINISH_S
        while self._under_way and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer what is no WebSocket, and whoever has no business here; None: come in."""
        if request.path in ("/healthz", "/health"):
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if self.options.token is not None:
            given = request.headers.get("Authorization", "").removeprefix("Api-Key ").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.options.token.encode()):
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "the token is missing or another one\n")
        if self._stop is not None and self._stop.is_set():
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "the server is ending\n")
        if self._crowd is None or not self._crowd.admit(cast("Connection", connection)):
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_CLIENTS} clients are here already\n")
        return None

    async def _talk(self, connection: ServerConnection) -> None:
        """Answer one client until it goes."""
        from websockets.exceptions import ConnectionClosed

        session = self._session(self._served, name_of(connection))
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
                    cast("Connection", connection).answered(data)
                if refused >= IN_A_ROW:
                    await connection.close(1008, f"{IN_A_ROW} refused messages in a row")
                    return
                if self._stop is not None and self._stop.is_set():  # whoever does not wait for answers gets no more
                    await connection.close(1001, "the server is ending")
                    return
        except EndedError:  # a client of ours asks whoever serves there next
            await connection.close(1001, "the server ended before this was answered")
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
        except EndedError:
            raise
        except Exception as error:
            print(without_controls(f"a request failed: {type(error).__name__}: {error}"), flush=True)
            return session.refusal(error), refused + 1


def check_free(host: str, port: int) -> None:
    """Check that an address can be listened at, before a policy is loaded for it.

    Raises:
        RunError: it cannot.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family):
            pass
    except OSError as error:
        raise not_free(host, port, error) from error


def not_free(host: str, port: int, error: OSError) -> RunError:
    """Return what is said of an address that cannot be listened at."""
    remedy = "choose another --port (0: any that is free), or end the program that has it"
    if error.errno != errno.EADDRINUSE and error.errno != errno.EACCES:
        remedy = "choose another --host: an address of this machine, or 0.0.0.0 for all of them"
    why = os.strerror(error.errno) if error.errno else error
    return RunError(f"cannot listen at {host}:{port}: {why} - {remedy}")


def name_of(connection: ServerConnection) -> int:
    """Return the number that a client gives itself, as in `ws://host:port/?client=3`; 0: it gives none."""
    path = "" if connection.request is None else connection.request.path
    found = re.search(r"[?&]client=(\d{1,9})(?:&|$)", path)
    return int(found[1]) if found else 0


def metadata_of(policy: LoadedPolicy, observer: Observer) -> dict[str, Any]:
    """Return what clients are told of a policy."""
    simulator = observer.simulator
    return {
        "server": f"embodyrl {__version__}",
        "model": str(policy.config.model.name),
        "chunk_size": policy.chunk_size,
        "action_dim": policy.action_dim,
        "control_frequency": simulator.control_frequency,
        "cameras": list(simulator.cameras),
        "image_size": list(simulator.image_size),
        "state_dim": simulator.proprio_dim,
        "rtc": policy.policy.plan_shape is not None,
        "keys": {name: list(keys) for name, keys in observer.keys().items()},
    }
