"""Requests of several clients that are answered together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread

from embodyrl.serving.deciding import Chunks, Question

Request = tuple[Question, asyncio.Future[Chunks]]
REMEMBERED = 2000
"""Newest requests that latencies are shown of."""


class EndedError(Exception):
    """The server ended before a request was answered."""


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
        self._waiting: SimpleQueue[Request | None] = SimpleQueue()
        self._open: set[asyncio.Future[Chunks]] = set()
        self._ended = False
        self.figures = Figures()
        self.clients = 0
        """Clients there are; a batch waits for no more."""

    async def act(self, question: Question) -> Chunks:
        """Return the chunk `[C, D]` of a question.

        Raises:
            EndedError: the server ends.
        """
        if self._ended:
            raise EndedError
        begun = time.monotonic()
        answer: asyncio.Future[Chunks] = asyncio.get_running_loop().create_future()
        self._open.add(answer)
        try:
            self._waiting.put((question, answer))
            chunk = await answer
        finally:
            self._open.discard(answer)
        self.figures.requests += 1
        self.figures.latencies.append(time.monotonic() - begun)
        return chunk

    async def run(self) -> None:
        """Answer batch after batch, until it is cancelled; whoever still waits then gets an error."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        # A policy that never returns does not keep the process from ending.
        Thread(target=self._work, args=(loop, failed), name="policy", daemon=True).start()
        try:
            await failed
        finally:
            self._ended = True
            self._waiting.put(None)
            self._settle(list(self._open), EndedError())

    def _work(self, loop: asyncio.AbstractEventLoop, failed: asyncio.Future[None]) -> None:
        """Compute, in a thread."""
        with suppress(RuntimeError):  # of a loop that is closed: nobody waits any more
            while batch := self._gather():
                questions, answers = [each for each, _ in batch], [answer for _, answer in batch]
                result: Chunks | Exception
                try:
                    result = self._act(questions)
                except Exception as error:
                    result = error
                except BaseException as error:
                    loop.call_soon_threadsafe(failed.set_exception, error)
                    return
                loop.call_soon_threadsafe(self._settle, answers, result)

    def _gather(self) -> list[Request]:
        """Return the requests that are answered next; none: it is over."""
        batch, until = list[Request](), 0.0
        while not batch or len(batch) < min(self._most, self.clients):
            try:
                request = self._waiting.get(timeout=max(until - time.monotonic(), 0.0) if batch else None)
            except Empty:
                break
            if request is None:
                return []
            if not batch:
                until = time.monotonic() + self._wait_s
            batch.append(request)
        return batch

    def _settle(self, answers: list[asyncio.Future[Chunks]], result: Chunks | Exception) -> None:
        """Give each its chunk, or all an error."""
        self.figures.batches += not isinstance(result, Exception)
        for number, answer in enumerate(answers):
            if answer.done():  # a client that is gone waits for nothing
                continue
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result[number])
