"""vla-eval's protocol (allenai/vla-evaluation-harness), as its benchmarks speak it to model servers.

Every message is a map of `type`, `payload`, `seq` and `timestamp`. A benchmark says hello, begins an episode, sends an
observation for every control step and gets one action for it, and ends the episode.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.messages import pack, unpack
from embodyrl.serving.observing import RequestError
from embodyrl.serving.session import Session
from embodyrl.version import __version__

PROTOCOL_VERSION = 1
HELLO, OBSERVATION, ACTION, BEGIN, END, ERROR = (
    "hello",
    "observation",
    "action",
    "episode_start",
    "episode_end",
    "error",
)


class VLAEvalSession(Session):
    """See `Session`. What is left of a chunk is executed before the policy is asked again."""

    _seq = 0
    """Number of the last message."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._left: deque[NDArray[np.float32]] = deque()

    async def answer(self, data: bytes) -> bytes | None:
        """See `Session`."""
        message = unpack(data)
        seq, kind, payload = message.get("seq"), message.get("type"), message.get("payload")
        self._seq = seq if isinstance(seq, int) else 0
        if not isinstance(payload, Mapping) or not isinstance(seq, int):
            raise RequestError("a message is a map with type, payload (a map), seq (a whole number) and timestamp")
        if kind == HELLO:
            return self._message(HELLO, self._hello())
        if kind in (BEGIN, END):
            self._left.clear()
            return None
        if kind == OBSERVATION:
            if not self._left:
                self._left.extend(await self.batcher.act(self.observer.read(payload)))
            return self._message(ACTION, {"actions": self._left.popleft()})
        if kind == ERROR:
            return None
        raise RequestError(
            f"messages of the type {kind!r:.40} are unknown: hello, episode_start, observation, episode_end"
        )

    def refusal(self, error: Exception) -> bytes:
        """See `Session`."""
        return self._message(ERROR, {"error": str(error)})

    def _hello(self) -> dict[str, Any]:
        cameras = self.metadata["cameras"]
        return {
            "harness_version": __version__,
            "protocol_version": PROTOCOL_VERSION,
            "model_server": self.metadata["server"],
            "capabilities": {},
            # What benchmarks that can leave something out are to send.
            "observation_params": {"send_wrist_image": len(cameras) > 1, "send_state": self.metadata["state_dim"] > 0},
            "policy": self.metadata,
        }

    def _message(self, kind: str, payload: Mapping[str, Any]) -> bytes:
        message = {"type": kind, "payload": dict(payload), "seq": self._seq, "timestamp": time.time()}
        return pack(message, bytes_keys=False)
