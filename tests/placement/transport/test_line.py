import dataclasses
import errno
import json
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from embodyrl.placement.transport import line as lines
from embodyrl.placement.transport.line import Address, LineError, LineLost, LineTimeout, Listener, Service, connect


@pytest.fixture
def listener():
    with Listener("127.0.0.3") as listening:
        yield listening


@pytest.fixture
def pair(listener):
    with opened(listener) as (caller, accepted), caller, accepted:
        yield caller, accepted


class opened:  # noqa: N801
    """Both ends of a line."""

    def __init__(self, listener):
        self.listener = listener

    def __enter__(self):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.listener.accept(10.0)))
        thread.start()
        caller = connect(self.listener.address, 10.0)
        thread.join()
        return caller, found[0]

    def __exit__(self, *_):
        pass


def in_background(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def refuses(listener, error, timeout_s):
    with pytest.raises(error):
        listener.accept(timeout_s)


def plain(listener):
    """A connection of someone without the token."""
    return socket.create_connection((listener.address.host, listener.address.port), timeout=10)


# ---- addresses


def test_an_address_travels_and_hides_its_token():
    address = Address("127.0.0.1", 99, "secret")
    assert Address(**json.loads(json.dumps(dataclasses.asdict(address)))) == address
    assert pickle.loads(pickle.dumps(address)) == address
    assert "secret" not in repr(address) + str(address)
    assert str(address) == "127.0.0.1:99"
    assert str(Address("::1", 99, "")) == "[::1]:99"


def test_only_the_named_address_is_bound(listener):
    assert listener.address.host == "127.0.0.3"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.address.port), timeout=5)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_all_addresses_are_refused(host):
    with pytest.raises(ValueError, match="stands for every address of this machine"):
        Listener(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused(host):
    with pytest.raises(LineError, match=f"cannot listen on {host}: "):
        Listener(host)


# ---- opening


def test_a_wrong_token_opens_nothing(listener):
    wrong = dataclasses.replace(listener.address, token="guess")
    accepting = in_background(lambda: refuses(listener, LineTimeout, 1.0))
    with pytest.raises(LineLost, match=r"cannot open a line to 127\.0\.0\.3:\d+: .*hung up.* token is wrong"):
        connect(wrong, 10.0)
    accepting.join()


def test_a_listener_without_the_token_is_refused():
    """Also one that sends back the caller's own proof."""
    with socket.create_server(("127.0.0.3", 0)) as server:
        address = Address("127.0.0.3", server.getsockname()[1], "secret")

        def echo():
            connection, _ = server.accept()
            connection.sendall(b"eRL1" + bytes(32))
            connection.sendall(connection.recv(64, socket.MSG_WAITALL)[32:])
            connection.close()

        in_background(echo)
        with pytest.raises(LineError, match="does not have the token of this run"):
            connect(address, 10.0)


def test_another_service_is_refused():
    with socket.create_server(("127.0.0.3", 0)) as server:
        in_background(lambda: server.accept()[0].sendall(b"HTTP/1.1 400 Bad Request" + bytes(99)))
        with pytest.raises(LineError, match="is not embodyrl"):
            connect(Address("127.0.0.3", server.getsockname()[1], "secret"), 10.0)


def test_strangers_neither_block_others_nor_stay(listener, monkeypatch):
    monkeypatch.setattr(lines, "OPENING_S", 2.0)
    silent, garbage, gone = plain(listener), plain(listener), plain(listener)
    garbage.sendall(os.urandom(64))
    gone.close()
    start = time.monotonic()
    with opened(listener) as (caller, accepted), caller, accepted:
        assert time.monotonic() - start < 2.0
        assert garbage.recv(99, socket.MSG_WAITALL)[:4] == b"eRL1"  # then it was hung up on
    with pytest.raises(LineTimeout, match="nobody opened a line to 127"):
        listener.accept(2.5)
    assert len(silent.recv(99, socket.MSG_WAITALL)) == 36
    silent.close()
    garbage.close()


def test_many_strangers_use_up_nothing(listener, monkeypatch):
    monkeypatch.setattr(lines, "_MAX_STRANGERS", 4)
    strangers = [plain(listener) for _ in range(8)]
    with opened(listener) as (caller, accepted), caller, accepted:
        assert len(listener._strangers) <= 4
    for stranger in strangers:
        stranger.close()


def test_nobody_listens():
    with Listener("127.0.0.3") as listener:
        address = listener.address
    with pytest.raises(LineLost, match=r"cannot open a line to 127\.0\.0\.3:\d+: Connection refused"):
        connect(address, 5.0)


def test_what_fails_while_a_line_is_opened_is_tried_again(listener, monkeypatch):
    """No listener yet, a hang-up before the greeting, a caller without files: all may pass."""
    refused = [ConnectionRefusedError(111, "refused"), OSError(24, "too many files"), None]
    really = socket.create_connection

    def create(*given, **options):
        if refused and (error := refused.pop(0)) is not None:
            raise error
        if not hung_up:
            mine, other = socket.socketpair()
            hung_up.append(other.close())
            return mine
        return really(*given, **options)

    hung_up = []
    monkeypatch.setattr(socket, "create_connection", create)
    with opened(listener) as (caller, accepted), caller, accepted:
        assert hung_up and not refused
        accepted.send({"here": 1}, timeout_s=5)
        assert caller.receive(timeout_s=5) == ({"here": 1}, [])


def test_a_listener_that_does_not_answer(listener):
    start = time.monotonic()
    with pytest.raises(LineTimeout, match=r"127\.0\.0\.3:\d+ did not open a line within 0\.3 s"):
        connect(listener.address, 0.3)
    assert time.monotonic() - start < 10.0


def test_closing_a_listener_ends_accept(listener):
    accepting = in_background(lambda: refuses(listener, LineLost, None))
    time.sleep(0.1)
    listener.close()
    accepting.join(5)
    assert not accepting.is_alive()


# ---- frames


def test_headers_and_buffers_arrive(pair):
    caller, accepted = pair
    half = np.arange(6, dtype=np.float16).reshape(2, 3)
    caller.send(
        {"ask": ["ä", 1, None]}, [half, b"abc", b"", np.zeros((0, 3)), np.float32(7.0).reshape(())], timeout_s=5
    )
    header, buffers = accepted.receive(timeout_s=5)
    assert header == {"ask": ["ä", 1, None]}
    np.testing.assert_array_equal(np.frombuffer(buffers[0], np.float16).reshape(2, 3), half)
    assert [bytes(each) for each in buffers[1:]] == [b"abc", b"", b"", struct.pack("f", 7.0)]
    accepted.send({}, timeout_s=5)
    assert caller.receive(timeout_s=5) == ({}, [])


def test_many_megabytes_travel_both_ways_at_once(pair):
    """Into memory of the receiver's choice, in more pieces than a system call takes."""
    sent = np.random.default_rng(0).integers(0, 256, (3000, 1 << 14), np.uint8)
    landed = [np.zeros_like(sent) for _ in pair]

    def exchange(line, memory):
        sender = in_background(lambda: line.send({"rows": 3000}, list(sent), timeout_s=30))
        header, views = line.receive(timeout_s=30, room=lambda header, sizes: list(memory))
        sender.join()
        assert header == {"rows": 3000}
        assert len(views) == 3000

    other = in_background(lambda: exchange(pair[0], landed[0]))
    exchange(pair[1], landed[1])
    other.join()
    for memory in landed:
        np.testing.assert_array_equal(memory, sent)


def test_memory_of_another_size_ends_the_line(pair):
    caller, accepted = pair
    caller.send({}, [b"abc"], timeout_s=5)
    with pytest.raises(ValueError, match="room for other sizes"):
        accepted.receive(timeout_s=5, room=lambda header, sizes: [bytearray(4)])
    with pytest.raises(LineError, match="no room for a frame"):
        accepted.receive(timeout_s=5)


def test_a_buffer_with_gaps_is_refused(pair):
    with pytest.raises(ValueError, match="not contiguous"):
        pair[0].send({}, [np.zeros((4, 4))[:, 1]], timeout_s=5)


def test_a_huge_header_is_refused_on_both_sides(pair):
    caller, accepted = pair
    with pytest.raises(ValueError, match="is too large"):
        caller.send({"text": "x" * lines.MAX_HEADER}, timeout_s=5)
    caller._socket.send(lines._PREFIX.pack(b"eRL1", 0, lines.MAX_HEADER + 1, 0))
    with pytest.raises(LineError, match="sent what is no frame"):
        accepted.receive(timeout_s=5)


PREFIX = lines._PREFIX.pack


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "is no frame"),
        (PREFIX(b"eRL1", 9, 2, 0) + b"{}", "is no frame"),
        (PREFIX(b"eRL1", 0, 2, 1 << 20) + b"{}", "is no frame"),
        (PREFIX(b"eRL1", 0, 2, 0) + b"[]", "no JSON object"),
        (PREFIX(b"eRL1", 0, 2, 0) + b"\xff{", "no JSON object"),
        (PREFIX(b"eRL1", 0, 100000, 0) + b"[" * 100000, "no JSON object"),
        (PREFIX(b"eRL1", 0, 2, 1) + struct.pack("<Q", 1 << 62) + b"{}", "announced 4611686018427387904 bytes"),
    ],
)
def test_garbage_ends_the_line(pair, data, message):
    caller, accepted = pair
    caller._socket.send(data)
    with pytest.raises(LineError, match=message) as caught:
        accepted.receive(timeout_s=5)
    assert accepted.name in str(caught.value)
    with pytest.raises(LineError, match=message):
        accepted.send({}, timeout_s=5)
    with pytest.raises(LineLost, match=f"{caller.name} is gone"):
        caller.receive(timeout_s=5)


def test_a_cut_in_the_middle_of_a_buffer(pair):
    caller, accepted = pair
    caller._socket.send(PREFIX(b"eRL1", 0, 2, 1) + struct.pack("<Q", 100) + b"{}half of it")
    caller.close()
    with pytest.raises(LineLost, match=f"{accepted.name} is gone: it closed the line"):
        accepted.receive(timeout_s=5)


def test_deadlines(pair):
    caller, accepted = pair
    assert not accepted.wait(0.1)
    start = time.monotonic()
    with pytest.raises(LineTimeout, match=f"{caller.name} did not take what was sent within 0.3 s"):
        caller.send({}, [np.zeros(1 << 26, np.uint8)], timeout_s=0.3)
    assert time.monotonic() - start < 10.0
    assert accepted.wait(5)
    with pytest.raises(LineLost):
        accepted.receive(timeout_s=5)  # half of it came
    with pytest.raises(LineTimeout):
        caller.send({}, timeout_s=5)


def test_an_answer_that_does_not_come(pair):
    start = time.monotonic()
    with pytest.raises(LineTimeout, match=f"{pair[0].name} did not answer within 0.3 s"):
        pair[0].ask({}, timeout_s=0.3)
    assert time.monotonic() - start < 10.0


def test_a_side_that_is_busy_is_not_gone(pair, monkeypatch):
    """It has not read for longer than a machine may be silent, and its window is full."""
    monkeypatch.setattr(lines, "GONE_S", 0.5)
    caller, accepted = pair
    sender = in_background(lambda: caller.send({}, [np.ones(1 << 26, np.uint8)], timeout_s=30))
    time.sleep(2.5)
    _, [data] = accepted.receive(timeout_s=30)
    sender.join()
    assert np.frombuffer(data, np.uint8).all()


VANISHES = """
import fcntl, socket, struct, subprocess, sys, threading, time
from embodyrl.placement.transport import line as lines

def loopback(up):
    with socket.socket() as any:
        fcntl.ioctl(any, 0x8914, struct.pack("16sh14x", b"lo", 0x49 if up else 0x48))

loopback(True)
listener = lines.Listener("127.0.0.1")
found = []
thread = threading.Thread(target=lambda: found.append(listener.accept(10)))
thread.start()
caller = lines.connect(listener.address, 10)
thread.join()
if sys.argv[1] == "asked":
    lines.GONE_S = 2.0
loopback(False)
start = time.monotonic()
try:
    if sys.argv[1] == "asked":
        caller.send({}, timeout_s=5)
    caller.receive(timeout_s=40)
except lines.LineLost as error:
    print(f"{time.monotonic() - start:.1f} {error}")
"""


@pytest.mark.parametrize("when", ["asked", pytest.param("idle", marks=pytest.mark.slow)])
def test_a_machine_that_vanishes_is_noticed(when):
    """Its network goes away: no end of the connection ever arrives."""
    inside = [shutil.which("unshare") or "unshare", "-n" if os.getuid() == 0 else "-rn"]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are not available here")
    command = [*inside, sys.executable, "-c", VANISHES, when]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert "is gone: " in said.stdout, said.stderr
    assert float(said.stdout.split()[0]) < 12.0


# ---- services


def squares(header, buffers):
    if header["number"] < 0:
        raise ValueError("it is negative")
    return {"number": header["number"] ** 2}, buffers


@pytest.fixture
def service():
    with Service(Listener("127.0.0.3"), squares, timeout_s=10.0) as running:
        yield running


def test_two_clients_at_once(service):
    data = [np.full(1 << 20, number, np.uint8) for number in range(2)]
    with connect(service.address, 5) as first, connect(service.address, 5) as second:
        for _ in range(10):
            for number, line in enumerate((first, second)):
                line.send({"number": number + 2}, [data[number]], timeout_s=5)
            for number, line in enumerate((first, second)):
                header, [back] = line.receive(timeout_s=5)
                assert header == {"number": (number + 2) ** 2}
                np.testing.assert_array_equal(back, data[number])


def test_a_request_that_fails_does_not_end_the_line(service):
    with connect(service.address, 5) as line:
        with pytest.raises(LineError, match=f"{line.name} could not answer: ValueError: it is negative"):
            line.ask({"number": -1}, timeout_s=5)
        assert line.ask({"number": 3}, timeout_s=5) == ({"number": 9}, [])


def test_garbage_from_one_client_leaves_the_others_alone(service):
    with connect(service.address, 5) as good, connect(service.address, 5) as bad:
        bad._socket.send(os.urandom(1000))
        with pytest.raises(LineLost):
            bad.receive(timeout_s=5)
        assert good.ask({"number": 3}, timeout_s=5)[0] == {"number": 9}


def test_a_service_that_has_no_file_or_thread_left_accepts_lines_again(service, monkeypatch):
    """It lacks them for a while: the next lines are those of callers who wait meanwhile."""
    accept, start, lacking = service._listener._socket.accept, service._start, ["files"] * 3 + ["threads"]

    class Short:
        def __getattr__(self, name):
            return getattr(real, name)

        def accept(self):
            if lacking[:1] == ["files"]:
                lacking.pop(0)
                raise OSError(errno.EMFILE, "Too many open files")
            return accept()

    def starting(target, *given):
        if lacking[:1] == ["threads"]:
            lacking.pop(0)
            raise RuntimeError("can't start new thread")
        return start(target, *given)

    real = service._listener._socket
    monkeypatch.setattr(service._listener, "_socket", Short())
    monkeypatch.setattr(service, "_start", starting)
    first = connect(service.address, 5)
    with first, pytest.raises(LineLost):
        first.ask({"number": 3}, timeout_s=5)
    with connect(service.address, 5) as line:
        assert line.ask({"number": 3}, timeout_s=5)[0] == {"number": 9}
    assert not lacking


def test_a_closed_service_leaves_nothing(service):
    def held():
        return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())

    service.close()
    before = held()
    other = Service(Listener("127.0.0.3"), squares, timeout_s=10.0)
    stranger = socket.create_connection((other.address.host, other.address.port))
    with connect(other.address, 5) as line, connect(other.address, 5):
        line.ask({"number": 3}, timeout_s=5)
        other.close()
        other.close()
        with pytest.raises(LineLost, match="is gone"):
            line.ask({"number": 3}, timeout_s=5)
    stranger.close()
    assert held() == before
