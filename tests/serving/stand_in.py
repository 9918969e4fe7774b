"""A policy server that is not ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.server import ServerConnection, serve

from embodyrl.messages import pack, unpack


@contextmanager
def stand_in(answer: Callable[[dict[str, Any]], Any], told: dict[str, Any] | None = None) -> Iterator[str]:
    """A server that speaks openpi's protocol and is not ours: its first message is empty, or what is `told`."""

    def talk(connection: ServerConnection) -> None:
        connection.send(pack(told or {}, bytes_keys=True))
        for data in connection:
            assert isinstance(data, bytes)
            found = answer(unpack(data))
            connection.send(found if isinstance(found, str | bytes) else pack(found, bytes_keys=True))

    with serve(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(10)
