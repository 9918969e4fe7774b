"""openpi's protocol, as `openpi_client.WebsocketClientPolicy` speaks it: the server begins with its metadata, then
every message is an observation and every answer a chunk. An answer that is a text is an error."""

from __future__ import annotations

import time

from embodyrl.messages import pack, unpack
from embodyrl.serving.session import Session


class OpenPiSession(Session):
    """See `Session`."""

    _last_s: float | None = None
    """Seconds from the last request to the end of its answer."""

    def first(self) -> bytes:
        """See `Session`: the metadata."""
        return pack(self.metadata, bytes_keys=True)

    async def answer(self, data: bytes) -> bytes:
        """See `Session`."""
        begun = time.monotonic()
        observation = self.observer.read(unpack(data))
        asked = time.monotonic()
        chunk = await self.batcher.act(observation)
        timing = {"infer_ms": 1000.0 * (time.monotonic() - asked)}
        if self._last_s is not None:  # the time of an answer is known when it has been packed
            timing["prev_total_ms"] = 1000.0 * self._last_s
        packed = pack({"actions": chunk, "server_timing": timing}, bytes_keys=True)
        self._last_s = time.monotonic() - begun
        return packed

    def refusal(self, error: Exception) -> str:
        """See `Session`."""
        return str(error)
