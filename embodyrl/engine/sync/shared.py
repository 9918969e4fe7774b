"""Weights for other processes, through memory that those of this machine map and those of other machines read.

One process sends, any number receive. The memory holds one version. Whoever writes or copies it holds a lock meanwhile,
which the kernel takes from a process that ends, and what a sender had begun when it ended is marked as such: nobody
ever sees half a version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embodyrl.engine.offload import pin
from embodyrl.engine.sync import layout as plan
from embodyrl.engine.sync.checksum import checksum
from embodyrl.engine.sync.errors import ChecksumError, PeerLost, SyncError, VersionError
from embodyrl.engine.sync.layout import Entry
from embodyrl.engine.sync.locks import ByteLock, wait_until
from embodyrl.placement.transport.lending import MemoryClient, MemoryServer, RemoteMemory
from embodyrl.placement.transport.segment import Segment

_SEGMENT = "weights"
_MAGIC = 0x656D626F64790002
_NONE = -1
_KIND, _TEXT, _DATA, _WRITING, _VERSION, _SUM_FIXED, _SUM_CHANGING = range(7)
"""Numbers of the head: what this is, bytes of JSON, where the data begins, the version that is being written, the one
that is there, and the checksums of its two parts."""
_HEAD = 7 * 8
_PAGE = 4096
_ALIVE, _CONTENT = 0, 1
"""What the locks are on: that the sender lives, and the memory's content."""


class _Memory:
    """The memory as both sides see it: a head of seven numbers, the entries as JSON, and the data.

    Args:
        segment: opened for this object alone; owned from now on.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.bytes = torch.frombuffer(segment.map(segment.num_bytes), dtype=torch.uint8)
        self._head = self.bytes[:_HEAD].view(torch.int64)
        self.alive, self.content = ByteLock(segment.fd, _ALIVE), ByteLock(segment.fd, _CONTENT)

    def close(self) -> None:
        """Let go of the memory. The locks are released explicitly, since the mapping keeps the file open."""
        if self.segment.fd >= 0:
            self.alive.release()
            self.content.release()
            self.segment.close()

    def __getitem__(self, word: int) -> int:
        return int(self._head[word])

    def __setitem__(self, word: int, value: int) -> None:
        self._head[word] = value

    def text(self) -> bytes:
        """The entries as JSON."""
        return bytes(self.bytes[_HEAD : _HEAD + self[_TEXT]].numpy().tobytes())

    def has_sender(self) -> bool:
        """Whether whoever made the memory lives."""
        return self.alive.held_elsewhere()

    def reading(self, timeout_s: float, why_not: str) -> AbstractContextManager[None]:
        """Keep the sender from writing for the length of a block."""
        return self.content.held(timeout_s, why_not, exclusive=False)

    def parts(self, fixed: int) -> tuple[Tensor, Tensor]:
        """The data: `fixed` bytes of what never changes, and what does."""
        data = self.bytes[self[_DATA] :]
        return data[:fixed], data[fixed:]


class _MemoryElsewhere:
    """The same memory on another machine. Nothing keeps its sender from writing while it is read: checksums tell.

    Args:
        lent: the memory.
        timeout_s: longest time for the other machine to answer [s].
    """

    def __init__(self, lent: RemoteMemory, timeout_s: float) -> None:
        self._lent = lent
        self._line = MemoryClient(lent.line, timeout_s=timeout_s)
        if self[_KIND] != _MAGIC:
            self.close()
            raise SyncError(f"{lent.line} lends no memory of this version's sender of weights")
        self._data = torch.empty(lent.size - self[_DATA], dtype=torch.uint8)

    def _read(self, start: int, room: Tensor) -> Tensor:
        if len(room):
            self._line.read(self._lent, [start], [room.numpy().data])
        return room

    def __getitem__(self, word: int) -> int:
        return int(self._read(8 * word, torch.empty(8, dtype=torch.uint8)).view(torch.int64))

    def text(self) -> bytes:
        """See `_Memory`."""
        return bytes(self._read(_HEAD, torch.empty(self[_TEXT], dtype=torch.uint8)).numpy().tobytes())

    def has_sender(self) -> bool:
        """See `_Memory`: it has answered."""
        return True

    def reading(self, timeout_s: float, why_not: str) -> AbstractContextManager[None]:
        """See the class."""
        return nullcontext()

    def parts(self, fixed: int) -> tuple[Tensor, Tensor]:
        """See `_Memory`."""
        data = self._read(self[_DATA], self._data)
        return data[:fixed], data[fixed:]

    def close(self) -> None:
        """Close the line."""
        self._line.close()


class SharedSender:
    """Offers the weights of a module to other processes of this machine.

    A transfer after the first one copies only what learning changes: parameters that require a gradient, and buffers.
    Where torch's default process group exists, all of its ranks construct one and send the same versions: the first
    has the memory, the others help to gather weights that are sharded, one tensor at a time. If the first fails before
    it has gathered all, they wait until their group's deadline.

    Args:
        module: whose weights; on any device.
        held: what the receivers hold (`held_by(their_module)`), if that differs in type: float32 weights go to bfloat16
            here, once. None: the same.
        timeout_s: longest time to wait for receivers that are copying [s].
        whole: False: frozen parameters take no shared memory and never travel. The receivers have read them from the
            same files, and compare their checksums, which are taken here and now, with those of their own.

    Raises:
        LayoutError: the receivers hold other tensors.
    """

    def __init__(
        self, module: nn.Module, *, timeout_s: float, held: Sequence[Entry] | None = None, whole: bool = True
    ) -> None:
        own = plan.held_by(module)
        self._module = module
        self._timeout_s = timeout_s
        entries = plan.travelling(own, own if held is None else held)
        frozen = [] if whole else [each for each in entries if not each.changes]
        self._entries = entries[len(frozen) :]
        self._fixed = plan.total_bytes(each for each in self._entries if not each.changes)
        self._version: int | None = None
        summed = plan.summed(frozen, plan.weights_of(module))
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._memory = self._offer(plan.to_json([*summed, *self._entries])) if is_first else None

    def _offer(self, text: bytes) -> _Memory:
        """Make the memory, without weights yet."""
        start = -(-(_HEAD + len(text)) // _PAGE) * _PAGE
        memory = _Memory(Segment.create(_SEGMENT, start + plan.total_bytes(self._entries)))
        if any(tensor.is_cuda for tensor in plan.weights_of(self._module).values()):
            pin(memory, memory.bytes.data_ptr(), len(memory.bytes))
        memory.bytes[_HEAD : _HEAD + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        memory[_TEXT], memory[_DATA], memory[_WRITING], memory[_VERSION] = len(text), start, _NONE, _NONE
        memory.alive.try_acquire(exclusive=True)
        memory[_KIND] = _MAGIC
        return memory

    @property
    def address(self) -> str:
        """Address by which a receiver finds the memory, as the same user on the same machine.

        Raises:
            SyncError: this is not the first rank.
        """
        return self._offered().segment.address

    def _offered(self) -> _Memory:
        if self._memory is None:
            raise SyncError(f"weights are offered by the first rank, and this is rank {dist.get_rank()}")
        return self._memory

    def lend(self, server: MemoryServer) -> RemoteMemory:
        """Lend the memory to receivers on other machines; a version must stay until they have taken it.

        Raises:
            SyncError: this is not the first rank.
        """
        return server.lend(self._offered().segment.fd)

    def send(self, version: int) -> int:
        """Put the module's weights of this moment there; returns the bytes that this rank wrote.

        Args:
            version: greater than the last one; numbers may be left out.

        Raises:
            VersionError: it is not.
            SyncTimeout: a receiver has been copying for too long.
        """
        if version < 0 or (self._version is not None and version <= self._version):
            raise VersionError(f"version {version} cannot follow version {self._version}: each is sent once, in order")
        fixed = [each for each in self._entries if not each.changes and self._version is None]
        changing = [each for each in self._entries if each.changes]
        weights = plan.weights_of(self._module)
        if self._memory is None:
            plan.take_part([*fixed, *changing], weights)
        else:
            self._write(self._memory, version, fixed, changing, weights)
        self._version = version
        return plan.total_bytes([*fixed, *changing]) if self._memory is not None else 0

    def _write(
        self,
        memory: _Memory,
        version: int,
        fixed: Sequence[Entry],
        changing: Sequence[Entry],
        weights: Mapping[str, Tensor],
    ) -> None:
        """Fill the memory; nobody reads meanwhile."""
        why_not = f"weights of version {version} cannot be written, because a receiver has not finished copying"
        with memory.content.held(self._timeout_s, why_not, exclusive=True):
            memory[_WRITING] = version
            fixed_data, changing_data = memory.parts(self._fixed)
            if fixed:
                plan.pack(fixed, weights, fixed_data)
                memory[_SUM_FIXED] = checksum(fixed_data)
            plan.pack(changing, weights, changing_data)
            memory[_SUM_CHANGING] = checksum(changing_data)
            memory[_VERSION], memory[_WRITING] = version, _NONE

    def close(self) -> None:
        """Let go of the memory; receivers that wait for another version learn that there is none to come."""
        if self._memory is not None:
            self._memory.close()


class SharedReceiver:
    """Takes the weights that a `SharedSender` offers into a module.

    Args:
        module: whose weights to replace.
        address: `SharedSender.address`; on another machine what `SharedSender.lend` returned.
        timeout_s: longest time to wait for a version [s].

    Raises:
        PeerLost, LineError: the sender has ended.
        LayoutError: it sends other tensors than the module has.
    """

    def __init__(self, module: nn.Module, address: str | RemoteMemory, *, timeout_s: float) -> None:
        self._module = module
        self._timeout_s = timeout_s
        self._memory = _MemoryElsewhere(address, timeout_s) if isinstance(address, RemoteMemory) else _open(address)
        entries = plan.from_json(self._memory.text())
        plan.check_fit(entries, plan.held_by(module))
        self._frozen = [each for each in entries if each.sum is not None]
        self._entries = entries[len(self._frozen) :]
        self._fixed = plan.total_bytes(each for each in self._entries if not each.changes)
        self.version: int | None = None
        """What the module holds; None before the first version."""

    @property
    def newest(self) -> int | None:
        """The version that is there to be received; None before the first one."""
        version = self._memory[_VERSION]
        return None if version == _NONE else version

    def receive(self, version: int) -> None:
        """Wait for a version and take it. Versions may be left out: the memory always holds all of the newest one.

        Raises:
            VersionError: the module has it already, or it was overwritten by a newer one.
            SyncTimeout: it did not come in time.
            PeerLost: the sender ended before it was there.
            ChecksumError: the memory does not hold what was sent, or, at the first version, the frozen weights that do
                not travel are not the sender's.
        """
        if self.version is not None and version <= self.version:
            raise VersionError(f"version {version} is not newer than version {self.version}, which is here already")
        wait_until(
            lambda: self._arrived(version),
            self._timeout_s,
            lambda: f"weights of version {version} did not come, the newest one is {self.newest}",
        )
        if self.version is None:
            plan.check_same(self._frozen, plan.weights_of(self._module))
        why_not = f"weights of version {version} cannot be copied, because the sender has not finished writing"
        with self._memory.reading(self._timeout_s, why_not):
            self._take(version)
        self.version = version

    def _arrived(self, version: int) -> bool:
        newest = self.newest
        if newest is not None and newest >= version:
            return True
        if not self._memory.has_sender():
            raise PeerLost(f"the process that sends weights ended before version {version}; the newest one is {newest}")
        return False

    def _take(self, version: int) -> None:
        """Check the memory, then copy it; nobody writes meanwhile."""
        memory = self._memory
        if memory[_WRITING] != _NONE:
            raise PeerLost(f"whoever sends weights ended, or failed, while it was writing version {memory[_WRITING]}")
        if memory[_VERSION] != version:
            raise VersionError(f"version {version} was overwritten: the memory holds version {memory[_VERSION]}")
        fixed, changing = memory.parts(self._fixed)
        parts = [(changing, memory[_SUM_CHANGING], True)]
        if self.version is None:
            parts.insert(0, (fixed, memory[_SUM_FIXED], False))
        for data, expected, _ in parts:
            if checksum(data) != expected:
                raise ChecksumError(f"the memory does not hold what was sent as version {version}")
        weights = plan.weights_of(self._module)
        for data, _, changes in parts:
            plan.unpack([each for each in self._entries if each.changes is changes], data, weights)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()


def _open(address: str) -> _Memory:
    """The memory at an address, opened anew so that its locks are this object's.

    Raises:
        PeerLost: nobody offers weights there.
    """
    try:
        segment = Segment.open(address, _SEGMENT)
    except OSError as error:
        raise PeerLost(f"no process offers weights at {address}: {error.strerror}") from error
    except ValueError as error:
        raise SyncError(f"{address} is not memory that a sender of weights made") from error
    memory = _Memory(segment)
    if memory[_KIND] != _MAGIC:
        memory.close()
        raise SyncError(f"{address} is not memory of this version's sender of weights")
    return memory
