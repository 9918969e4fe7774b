"""Weights through shared memory, between real processes that learn, act, hang and die."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import make_policy
from sync_peers import (
    UPDATES,
    Adapted,
    Numbers,
    Peer,
    decide,
    die_while_writing,
    other_policy,
    peers,
    share_numbers,
    share_training,
    stop_while_copying,
)

from embodyrl.engine.sync import (
    ChecksumError,
    LayoutError,
    PeerLost,
    SharedReceiver,
    SharedSender,
    SyncError,
    SyncTimeout,
    VersionError,
    held_by,
)
from embodyrl.placement.transport.lending import MemoryServer, RemoteMemory
from embodyrl.placement.transport.line import LineLost

SOON = 0.3
Reach = Callable[[SharedSender], str | RemoteMemory]


@pytest.fixture(params=["here", "elsewhere"])
def reach(request: pytest.FixtureRequest) -> Iterator[Reach]:
    """How a receiver of this machine, and one of another, finds what a sender offers."""
    if request.param == "here":
        yield lambda sender: sender.address
        return
    with MemoryServer("127.0.0.3") as server:
        yield lambda sender: sender.lend(server)


def test_a_policy_in_another_process_decides_like_the_one_that_learns() -> None:
    with peers((share_training,)) as [trainer]:
        policy = other_policy()
        receiver = SharedReceiver(policy, trainer.get(), timeout_s=60)
        seen = []
        for version in range(UPDATES + 1):
            expected = trainer.get()
            receiver.receive(version)
            assert np.array_equal(decide(policy), expected), version
            seen.append(expected)
            trainer.line.send("next")
        assert trainer.get() == "done"
    assert all(not np.array_equal(one, other) for one, other in itertools.pairwise(seen)), "nothing was learned"


def test_float32_weights_arrive_as_bfloat16_where_those_are_held(reach: Reach) -> None:
    sender_policy, policy = make_policy(), other_policy().to(torch.bfloat16)
    sender = SharedSender(sender_policy, held=held_by(policy), timeout_s=SOON)
    receiver = SharedReceiver(policy, reach(sender), timeout_s=SOON)
    for version in (0, 1):
        sender.send(version)
        receiver.receive(version)
        for name, tensor in policy.state_dict().items():
            assert torch.equal(tensor, sender_policy.state_dict()[name].to(tensor.dtype)), name
        torch.nn.init.normal_(next(sender_policy.parameters()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_weights_go_from_gpu_to_gpu_and_from_gpu_to_cpu() -> None:
    module = make_policy().cuda()
    sender = SharedSender(module, timeout_s=SOON)
    receivers = [
        SharedReceiver(policy, sender.address, timeout_s=SOON) for policy in (other_policy().cuda(), other_policy())
    ]
    for version in (0, 1):
        sender.send(version)
        for receiver in receivers:
            receiver.receive(version)
            for name, tensor in receiver._module.state_dict().items():
                assert torch.equal(tensor.cpu(), module.state_dict()[name].cpu()), name
        torch.nn.init.normal_(next(module.parameters()))


def test_later_transfers_carry_what_learns_and_buffers_alone(reach: Reach) -> None:
    module, receiving = Adapted(1.0, torch.float32), Adapted(2.0, torch.float32)
    sender = SharedSender(module, timeout_s=SOON)
    receiver = SharedReceiver(receiving, reach(sender), timeout_s=SOON)
    sizes = []
    for version in (0, 1):
        sizes.append(sender.send(version))
        receiver.receive(version)
        assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in receiving.state_dict().items())
        module.adapter.data.add_(0.5)
        module.get_buffer("count").add_(1)
    assert sizes[0] - sizes[1] >= 300 * 300 * 4 and sizes[1] < 3000
    # Frozen weights are not even looked at again.
    module.base.data.add_(1.0)
    sender.send(2)
    receiver.receive(2)
    assert not torch.equal(module.base, receiving.base)


def test_a_receiver_that_skips_versions_has_the_whole_of_the_newest(reach: Reach) -> None:
    module, receiving = Adapted(1.0, torch.float32), Adapted(2.0, torch.float32)
    sender = SharedSender(module, timeout_s=SOON)
    receiver = SharedReceiver(receiving, reach(sender), timeout_s=SOON)
    assert receiver.newest is None
    for version in range(4):
        module.adapter.data[version] = float(version)
        sender.send(version)
    assert receiver.newest == 3
    with pytest.raises(VersionError, match="version 2 was overwritten: the memory holds version 3"):
        receiver.receive(2)
    receiver.receive(3)
    assert torch.equal(module.adapter, receiving.adapter) and receiver.version == 3
    with pytest.raises(VersionError, match="version 3 is not newer than version 3, which is here already"):
        receiver.receive(3)


def test_frozen_weights_that_both_sides_have_do_not_travel(reach: Reach) -> None:
    module, receiving = Adapted(1.0, torch.float32), Adapted(2.0, torch.float32).to(torch.bfloat16)
    receiving.base.data.fill_(1.0)
    held = held_by(receiving.requires_grad_(False))  # it is the sender who knows what learns
    sender = SharedSender(module, held=held, timeout_s=SOON, whole=False)
    receiver = SharedReceiver(receiving, reach(sender), timeout_s=SOON)
    for version in (0, 4):
        module.adapter.data.add_(0.5)
        module.get_buffer("count").add_(1)
        assert sender.send(version) < 3000
        receiver.receive(version)
        for name, tensor in receiving.state_dict().items():
            assert torch.equal(tensor, module.state_dict()[name].to(tensor.dtype)), name
    assert len(sender._memory.bytes) < 300 * 300 * 2


def test_frozen_weights_that_differ_are_named(reach: Reach) -> None:
    sender = SharedSender(Adapted(1.0, torch.float32), timeout_s=SOON, whole=False)
    sender.send(0)
    receiving = Adapted(1.0, torch.float32)
    receiving.base.data[299, 299] += 1e-7
    receiving.adapter.data.fill_(3.0)
    receiver = SharedReceiver(receiving, reach(sender), timeout_s=SOON)
    with pytest.raises(ChecksumError, match=r"the frozen weights of .* differ, first in base: .*did model\.checkpoint"):
        receiver.receive(0)
    assert receiver.version is None and receiving.adapter.unique().tolist() == [3.0]
    receiving.base.data.fill_(1.0)
    receiver.receive(0)
    with pytest.raises(LayoutError, match="the receiver lacks adapter"):
        SharedReceiver(torch.nn.Linear(2, 2), reach(sender), timeout_s=SOON)


def test_versions_are_sent_once_and_in_order() -> None:
    sender = SharedSender(make_policy(), timeout_s=SOON)
    sender.send(5)
    for wrong in (5, 4, -1):
        with pytest.raises(VersionError, match=f"version {wrong} cannot follow version 5: each is sent once, in order"):
            sender.send(wrong)
    sender.send(6)
    sender.send(9)


def test_waiting_has_an_end() -> None:
    sender = SharedSender(make_policy(), timeout_s=SOON)
    receiver = SharedReceiver(other_policy(), sender.address, timeout_s=SOON)
    with pytest.raises(SyncTimeout, match=r"weights of version 0 did not come, the newest one is None; waited 0\.3 s"):
        receiver.receive(0)
    sender.send(0)
    receiver.receive(0)
    sender.close()
    sender.close()
    with pytest.raises(PeerLost, match="the process that sends weights ended before version 1; the newest one is 0"):
        receiver.receive(1)


def test_bytes_that_changed_on_the_way_are_not_taken() -> None:
    sender = SharedSender(make_policy(), timeout_s=SOON)
    policy = other_policy()
    receiver = SharedReceiver(policy, sender.address, timeout_s=SOON)
    before = decide(policy)
    sender.send(0)
    sender._memory.bytes[-200] ^= 4
    with pytest.raises(ChecksumError, match="the memory does not hold what was sent as version 0"):
        receiver.receive(0)
    assert np.array_equal(decide(policy), before) and receiver.version is None


def test_other_tensors_and_other_memory_are_refused() -> None:
    sender = SharedSender(make_policy(), timeout_s=SOON)
    with pytest.raises(LayoutError, match=r"actor\.\d\.bias has shape \(8,\) at the sender and \(9,\) at the receiver"):
        SharedReceiver(make_policy(hidden_sizes=[9]), sender.address, timeout_s=SOON)
    with pytest.raises(LayoutError, match=r"is sent as float32 and is bfloat16 at the receiver"):
        SharedReceiver(make_policy().to(torch.bfloat16), sender.address, timeout_s=SOON)
    with pytest.raises(PeerLost, match="no process offers weights at /proc/1234567890/fd/3"):
        SharedReceiver(make_policy(), "/proc/1234567890/fd/3", timeout_s=SOON)
    with pytest.raises(SyncError, match="/dev/zero is not memory that a sender of weights made"):
        SharedReceiver(make_policy(), "/dev/zero", timeout_s=SOON)
    fd = os.memfd_create("embodyrl-test", os.MFD_CLOEXEC)
    os.write(fd, b"\x7f" * 4096)
    with (
        MemoryServer("127.0.0.3") as server,
        pytest.raises(SyncError, match="lends no memory of this version's sender"),
    ):
        SharedReceiver(make_policy(), server.lend(fd), timeout_s=SOON)
    os.close(fd)


def test_nobody_ever_sees_a_mixture_of_versions() -> None:
    with peers((share_numbers,)) as [writer]:
        module = Numbers()
        receiver = SharedReceiver(module, writer.get(), timeout_s=60)
        seen: list[int] = []
        while len(seen) < 40:
            newest = receiver.newest
            if newest is None or newest == receiver.version:
                continue
            try:
                receiver.receive(newest)
            except VersionError:  # a newer one was faster
                assert not seen or module.value() == seen[-1]
                continue
            assert module.value() == newest == receiver.version
            seen.append(newest)
        writer.line.send("end")
        assert writer.get() == "done" and seen == sorted(set(seen))


@pytest.mark.faults
def test_a_sender_killed_while_writing_is_named_and_leaves_nothing() -> None:
    with peers((die_while_writing,)) as [trainer]:
        policy = other_policy()
        receiver = SharedReceiver(policy, trainer.get(), timeout_s=60)
        receiver.receive(0)
        before = decide(policy)
        trainer.line.send("go on")
        trainer.process.join(60)
        assert trainer.process.exitcode == -signal.SIGKILL
        with pytest.raises(PeerLost, match="ended before version 1; the newest one is 0"):
            receiver.receive(1)
        late = SharedReceiver(other_policy(), f"/proc/self/fd/{receiver._memory.segment.fd}", timeout_s=60)
        with pytest.raises(PeerLost, match="whoever sends weights ended, or failed, while it was writing version 1"):
            late.receive(0)
        assert np.array_equal(decide(policy), before) and receiver.version == 0
        assert mapped() and all("/memfd:" in line for line in mapped()), "no file that would outlive its makers"
        late.close()
        receiver.close()
        del late, receiver
    assert not mapped()


def mapped() -> list[str]:
    """Mappings of weights in this process; those of a dead one are gone with it."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "embodyrl-weights" in line]


@pytest.mark.faults
def test_a_receiver_that_hangs_is_an_error_and_one_that_dies_is_none() -> None:
    sender = SharedSender(make_policy(), timeout_s=SOON)
    sender.send(0)
    with peers((stop_while_copying, sender.address)) as [receiver]:
        assert receiver.get() == "stops"
        wait_until_stopped(receiver)
        with pytest.raises(
            SyncTimeout, match="version 1 cannot be written, because a receiver has not finished copying"
        ):
            sender.send(1)
        receiver.end()
        sender.send(1)


def wait_until_stopped(peer: Peer) -> None:
    import psutil

    from embodyrl.engine.sync.locks import wait_until

    process = psutil.Process(peer.process.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 60, lambda: "the process does not stop")


def test_a_sender_on_another_machine_that_ends_is_noticed_and_half_a_version_never_taken() -> None:
    sender, receiving = SharedSender(make_policy(), timeout_s=SOON), other_policy()
    with MemoryServer("127.0.0.3") as server:
        receiver = SharedReceiver(receiving, sender.lend(server), timeout_s=SOON)
        sender.send(0)
        receiver.receive(0)
        before = [tensor.clone() for tensor in receiving.parameters()]
        sender.send(1)
        assert sender._memory is not None
        sender._memory.bytes[-100] ^= 1
        with pytest.raises(ChecksumError, match="the memory does not hold what was sent as version 1"):
            receiver.receive(1)
        assert all(torch.equal(one, other) for one, other in zip(before, receiving.parameters(), strict=True))
    with pytest.raises(LineLost, match=r"127\.0\.0\.3:\d+ is gone"):
        receiver.receive(2)
