"""vla-eval's protocol (allenai/vla-evaluation-harness), as its benchmarks speak it to model servers.

Every message is a map of `type`, `payload`, `seq` and `timestamp`. A benchmark says hello, begins an episode, sends an
observation for every control step and gets one action for it, and ends the episode.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.messages import pack, unpack
from embodyrl.rollout.action_queue import ActionQueue, Overlap
from embodyrl.serving.deciding import ONE
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
    """See `Session`. Chunks are executed as `embodyrl eval` executes them: `eval.actions` of each before the policy is
    asked again, late by `eval.delay`, averaged by `eval.ensemble`."""

    _seq = 0
    """Number of the last message."""
    _episode = -1
    """Number of the episode that was begun last; -1: none."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        policy = self.served.policy
        overlap, self._executed = Overlap.of(policy.config), policy.config.executed_actions
        self._queue = ActionQueue.acting_in(policy.simulator, 1, policy.chunk_size, overlap, executed=self._executed)
        self._delay = overlap.delay
        self._left: list[NDArray[np.float32]] = []
        self._asked = False
        """Whether the policy has been asked in this episode."""

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
            self._episode += kind == BEGIN  # not every client says that an episode is over
            self._begin_anew()
            return None
        if kind == OBSERVATION:
            if not self._left:
                executed = self._executed if self._asked else None
                chunk = await self.ask(payload, executed=executed, delay=self._delay)
                self._left, self._asked = [*self._queue.act(ONE, chunk[None])[0]], True
            return self._message(ACTION, {"actions": self._left.pop(0)})
        if kind == ERROR:
            return None
        raise RequestError(
            f"messages of the type {kind!r:.40} are unknown: hello, episode_start, observation, episode_end"
        )

    def refusal(self, error: Exception) -> bytes:
        """See `Session`."""
        return self._message(ERROR, {"error": str(error)})

    def _begin_anew(self) -> None:
        """Forget what is left of an episode that is over."""
        self._left, self._asked = [], False
        self._queue.begin(ONE)
        self.begin(max(self._episode, 0))

    def _hello(self) -> dict[str, Any]:
        metadata = self.served.metadata
        cameras = metadata["cameras"]
        return {
            "harness_version": __version__,
            "protocol_version": PROTOCOL_VERSION,
            "model_server": metadata["server"],
            "capabilities": {},
            # What benchmarks that can leave something out are to send.
            "observation_params": {"send_wrist_image": len(cameras) > 1, "send_state": metadata["state_dim"] > 0},
            "policy": metadata,
        }

    def _message(self, kind: str, payload: Mapping[str, Any]) -> bytes:
        message = {"type": kind, "payload": dict(payload), "seq": self._seq, "timestamp": time.time()}
        return pack(message, bytes_keys=False)
