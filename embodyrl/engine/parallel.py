"""Communication between ranks (gather, sum, broadcast, barrier), and a policy that is replicated on all of them.

All ranks must make the same calls in the same order. A peer that ends or hangs meanwhile is an error on the others.
Modules that only sharded weights need (`sharding`, torch's FSDP and DTensor) are imported only if ranks shard.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from embodyrl.errors import RunError, UserError
from embodyrl.placement.ranks import TCP, RankInfo
from embodyrl.placement.topology import visible_names

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from embodyrl.models.policy import Policy

T = TypeVar("T")
Check = Callable[[Sequence[int] | None], None]
"""Raises an error if it knows that one of these ranks (None: any) has ended."""

_GONE_S = 5.0
"""Longest time from the break of a rank's connections to the end of its process [s]."""
_POLL_S = 0.05


class RankLost(RunError):
    """Raised when another rank ended or hangs."""


class Ranks:
    """The ranks of a run, seen from one of them. With a single rank every method returns at once.

    Args:
        place: this rank and their number.
        timeout_s: longest time to wait for the others [s].
        group: process group for tensors on the CPU; None for a single rank.
    """

    def __init__(
        self, place: RankInfo | None = None, *, timeout_s: float = 0.0, group: dist.ProcessGroup | None = None
    ) -> None:
        place = place or RankInfo()
        self.rank, self.size = place.rank, place.size
        self.local_size = place.local_size
        """Ranks on this machine."""
        self.timeout_s = timeout_s
        self._group = group
        self._peers: dict[int, psutil.Process | None] = {}
        """The other ranks; None for those on other machines."""

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes the run's files."""
        return self.rank == 0

    # ---- exchange

    def barrier(self, longer_s: float = 0.0) -> None:
        """Wait until all ranks have called it, `longer_s` [s] longer than usual. Unlike an exchange, it can name the
        rank that does not."""
        if self.size > 1:
            timeout = timedelta(seconds=self.timeout_s + longer_s)
            dist.monitored_barrier(self._group, timeout, wait_all_ranks=True)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in their order; shape and type must be the same on each. On the CPU if there
        are several ranks."""
        if self.size == 1:
            return [tensor]
        own = tensor.detach().cpu().contiguous()
        flags = own.dtype is torch.bool  # not supported by gloo
        own = own.view(torch.uint8) if flags else own
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, self._group)
        return [each.view(torch.bool) for each in found] if flags else found

    def exchange(self, rows: Tensor, given: Sequence[int], coming: Sequence[int]) -> Tensor:
        """Give every rank some rows; returns those that this one gets, in the order of the ranks they come from.

        Args:
            rows: on the CPU, `[M, ...]`; the first `given[0]` go to rank 0, and so on.
            given: rows for each rank.
            coming: rows from each rank.
        """
        if self.size == 1:
            return rows
        own = rows.contiguous()
        # As bytes, since gloo does not exchange every type; sizes are known to both sides, so nothing else travels.
        width = own.element_size() * own[:0].new_empty(own.shape[1:]).numel()
        sent = own.view(-1).view(torch.uint8).view(len(own), width)
        found = torch.empty(sum(coming), width, dtype=torch.uint8)
        dist.all_to_all_single(found, sent, list(coming), list(given), group=self._group)
        return found.view(-1).view(own.dtype).view(sum(coming), *own.shape[1:])

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Return the bytes of each rank, in their order; lengths may differ."""
        if self.size == 1:
            return [own]
        # Collectives want the same size on all ranks: exchange lengths, pad to the longest, cut afterwards.
        lengths = [int(each) for each in self.gather(torch.tensor([len(own)]))]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else padded[:0]
        found = self.gather(padded)
        return [each[:length].numpy().tobytes() for each, length in zip(found, lengths, strict=True)]

    def gather_rows(self, own: Tensor) -> list[Tensor]:
        """Return the rows of each rank, in their order; only their number may differ."""
        if self.size == 1:
            return [own]
        # Without rows there may be any strides, which cannot be seen as bytes; and an empty buffer is none to torch.
        found = self.gather_bytes(own.cpu().contiguous().view(torch.uint8).numpy().tobytes() if own.numel() else b"")
        return [
            torch.frombuffer(bytearray(each), dtype=own.dtype).view(-1, *own.shape[1:]) if each else own[:0].cpu()
            for each in found
        ]

    def gather_values(self, own: Any) -> list[Any]:
        """Return the value of each rank, in their order: anything that JSON can hold."""
        if self.size == 1:
            return [own]
        return [json.loads(text) for text in self.gather_bytes(json.dumps(own).encode())]

    def gather_lists(self, own: Sequence[bytes]) -> list[bytes]:
        """Return the entries of all ranks' lists, one rank after the other."""
        if self.size == 1:
            return list(own)
        lengths = self.gather_values([len(each) for each in own])
        contents = self.gather_bytes(b"".join(own))
        return [part for content, sizes in zip(contents, lengths, strict=True) for part in _cut(content, sizes)]

    def broadcast_from_rank0(self, value: T) -> T:
        """Return the value of rank 0: anything that JSON can hold."""
        found: T = self.gather_values(value if self.is_first else None)[0]
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, the same on all of them."""
        if self.size == 1:
            return tensor
        total = tensor.detach().to("cpu", copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(tensor.device)

    def part_size(self, count: int, most: int | None) -> int:
        """Return the number of rows of a part, such that `count` rows make a part for every rank, and no part has more
        than `most`."""
        share = -(-count // self.size)
        return share if most is None else min(share, most)

    def scatter(self, parts: Sequence[T], rank: int | None = None) -> Iterator[tuple[T, bool]]:
        """Yield this rank's parts (or those of another `rank`), and whether each counts. Every rank gets the same
        number, since the forward and backward passes of sharded weights are collective; ranks that run out get a part
        that does not count."""
        for start in range(0, len(parts), self.size):
            mine = start + (self.rank if rank is None else rank)
            yield (parts[mine], True) if mine < len(parts) else (parts[0], False)

    # ---- failures

    def introduce(self) -> None:
        """Exchange process ids, so that a rank that has ended can be distinguished from one that is slow."""
        own = {"machine": machine_here(), "pid": os.getpid()}
        for rank, other in enumerate(self.gather_values(own)):
            if rank != self.rank:
                self._peers[rank] = psutil.Process(other["pid"]) if other["machine"] == own["machine"] else None

    @contextmanager
    def naming_failures(self, explain: Check) -> Iterator[None]:
        """Turn errors of broken connections into one that names the rank.

        Args:
            explain: raises a better error if it knows how these ranks ended.

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
        """Return the ranks of this machine that have ended, or end within `_GONE_S`."""
        # A connection breaks a moment before its process has ended, so a single check would come too early.
        deadline = time.monotonic() + _GONE_S
        while not (gone := [rank for rank, process in self._peers.items() if process and _has_ended(process)]):
            if time.monotonic() > deadline:
                return []
            time.sleep(_POLL_S)
        return gone

    def _lost(self, text: str, gone: Sequence[int]) -> str | None:
        """Return an explanation of an error if another rank has caused it, else None."""
        if gone:
            return f"rank {self.rank} cannot continue: {self._named(gone)} ended. Its own output says why"
        if "monitoredBarrier" in text or "imed out" in text:
            late = [int(rank) for rank in re.findall(r"\d+", (re.search(r"Ranks? ([\d, ]+) failed", text) or [""])[0])]
            return (
                f"rank {self.rank} cannot continue: {self._named(late or list(self._peers))} did not answer within "
                f"{self.timeout_s:g} s. If it was merely slow, raise engine.parallel.timeout_s"
            )
        if "onnection" in text or "Broken pipe" in text:
            return f"rank {self.rank} cannot continue: a rank on another machine ended. Its own output says why"
        return None

    def _named(self, ranks: Sequence[int]) -> str:
        processes = [(rank, self._peers.get(rank)) for rank in ranks]
        return " or ".join(f"rank {rank}" + (f" (pid {process.pid})" if process else "") for rank, process in processes)


SINGLE_PROCESS = Ranks()
"""The only rank of a run."""


@contextmanager
def connected(
    place: RankInfo, device: torch.device, timeout_s: float, check: Check, listening: int | None = None
) -> Iterator[Ranks]:
    """Connect this rank with the others for the length of a block.

    Args:
        place: this rank and their number.
        device: that it computes on: CUDA tensors are exchanged by NCCL, all others by gloo.
        timeout_s: longest time to wait for the others [s].
        check: raises if one of these ranks (None: any) is known to have ended.
        listening: on the first rank, socket of the meeting point `tcp://...`; owned from now on.

    Raises:
        RankLost: another rank ended or hangs.
        UserError: ranks compute on different kinds of devices, or two on the same GPU.
    """
    if place.size == 1:
        yield SINGLE_PROCESS
        return
    timeout = timedelta(seconds=timeout_s)
    try:
        _join(place, device, timeout, check, listening)
        ranks = Ranks(place, timeout_s=timeout_s, group=dist.new_group(backend="gloo", timeout=timeout))
        with ranks.naming_failures(check):
            ranks.introduce()
            yield ranks
            ranks.barrier()
    except BaseException:
        if device.type == "cuda":
            raise  # leaving would wait for the rank that is gone; the connections end with this process
        _leave()
        raise
    _leave()


def _join(place: RankInfo, device: torch.device, timeout: timedelta, check: Check, listening: int | None) -> None:
    """Wait for the other ranks, and make the default process group.

    Raises:
        UserError: ranks compute on different kinds of devices, or two on the same GPU.
        RankLost: a rank does not start.
    """
    gpu: torch.device | None = None
    if device.type == "cuda":  # one device is visible to a rank, unless nothing said which is its own
        gpu = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    store = _open_store(place, timeout, listening)
    store.set_timeout(timeout)
    store.set(f"here/{place.rank}", "cpu" if gpu is None else _identity(gpu))
    deadline = time.monotonic() + timeout.total_seconds()
    everyone = [f"here/{rank}" for rank in range(place.size)]
    while not store.check(everyone):
        check(None)
        if time.monotonic() > deadline:
            raise RankLost(f"rank {place.rank} waited {timeout.total_seconds():g} s for the others to start, in vain")
        time.sleep(_POLL_S)
    check_devices([store.get(key).decode() for key in everyone])
    dist.init_process_group(
        "gloo" if gpu is None else "nccl",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
        device_id=gpu,  # else NCCL guesses a rank's GPU from its number
    )


def _open_store(place: RankInfo, timeout: timedelta, listening: int | None) -> dist.Store:
    """Return the key-value store through which the ranks meet: torchrun's, a file, or one at an address of the first
    rank's machine."""
    if place.meeting is not None and place.meeting.startswith(TCP):
        host, _, port = place.meeting.removeprefix(TCP).rpartition(":")
        return dist.TCPStore(
            host, int(port), place.size, place.is_first, timeout, wait_for_workers=False, master_listen_fd=listening
        )
    if place.meeting is not None:
        return dist.FileStore(place.meeting, place.size)
    store: dist.Store = next(rendezvous("env://", timeout=timeout))[0]
    return store


def _identity(gpu: torch.device) -> str:
    """Return a text that is the same for two ranks only if they use the same GPU, or the same slice of one."""
    # Alone, neither is enough: slices (MIG) may have the UUID of their GPU, and where a scheduler shows each process
    # only one GPU, all of them are number 0.
    names = visible_names(os.environ)
    assert gpu.index is not None
    name = names[gpu.index] if gpu.index < len(names) else str(gpu.index)
    return f"cuda {name} {torch.cuda.get_device_properties(gpu).uuid} {machine_here()}"


def check_devices(devices: Sequence[str]) -> None:
    """Check what the ranks compute on.

    Args:
        devices: by rank: `cpu`, or `cuda` and an identifier of the GPU.

    Raises:
        UserError: some compute on the CPU and some on GPUs, or two on the same GPU.
    """
    on_gpus = [device != "cpu" for device in devices]
    if any(on_gpus) and not all(on_gpus):
        raise UserError(
            f"rank {on_gpus.index(False)} finds no CUDA device, and rank {on_gpus.index(True)} computes on one: start "
            "as many ranks as there are GPUs, or set engine.device=cpu"
        )
    for rank, device in enumerate(devices):
        if device != "cpu" and device in devices[:rank]:
            raise UserError(
                f"ranks {devices.index(device)} and {rank} would share one GPU: start as many ranks as there are GPUs, "
                "and set CUDA_VISIBLE_DEVICES to the names of all of them, or leave it unset"
            )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def machine_here() -> str:
    """Return an identifier of this machine or container; processes with the same one can see each other."""
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


# ---- a policy on all ranks


class Replicas:
    """Every rank holds all weights; also the case of a single rank."""

    factor = 1.0
    """Factor of a rank's loss before its backward pass."""

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self.policy = policy
        self.ranks = ranks

    def full_policy(self) -> Policy | None:
        """Return the policy with whole weights, to be saved, on the first rank, else None. All ranks must call it."""
        return self.policy if self.ranks.is_first else None

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Hold all weights on every rank for the length of a block, so that each can act as often as it needs."""
        yield

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients of all ranks, in place."""
        if self.ranks.size == 1:
            return
        # One exchange of one flat vector in float32: many small ones would cost a latency each, and a sum in 16 bits
        # would lose digits.
        own = [parameter.grad for parameter in parameters if parameter.grad is not None]  # the same ones on all ranks
        flat = torch.cat([gradient.flatten().float() for gradient in own])
        dist.all_reduce(flat)
        for gradient, part in zip(own, flat.split([gradient.numel() for gradient in own]), strict=True):
            gradient.copy_(part.view_as(gradient))


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is this rank's part of a larger one."""
    # If the module was never imported there can be no DTensor, and runs that do not shard need not import it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, sharded like another tensor of its shape; nothing is exchanged."""
    if not is_sharded(like) or is_sharded(tensor) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def norm_of(norm: Tensor) -> Tensor:
    """Return the full norm of gradients from one that may be of shards."""
    return norm.full_tensor() if is_sharded(norm) else norm
