"""Ranks that talk to each other: what each has is gathered, added up, agreed on.

All ranks must make the same calls in the same order. A peer that ends or hangs meanwhile is an error on the others.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from embodyrl.errors import RunError
from embodyrl.placement.ranks import Place

T = TypeVar("T")
Check = Callable[[Sequence[int] | None], None]
"""Raises an error if it knows that one of these ranks (None: any) has ended."""

_GONE_S = 5.0
"""How long a rank whose connections broke may take until its process has ended [s]."""
_POLL_S = 0.05


class RankLost(RunError):
    """Raised when another rank ended or hangs."""


class Ranks:
    """The ranks of a run, seen from one of them. A single one needs nobody else.

    Args:
        place: which rank this is.
        timeout_s: longest time to wait for the others [s].
        group: through which tensors on the CPU are exchanged; None for a single rank.
    """

    def __init__(
        self, place: Place | None = None, *, timeout_s: float = 0.0, group: dist.ProcessGroup | None = None
    ) -> None:
        place = place or Place()
        self.rank, self.size = place.rank, place.size
        self.timeout_s = timeout_s
        self._group = group
        self._peers: dict[int, psutil.Process | None] = {}
        """The other ranks; None for those on other machines."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    @property
    def seed_indices(self) -> tuple[int, ...]:
        """What `derive_seed` needs for a random stream of this rank's own: nothing more for the first, which has the
        streams that a single rank would have."""
        return () if self.is_first else (self.rank,)

    # ---- exchange

    def meet(self) -> None:
        """Wait until all ranks are here. Unlike an exchange, it can name the rank that does not come."""
        if self.size > 1:
            dist.monitored_barrier(self._group, timedelta(seconds=self.timeout_s), wait_all_ranks=True)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; same shape and type on each. Of several ranks, on the CPU."""
        if self.size == 1:
            return [tensor]
        own = tensor.detach().cpu().contiguous()
        flags = own.dtype is torch.bool  # which gloo does not know
        own = own.view(torch.uint8) if flags else own
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, self._group)
        return [each.view(torch.bool) for each in found] if flags else found

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """What each rank gave, in their order."""
        if self.size == 1:
            return [own]
        lengths = [int(each) for each in self.gather(torch.tensor([len(own)]))]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else padded[:0]
        found = self.gather(padded)
        return [each[:length].numpy().tobytes() for each, length in zip(found, lengths, strict=True)]

    def gather_values(self, own: Any) -> list[Any]:
        """What each rank gave, in their order: anything that JSON can hold."""
        if self.size == 1:
            return [own]
        return [json.loads(text) for text in self.gather_bytes(json.dumps(own).encode())]

    def gather_lists(self, own: Sequence[bytes]) -> list[bytes]:
        """The entries of every rank's list, one rank after the other."""
        if self.size == 1:
            return list(own)
        lengths = self.gather_values([len(each) for each in own])
        contents = self.gather_bytes(b"".join(own))
        return [part for content, sizes in zip(contents, lengths, strict=True) for part in _cut(content, sizes)]

    def from_first(self, value: T) -> T:
        """What rank 0 gave; anything that JSON can hold."""
        found: T = self.gather_values(value if self.is_first else None)[0]
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, the same on all of them."""
        if self.size == 1:
            return tensor
        total = tensor.detach().to("cpu", copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(tensor.device)

    def part_size(self, count: int, most: int | None) -> int:
        """How many of `count` rows make up a part such that every rank has one, and none has more than `most`."""
        share = -(-count // self.size)
        return share if most is None else min(share, most)

    def deal(self, parts: Sequence[T]) -> Iterator[tuple[T, bool]]:
        """This rank's parts, and whether they count. Every rank gets the same number, since each part is a turn in
        which all take part; what is missing at the end is made up with a part that does not count."""
        for start in range(0, len(parts), self.size):
            mine = start + self.rank
            yield (parts[mine], True) if mine < len(parts) else (parts[0], False)

    # ---- failures

    def introduce(self) -> None:
        """Tell each other who is who, so that a rank that ends can be told from one that is slow."""
        own = {"machine": _machine(), "pid": os.getpid()}
        for rank, other in enumerate(self.gather_values(own)):
            if rank != self.rank:
                self._peers[rank] = psutil.Process(other["pid"]) if other["machine"] == own["machine"] else None

    @contextmanager
    def naming_failures(self, explain: Check) -> Iterator[None]:
        """Turn what broken connections raise into an error that names the rank.

        Args:
            explain: raises a better error if it knows what became of these ranks.

        Raises:
            RankLost: another rank ended or hangs.
        """
        try:
            yield
        except RunError:
            raise
        except RuntimeError as error:
            gone = self._wait_for_the_gone()
            explain(gone)
            text = self._lost(str(error), gone)
            if text is None:
                raise
            raise RankLost(text) from error

    def _wait_for_the_gone(self) -> list[int]:
        """Ranks of this machine that have ended, or are about to."""
        deadline = time.monotonic() + _GONE_S
        while not (gone := [rank for rank, process in self._peers.items() if process and _has_ended(process)]):
            if time.monotonic() > deadline:
                return []
            time.sleep(_POLL_S)
        return gone

    def _lost(self, text: str, gone: Sequence[int]) -> str | None:
        """What happened to another rank, if that is what an error is about."""
        if gone:
            return f"rank {self.rank} cannot go on: {self._named(gone)} ended. Its own output says why"
        if "monitoredBarrier" in text or "imed out" in text:
            late = [int(rank) for rank in re.findall(r"\d+", (re.search(r"Ranks? ([\d, ]+) failed", text) or [""])[0])]
            return (
                f"rank {self.rank} cannot go on: {self._named(late or list(self._peers))} did not answer within "
                f"{self.timeout_s:g} s. If it was merely slow, raise engine.parallel.timeout_s"
            )
        if "onnection" in text or "Broken pipe" in text:
            return f"rank {self.rank} cannot go on: a rank on another machine ended. Its own output says why"
        return None

    def _named(self, ranks: Sequence[int]) -> str:
        processes = [(rank, self._peers.get(rank)) for rank in ranks]
        return " or ".join(f"rank {rank}" + (f" (pid {process.pid})" if process else "") for rank, process in processes)


ALONE = Ranks()
"""The only rank of a run."""


@contextmanager
def connected(place: Place, device: torch.device, timeout_s: float, check: Check) -> Iterator[Ranks]:
    """Connect this rank with the others for the length of a block.

    Args:
        place: which rank this is.
        device: where it computes: CUDA tensors are exchanged by NCCL, all others by gloo.
        timeout_s: longest time to wait for the others [s].
        check: raises if one of these ranks (None: any) is known to have ended.

    Raises:
        RankLost: another rank ended or hangs.
    """
    if place.size == 1:
        yield ALONE
        return
    timeout = timedelta(seconds=timeout_s)
    try:
        _join(place, device, timeout, check)
        ranks = Ranks(place, timeout_s=timeout_s, group=dist.new_group(backend="gloo", timeout=timeout))
        with ranks.naming_failures(check):
            ranks.introduce()
            yield ranks
            ranks.meet()
    except BaseException:
        if device.type == "cuda":
            raise  # NCCL would wait for the rank that is gone; the connections end with this process, which is next
        _leave()
        raise
    _leave()


def _join(
    place: Place, device: torch.device, timeout: timedelta, check: Callable[[Sequence[int] | None], None]
) -> None:
    """Meet the others, and make the default group."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        backend = "nccl"
    if place.meeting is None:
        dist.init_process_group(backend, init_method="env://", timeout=timeout)
        return
    store = dist.FileStore(place.meeting, place.size)
    store.set_timeout(timeout)
    store.set(f"here/{place.rank}", "1")
    deadline = time.monotonic() + timeout.total_seconds()
    everyone = [f"here/{rank}" for rank in range(place.size)]
    while not store.check(everyone):
        check(None)
        if time.monotonic() > deadline:
            raise RankLost(f"rank {place.rank} waited {timeout.total_seconds():g} s for the others to start, in vain")
        time.sleep(_POLL_S)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _machine() -> str:
    """What tells this machine, or container, from others: processes are visible to each other if it is the same."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''} {space}"


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _cut(content: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    start = 0
    for size in sizes:
        yield content[start : start + size]
        start += size
