"""Requests of several clients that are answered together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from embodyrl.serving.deciding import Chunks, Question

REMEMBERED = 2000
"""Newest requests that latencies are shown of."""


@dataclass
class Figures:
    """What has been answered."""

    requests: int = 0
    batches: int = 0
    refused: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Seconds from a request to its answer, of the newest."""


class Batcher:
    """Lets a policy act for several clients at a time: requests within a few milliseconds are one batch.

    Args:
        act: returns the chunks `[B, C, D]` of `B` questions; called in one thread, never twice at once.
        most: rows in a batch.
        wait_s: seconds that the first request of a batch waits for others [s].
    """

    def __init__(self, act: Callable[[Sequence[Question]], Chunks], *, most: int, wait_s: float) -> None:
        self._act, self._most, self._wait_s = act, most, wait_s
        self._waiting: asyncio.Queue[tuple[Question, asyncio.Future[Chunks]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "policy")
        self.figures = Figures()
        self.clients = 0
        """Clients there are; a batch waits for no more."""

    async def act(self, question: Question) -> Chunks:
        """Return the chunk `[C, D]` of a question."""
        begun = time.monotonic()
        answer: asyncio.Future[Chunks] = asyncio.get_running_loop().create_future()
        await self._waiting.put((question, answer))
        chunk = await answer
        self.figures.requests += 1
        self.figures.latencies.append(time.monotonic() - begun)
        return chunk

    async def run(self) -> None:
        """Answer batch after batch, until it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                batch = await self._gather()
                try:
                    chunks = await loop.run_in_executor(self._thread, self._act, [each for each, _ in batch])
                except Exception as error:
                    for _, answer in batch:
                        if not answer.done():
                            answer.set_exception(error)
                    continue
                self.figures.batches += 1
                for (_, answer), chunk in zip(batch, chunks, strict=True):
                    if not answer.done():  # a client that is gone waits for nothing
                        answer.set_result(chunk)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _gather(self) -> list[tuple[Question, asyncio.Future[Chunks]]]:
        batch = [await self._waiting.get()]
        until = time.monotonic() + self._wait_s
        while len(batch) < min(self._most, self.clients):
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    batch.append(await self._waiting.get())
            except TimeoutError:
                break
        return batch
