"""The doorbell of a worker process, and the wait of its parent for answers, messages and ends of many workers.

The doorbell is a pair of eventfds, counters in the kernel: the parent notifies with the number of a request, and
the worker answers with the same number. At most one notification may be unanswered, since numbers written before they
are read add up.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

_A_DAY_S = 86400.0
"""Longest wait [s]: the kernel takes no more than 24 days."""

W = TypeVar("W")


class Doorbell(NamedTuple):
    """Both eventfds. Who notifies or answers calls `os.eventfd_write` directly: every step of every worker does so."""

    bell: int
    """Numbers of requests, from the parent."""
    answers: int
    """The same numbers, from the worker."""

    @classmethod
    def create(cls) -> Doorbell:
        """Make both; the caller owns them."""
        return cls(*(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in cls._fields))


class WorkerPoller(Generic[W]):
    """All file descriptors on which workers report, in one epoll set that lives as long as the workers.

    Pipes and process ends always wake the parent. The answer to a notification does so only if `wake_for` was
    called for it, so that the parent can sleep until the slowest of several workers is done.
    """

    _epoll: select.epoll
    """Open while there are workers."""

    def __init__(self) -> None:
        self._owners: dict[int, W] = {}
        self._answers: dict[W, int] = {}
        self._armed: set[int] = set()

    def add(self, worker: W, answer: int, always: Sequence[int]) -> None:
        """Watch this worker from now on."""
        if not self._owners:
            self._epoll = select.epoll()
        for fd in always:
            self._epoll.register(fd, select.EPOLLIN)
        # Registered without an event: silent until `wake_for` arms it, which costs one call and no new registration.
        self._epoll.register(answer, select.EPOLLONESHOT)
        self._owners |= dict.fromkeys([answer, *always], worker)
        self._answers[worker] = answer

    def remove(self, worker: W) -> None:
        """Watch this worker no more; to be called before its file descriptors are closed."""
        self._armed.discard(self._answers.pop(worker))
        for fd in [fd for fd, owner in self._owners.items() if owner is worker]:
            self._epoll.unregister(fd)
            del self._owners[fd]
        if not self._owners:
            self._epoll.close()

    def wake_for(self, worker: W) -> None:
        """Let the next `wait` end when this worker answers its notification."""
        fd = self._answers[worker]
        if fd not in self._armed:
            self._epoll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)
            self._armed.add(fd)

    def wait(self, timeout: float) -> tuple[list[W], bool]:
        """Wait up to `timeout` [s].

        Returns:
            The workers that sent a message or ended (answers to notifications are not among them), and whether
            anything happened, if only that a day has passed.
        """
        said: dict[W, None] = {}
        events = self._epoll.poll(max(0.0, min(timeout, _A_DAY_S))) if self._owners else []
        for fd, _ in events:
            if fd in self._armed:
                self._armed.discard(fd)
            else:
                said[self._owners[fd]] = None
        return list(said), bool(events) or timeout > _A_DAY_S
