"""Requests of several clients that are answered together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import Observation
from embodyrl.errors import RunError

Chunks = NDArray[np.float32]
Request = tuple[Observation, asyncio.Future[Chunks]]
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
        act: returns the chunks `[B, C, D]` of an observation with `B` rows; called in one thread, never twice at once.
        most: rows in a batch.
        wait_s: seconds that the first request of a batch waits for others [s].
    """

    def __init__(self, act: Callable[[Observation], Chunks], *, most: int, wait_s: float) -> None:
        self._act, self._most, self._wait_s = act, most, wait_s
        self._waiting: asyncio.Queue[Request] = asyncio.Queue()
        self.figures = Figures()
        self.clients = 0
        """Clients there are; a batch waits for no more."""

    async def act(self, observation: Observation) -> Chunks:
        """Return the chunk `[C, D]` of an observation of one row."""
        begun = time.monotonic()
        answer: asyncio.Future[Chunks] = asyncio.get_running_loop().create_future()
        await self._waiting.put((observation, answer))
        chunk = await answer
        self.figures.requests += 1
        self.figures.latencies.append(time.monotonic() - begun)
        return chunk

    async def run(self) -> None:
        """Answer batch after batch, until it is cancelled; whoever still waits then gets an error."""
        loop, batch = asyncio.get_running_loop(), list[Request]()
        work: SimpleQueue[Request | None] = SimpleQueue()
        # A policy that never returns does not keep the process from ending.
        Thread(target=self._compute, args=(work, loop), name="policy", daemon=True).start()
        try:
            while True:
                await self._gather(batch)
                computed: asyncio.Future[Chunks] = loop.create_future()
                work.put((Observation.concat([each for each, _ in batch]), computed))
                try:
                    chunks = await computed
                except Exception as error:
                    for _, answer in batch:
                        if not answer.done():
                            answer.set_exception(error)
                else:
                    self.figures.batches += 1
                    for (_, answer), chunk in zip(batch, chunks, strict=True):
                        if not answer.done():  # a client that is gone waits for nothing
                            answer.set_result(chunk)
                batch.clear()
        finally:
            work.put(None)
            while not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(RunError("the server ended before this was answered"))

    def _compute(self, work: SimpleQueue[Request | None], loop: asyncio.AbstractEventLoop) -> None:
        for observation, computed in iter(work.get, None):
            chunks, error = None, None
            try:
                chunks = self._act(observation)
            except BaseException as raised:  # it is the server's thread that hears of it
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, computed, chunks, error)

    async def _gather(self, batch: list[Request]) -> None:
        """Add the requests that are answered next."""
        batch.append(await self._waiting.get())
        until = time.monotonic() + self._wait_s
        while len(batch) < min(self._most, self.clients):
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    batch.append(await self._waiting.get())
            except TimeoutError:
                break


def _settle(answer: asyncio.Future[Chunks], chunks: Chunks | None, error: BaseException | None) -> None:
    """Give chunks, or an error, to whoever waits."""
    if answer.done():
        return
    if chunks is None:
        answer.set_exception(error or RunError("the policy gave no actions"))
    else:
        answer.set_result(chunks)
