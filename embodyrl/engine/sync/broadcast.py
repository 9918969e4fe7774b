"""Weights for processes of any machine, through torch.distributed: gloo from the CPU, NCCL from GPUs.

One rank of a group sends, all others receive. A transfer is a head, then bucket after bucket of tensors, each with its
checksum, then a round in which every receiver says whether all of them arrived; only if they did do the receivers
change their weights, so that all act on the same version. All ranks must call the same things in the same order.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embodyrl.engine.parallel import is_sharded
from embodyrl.engine.sync import layout as plan
from embodyrl.engine.sync.checksum import checksum
from embodyrl.engine.sync.errors import ChecksumError, PeerLost, SyncError, SyncTimeout, VersionError
from embodyrl.engine.sync.layout import Entry
from embodyrl.engine.sync.patch import apply_patch, make_patch

BUCKET_BYTES = 32 * 2**20
"""Tensors travel together until they are this large."""
_NONE = -1
T = TypeVar("T")
Group: TypeAlias = "dist.ProcessGroup | dist.ProcessGroupGloo | dist.ProcessGroupNCCL"
"""Processes that torch.distributed has joined."""


def stand_alone_group(store: dist.Store, rank: int, size: int, *, timeout_s: float) -> Group:
    """Join processes over gloo beside torch's default group, of which they may or may not be members.

    Ranks that shard weights need a default group of their own, without the processes that only receive.

    Args:
        store: where they meet; nothing else uses it.
        rank: this process.
        size: number of processes.
        timeout_s: longest time to wait for the others [s].
    """
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))


class _Form(IntEnum):
    """Form in which a bucket is sent."""

    whole = 0
    same = 1
    """As the receiver has it: nothing travels."""
    patch = 2


class _Group:
    """A group of processes, with a deadline on every call and names for what fails.

    Args:
        group: gloo or NCCL; None: the default group.
        source: the rank of the group that sends.
        timeout_s: longest time to wait for the others [s].
    """

    def __init__(self, group: Group | None, source: int, timeout_s: float) -> None:
        # Called directly, not through functions of torch.distributed: those know only the default group and its parts.
        self.group = cast(Any, dist.group.WORLD if group is None else group)
        self.source = source
        self.timeout = timedelta(seconds=timeout_s)
        self.rank, self.size = self.group.rank(), self.group.size()
        on_gpu = self.group.name() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """From the source to all others."""
        self.begin_broadcast(tensor, what)()

    def begin_broadcast(self, tensor: Tensor, what: str) -> Callable[[], None]:
        """The same, but while it is under way something else can be done; returns what waits for it."""
        work = self._named(lambda: self.group.broadcast(tensor, self.source), what)
        return lambda: self._named(lambda: self._finish(work), what)

    def numbers(self, values: Sequence[int], what: str) -> list[int]:
        """The source's numbers, of any size up to 64 bits."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        self.broadcast(tensor, what)
        return [int(each) for each in tensor.tolist()]

    def total(self, values: Sequence[int], what: str) -> list[int]:
        """Sums over all ranks."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        self._named(lambda: self._finish(self.group.allreduce(tensor)), what)
        return [int(each) for each in tensor.tolist()]

    def everyones(self, text: bytes, what: str) -> list[bytes]:
        """Return what each rank says, in their order."""
        lengths = self.total([len(text) if rank == self.rank else 0 for rank in range(self.size)], what)
        own = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in lengths]
        self._named(lambda: self._finish(self.group.allgather([found], [own])), what)
        return [each[:length].cpu().numpy().tobytes() for each, length in zip(found, lengths, strict=True)]

    def _finish(self, work: dist.Work) -> None:
        work.wait(self.timeout)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _named(self, action: Callable[[], T], what: str) -> T:
        """Do something.

        Raises:
            SyncTimeout: it was not in time.
            PeerLost: a connection broke.
        """
        try:
            return action()
        except RuntimeError as error:
            me = f"rank {self.rank} of {self.size}"
            if "imed out" in str(error) or "imeout" in str(error):
                raise SyncTimeout(f"{me}: {what} did not end within {self.timeout.total_seconds():g} s") from error
            raise PeerLost(f"{me}: {what} failed because another rank ended: {str(error).splitlines()[0]}") from error


_MEETING = "comparing what sender and receivers hold"


class _Side:
    """State that both sides share: the group, the tensors that travel, and how they share buckets."""

    def __init__(
        self, module: nn.Module, source: int, group: Group | None, timeout_s: float, bucket_bytes: int
    ) -> None:
        self._module = module
        self._group = _Group(group, source, timeout_s)
        everyone = [
            plan.from_json(text) for text in self._group.everyones(plan.to_json(plan.held_by(module)), _MEETING)
        ]
        sender = everyone.pop(source)
        self._entries = plan.travelling(sender, everyone[0]) if everyone else sender
        for held in everyone:
            plan.check_fit(self._entries, held)
        self._everything = list(_buckets(self._entries, bucket_bytes))
        self._changing = [bucket for bucket in self._everything if bucket[0].changes]
        self._weights: dict[str, Tensor] = {}
        """Of the module, while a transfer is under way."""
        self.version: int | None = None
        """The version that was sent, or that the module holds; None before the first one."""

    def _agree(self, faults: int, what: str) -> None:
        """Have every rank know whether all of them got everything.

        Raises:
            SyncError: some did not.
        """
        own = [faults if rank == self._group.rank else 0 for rank in range(self._group.size)]
        failed = [str(rank) for rank, count in enumerate(self._group.total(own, what)) if count]
        if failed:
            raise SyncError(
                f"{what} failed at rank {', '.join(failed)} of {self._group.size}: no rank took the weights"
            )

    def _pack(self, bucket: Sequence[Entry], out: Tensor) -> Tensor:
        """The bytes of this side's tensors, written into `out`."""
        data = out[: plan.total_bytes(bucket)]
        plan.pack(bucket, self._weights, data)
        return data

    def _packed(self, bucket: Sequence[Entry]) -> Tensor:
        """The same, in memory of their own."""
        return self._pack(bucket, self._room(plan.total_bytes(bucket)))

    @cached_property
    def _rooms(self) -> tuple[Tensor, Tensor]:
        """Room for two buckets of any size: while one is under way, the other is packed or unpacked."""
        size = max(map(plan.total_bytes, self._everything), default=0)
        return self._room(size), self._room(size)

    def _room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._group.device)


def _buckets(entries: Sequence[Entry], limit: int) -> Iterator[list[Entry]]:
    """Tensors that travel together: neighbours of one type, up to `limit` bytes."""
    bucket: list[Entry] = []
    size = 0
    for entry in entries:
        first = bucket[0] if bucket else entry
        if bucket and (size + entry.num_bytes > limit or (entry.dtype, entry.changes) != (first.dtype, first.changes)):
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += entry.num_bytes
    if bucket:
        yield bucket


class BroadcastSender(_Side):
    """Sends the weights of a module to the other ranks of a group.

    The first transfer carries every tensor, later ones those that learning changes, in the receivers' types. Of weights
    that are sharded over the default group, one tensor at a time is gathered; the other ranks of that group take part
    by a `Contributor`. If the sender fails before it has gathered all, they wait until their group's deadline.

    Args:
        module: whose weights.
        source: this rank, of `group`.
        group: the processes; None: the default group; `stand_alone_group` makes others.
        timeout_s: longest time to wait for the others in one exchange [s].
        patches: send the bits that changed, compressed, wherever that is smaller. Takes memory for what was sent last,
            and is faster where the link is slower than compressing: about 0.1 GB/s.
        bucket_bytes: see `BUCKET_BYTES`; the same on all ranks.

    Raises:
        LayoutError: a receiver holds other tensors; raised on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        source: int,
        group: Group | None = None,
        timeout_s: float,
        patches: bool,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(module, source, group, timeout_s, bucket_bytes)
        self._patches = patches
        self._sent: dict[str, Tensor] = {}
        """With `patches`, what the receivers hold: bytes of a bucket by the name of its first tensor."""

    def send(self, version: int) -> int:
        """Send the weights of this moment; returns the bytes that travelled to each receiver.

        Args:
            version: one more than the last one.

        Raises:
            VersionError: it is not.
            SyncError: a receiver did not get all of it, and none took the weights.
            SyncTimeout, PeerLost: another rank hangs or ended.
        """
        _check_next(version, self.version)
        what = f"sending weights of version {version}"
        everything = self.version is None
        patched = self._patches and not everything
        self._group.numbers([version, _NONE if self.version is None else self.version, patched], what)
        buckets = self._everything if everything else self._changing
        self._weights = plan.weights_of(self._module)
        travelled = self._send_patches(buckets, what) if patched else self._send_whole(buckets, what)
        try:
            self._agree(0, what)
        except SyncError:
            self._sent.clear()
            _all_sent(self._weights, False)
            raise
        _all_sent(self._weights, True)
        self.version = version
        return travelled

    def _send_whole(self, buckets: Sequence[Sequence[Entry]], what: str) -> int:
        """Bucket after bucket, their checksums at the end; while one is under way the next one is packed."""
        rooms, under_way, sums = self._rooms, deque[Callable[[], None]](), []
        for number, bucket in enumerate(buckets):
            if len(under_way) == len(rooms):
                under_way.popleft()()
            data = self._pack(bucket, rooms[number % len(rooms)])
            if self._patches and bucket[0].changes:
                self._sent[bucket[0].name] = data.clone()
            sums.append(checksum(data))
            under_way.append(self._group.begin_broadcast(data, f"{what}, bucket of {bucket[0].name},"))
        for finish in under_way:
            finish()
        self._group.numbers(sums, what)
        return sum(map(plan.total_bytes, buckets))

    def _send_patches(self, buckets: Sequence[Sequence[Entry]], what: str) -> int:
        """Each bucket in its smallest form, after a word about it."""
        travelled = 0
        for bucket in buckets:
            place = f"{what}, bucket of {bucket[0].name},"
            data, form, payload = self._smallest(bucket)
            self._group.numbers([form, len(payload), checksum(data)], place)
            if len(payload):
                self._group.broadcast(payload, place)
            travelled += len(payload)
        return travelled

    def _smallest(self, bucket: Sequence[Entry]) -> tuple[Tensor, _Form, Tensor]:
        """A bucket's bytes, the form in which they are smallest, and what then travels."""
        data, before = self._packed(bucket), self._sent.get(bucket[0].name)
        self._sent[bucket[0].name] = data
        if before is None:
            return data, _Form.whole, data
        if torch.equal(data, before):
            return data, _Form.same, data[:0]
        patch = make_patch(data.cpu(), before.cpu(), bucket[0].torch_dtype.itemsize)
        if len(patch) >= len(data):
            return data, _Form.whole, data
        return data, _Form.patch, torch.frombuffer(bytearray(patch), dtype=torch.uint8).to(data.device)


def _check_next(version: int, last: int | None) -> None:
    """Object to a version that is not one more than the last one.

    Raises:
        VersionError: it is not.
    """
    if version < 0 or (last is not None and version != last + 1):
        raise VersionError(f"version {version} cannot follow version {last}: each is sent once, in order")


def _all_sent(weights: Mapping[str, Tensor], own: bool) -> bool:
    """Have all ranks that share weights know whether these were sent; only the one that sends can say no."""
    part = next(filter(is_sharded, weights.values()), None)
    if part is None:
        return own
    sent = torch.tensor(int(own), device=part.device_mesh.device_type)
    dist.all_reduce(sent, dist.ReduceOp.MIN)
    return bool(sent)


class Contributor:
    """Gives its shards to a `BroadcastSender` on another rank of the default group.

    Args:
        module: as at the sender, sharded over the default group.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        own = plan.held_by(module)
        self._entries = plan.travelling(own, own)
        self.version: int | None = None
        """The version that was sent; None before the first one."""

    def send(self, version: int) -> None:
        """Take part in the sender's `send` of the same version.

        Raises:
            VersionError: it is not one more than the last one.
            SyncError: the receivers did not take it.
        """
        _check_next(version, self.version)
        weights = plan.weights_of(self._module)
        plan.take_part([each for each in self._entries if each.changes or self.version is None], weights)
        if not _all_sent(weights, True):
            raise SyncError(f"sending weights of version {version} failed: no rank took the weights")
        self.version = version


class BroadcastReceiver(_Side):
    """Takes the weights that a `BroadcastSender` sends into a module.

    A transfer waits in memory of its own, as large as what learning changes, until all of it is there; only the first
    one, before which there is nothing to act with, goes to the module at once.

    Args:
        module: whose weights to replace.
        source: the rank of the group that sends.
        group, timeout_s, bucket_bytes: as at the sender.

    Raises:
        LayoutError: the sender holds other tensors; raised on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        source: int,
        group: Group | None = None,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(module, source, group, timeout_s, bucket_bytes)
        self._arrived: dict[str, Tensor] = {}
        """Bytes of a bucket by the name of its first tensor."""

    def receive(self, version: int) -> None:
        """Take part in a transfer, and take its weights if every receiver has got all of it.

        Raises:
            VersionError: another version came, or one that builds upon a version that is not here.
            ChecksumError: what arrived is not what was sent.
            SyncError: another receiver had one of these faults.
            SyncTimeout, PeerLost: another rank hangs or ended.
        """
        what = f"receiving weights of version {version}"
        came, follows, patched = self._group.numbers([0, 0, 0], what)
        first = follows == _NONE
        faults: list[SyncError] = self._version_faults(version, came, None if first else follows)
        if first:
            self.version = None
        buckets = self._everything if first else self._changing
        self._weights = plan.weights_of(self._module)
        if patched:
            faults += [fault for bucket in buckets for fault in self._receive_patch(bucket, what)]
        else:
            faults += self._receive_whole(buckets, what, keep=not first)
        try:
            self._agree(len(faults), what)
        except SyncError as error:
            raise (faults[0] if faults else error) from None
        if not first:
            for bucket in buckets:
                plan.unpack(bucket, self._arrived[bucket[0].name], self._weights)
        self.version = version

    def _version_faults(self, version: int, came: int, follows: int | None) -> list[SyncError]:
        """Return what is wrong with a transfer's version."""
        if came != version:
            return [VersionError(f"version {version} was expected and version {came} came")]
        if self.version is not None and version <= self.version:
            return [VersionError(f"version {version} is not newer than version {self.version}, which is here already")]
        if follows is not None and follows != self.version:
            return [
                VersionError(f"version {version} builds upon version {follows}, and version {self.version} is here")
            ]
        return []

    def _receive_whole(self, buckets: Sequence[Sequence[Entry]], what: str, *, keep: bool) -> list[SyncError]:
        """Bucket after bucket: into the memory where they wait, or else straight into the module."""
        rooms, under_way, sums = self._rooms if not keep else (), deque[Callable[[], int]](), []
        for number, bucket in enumerate(buckets):
            size, place = plan.total_bytes(bucket), f"{what}, bucket of {bucket[0].name},"
            data = self._waiting_room(bucket) if keep else rooms[number % len(rooms)][:size]
            wait = self._group.begin_broadcast(data, place)
            under_way.append(partial(self._finish_whole, bucket, data, wait, keep=keep))
            if len(under_way) == 2:
                sums.append(under_way.popleft()())
        sums += [finish() for finish in under_way]
        expected = self._group.numbers([0] * len(sums), what)
        triples = zip(buckets, sums, expected, strict=True)
        return [
            ChecksumError(f"{what}: the bucket of {bucket[0].name} brought other bytes than were sent")
            for bucket, found, wanted in triples
            if found != wanted
        ]

    def _finish_whole(self, bucket: Sequence[Entry], data: Tensor, wait: Callable[[], None], *, keep: bool) -> int:
        """Wait for a bucket; returns its checksum."""
        wait()
        if not keep:
            plan.unpack(bucket, data, self._weights)
        return checksum(data)

    def _waiting_room(self, bucket: Sequence[Entry]) -> Tensor:
        """Return where a bucket waits until all of them are here; the same from version to version."""
        room = self._arrived.get(bucket[0].name)
        if room is None:
            room = self._arrived[bucket[0].name] = self._room(plan.total_bytes(bucket))
        return room

    def _receive_patch(self, bucket: Sequence[Entry], what: str) -> list[SyncError]:
        """One bucket in whichever form, into the memory where it waits; returns what is wrong."""
        place = f"{what}, bucket of {bucket[0].name},"
        form, length, expected = self._group.numbers([0, 0, 0], place)
        payload = self._room(length)
        if length:
            self._group.broadcast(payload, place)
        try:
            data = self._restored(bucket, _Form(form), payload)
        except (zlib.error, ValueError) as error:
            return [ChecksumError(f"{place} cannot be read: {error}")]
        if len(data) != plan.total_bytes(bucket) or checksum(data) != expected:
            return [ChecksumError(f"{place} brought other bytes than were sent, or builds upon others than are here")]
        self._arrived[bucket[0].name] = data
        return []

    def _restored(self, bucket: Sequence[Entry], form: _Form, payload: Tensor) -> Tensor:
        """A bucket's bytes, from what travelled and what the module holds."""
        if form is _Form.whole:
            return payload
        before = self._packed(bucket)
        if form is _Form.same:
            return before
        now = apply_patch(payload.cpu().numpy().tobytes(), before.cpu(), bucket[0].torch_dtype.itemsize)
        return now.to(before.device)
