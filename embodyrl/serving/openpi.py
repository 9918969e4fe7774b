"""openpi's protocol, as `openpi_client.WebsocketClientPolicy` speaks it: the server begins with its metadata, then
every message is an observation and every answer a chunk. An answer that is a text is an error."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from embodyrl.messages import pack, unpack
from embodyrl.servers import DELAY, EPISODE, EXECUTED
from embodyrl.serving.observing import RequestError
from embodyrl.serving.session import Session

LARGEST = 2**31


class OpenPiSession(Session):
    """See `Session`."""

    _last_s: float | None = None
    """Seconds from the last request to the end of its answer."""
    _episode = 0

    def first(self) -> bytes:
        """See `Session`: the metadata."""
        return pack(self.served.metadata, bytes_keys=True)

    async def answer(self, data: bytes) -> bytes:
        """See `Session`."""
        begun = time.monotonic()
        message = unpack(data)
        episode, executed, delay = (_whole(message, key) for key in (EPISODE, EXECUTED, DELAY))
        if episode is not None and episode != self._episode:
            self._episode, executed = episode, None
            self.begin(episode)
        asked = time.monotonic()
        chunk = await self.ask(message, executed=executed, delay=delay or 0)
        timing = {"infer_ms": 1000.0 * (time.monotonic() - asked)}
        if self._last_s is not None:  # the time of an answer is known when it has been packed
            timing["prev_total_ms"] = 1000.0 * self._last_s
        packed = pack({"actions": chunk, "server_timing": timing}, bytes_keys=True)
        self._last_s = time.monotonic() - begun
        return packed

    def refusal(self, error: Exception) -> str:
        """See `Session`."""
        return str(error)


def _whole(message: Mapping[str, Any], key: str) -> int | None:
    """Return a whole number of a message; None if it has none of this name.

    Raises:
        RequestError: it is something else.
    """
    value = message.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST):
        return value
    raise RequestError(f"{key} is {value!r:.40}: want a whole number, 0 or more")
