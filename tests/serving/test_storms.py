"""A policy server under load and abuse: what clients hold of it has limits, and whoever behaves is answered."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import random
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

pytest.importorskip("websockets", reason="needs websockets: pip install 'embodyrl[serve]'")
pytest.importorskip("msgpack", reason="needs msgpack: pip install 'embodyrl[serve]'")

import programs
from programs import children_of
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

import embodyrl
from embodyrl.messages import pack, unpack
from embodyrl.serving import batching, crowd
from embodyrl.serving import server as serving

Start = Callable[..., embodyrl.PolicyServer]
MIB = 2**20
MOST_MIB = 400.0
"""MiB that nothing that strangers send may add to a server: 16 messages of 8 MiB, copies of them, and pieces that are
on their way to somebody who is gone."""
PING, TEXT, BYTES, MORE = 9, 1, 2, 0
SLOW = """
import runpy, time
from embodyrl.runner.playing import LoadedPolicy
whole = LoadedPolicy.decide
def decide(*args, **options):
    print("acting", flush=True)
    time.sleep(0.7)
    return whole(*args, **options)
LoadedPolicy.decide = decide
runpy.run_module("embodyrl", run_name="__main__")
"""


def state(number: int) -> bytes:
    """A message with a state unlike any other."""
    angle = 0.1 * number
    return pack({"state": np.array([np.cos(angle), np.sin(angle), 0.01 * number], np.float32)}, bytes_keys=True)


def ask(client: ClientConnection, message: bytes) -> np.ndarray:
    """The chunk that is the answer to a message."""
    client.send(message)
    answer = client.recv(timeout=30)
    assert isinstance(answer, bytes), answer
    chunk: np.ndarray = unpack(answer)["actions"]
    return chunk


def joined(url: str) -> ClientConnection:
    """A client that has read what the server says first."""
    with ExitStack() as stack:
        client = stack.enter_context(connect(url, compression=None, ping_interval=None, open_timeout=30))
        client.recv(timeout=30)
        stack.pop_all()
    return client


def frame(kind: int, data: bytes, *, last: bool = True, declared: int | None = None) -> bytes:
    """A frame as a client sends it, which may say that it is longer than it is."""
    size = len(data) if declared is None else declared
    if size < 126:
        length = bytes([0x80 | size])
    else:
        length = b"\xfe" + struct.pack(">H", size) if size < 2**16 else b"\xff" + struct.pack(">Q", size)
    return bytes([0x80 * last | kind]) + length + bytes(4) + data


def raw(port: int, then: bytes = b"") -> socket.socket:
    """A connection that has shaken hands, but is no client; what comes `then` is sent."""
    tcp = socket.create_connection(("127.0.0.1", port), timeout=30)
    key = base64.b64encode(os.urandom(16))
    tcp.sendall(
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: " + key + b"\r\n\r\n"
    )
    said = b""
    while b"\r\n\r\n" not in said:
        piece = tcp.recv(1)
        assert piece, said
        said += piece
    tcp.sendall(then)
    return tcp


def ended(tcp: socket.socket, within: float = 10.0) -> bool:
    """Whether the server drops a connection, after whatever it says."""
    until = time.monotonic() + within
    with contextlib.suppress(ConnectionError):
        while True:
            tcp.settimeout(max(until - time.monotonic(), 0.01))
            try:
                if not tcp.recv(2**16):
                    break
            except TimeoutError:
                return False
    return True


def image_bomb(images: int) -> bytes:
    """A message of a few kilobytes with images that take 48 MiB each."""
    file = io.BytesIO()
    Image.new("1", (4096, 4096)).save(file, "png")
    entry = {"__image__": True, "format": "png", "data": file.getvalue()}
    return pack({f"image {number}": entry for number in range(images)}, bytes_keys=False)


@contextmanager
def served(run: Path, *words: str) -> Iterator[tuple[programs.Program, int]]:
    """A server in a process of its own, and its port."""
    command = [*(words or ("-m", "embodyrl")), "serve", str(run), "--port", "0"]
    with programs.Program(command, stdout=subprocess.PIPE, text=True) as program, ExitStack() as stack:
        stack.callback(program.kill)
        assert program.stdout is not None
        said = ""
        while "Ctrl-C ends it" not in said:
            line = program.stdout.readline()
            assert line, said
            said += line
        found = re.search(r"ws://127.0.0.1:(\d+)", said)
        assert found is not None
        yield program, int(found[1])


class Watch:
    """Measures the memory of a process until the end of a `with` block."""

    def __init__(self, pid: int) -> None:
        self._process, self._end = psutil.Process(pid), threading.Event()
        self.mib = [self.now()]
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def now(self) -> float:
        """MiB that it has."""
        return float(self._process.memory_info().rss / MIB)

    def _measure(self) -> None:
        while not self._end.wait(0.02):
            self.mib.append(self.now())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join(20)


# ---- many clients


@pytest.mark.parametrize(
    "seconds", [1.0, pytest.param(120.0, marks=pytest.mark.by_hand(reason="two minutes of two cores"))]
)
def test_sixteen_clients_get_what_each_gets_alone_and_the_server_does_not_grow(seconds: float, run: Path) -> None:
    with served(run) as (program, port):
        url = f"ws://127.0.0.1:{port}"
        with joined(url) as alone:
            wanted = [ask(alone, state(number)) for number in range(16 * 8)]
        wrong, answered = list[object](), [0] * 16
        until = time.monotonic() + seconds

        def talk(number: int) -> None:
            try:
                with joined(url) as client:
                    while time.monotonic() < until:
                        mine = 8 * number + answered[number] % 8
                        if not np.allclose(ask(client, state(mine)), wanted[mine], rtol=0.0, atol=1e-6):
                            wrong.append((number, answered[number]))
                        answered[number] += 1
            except Exception as error:
                wrong.append(error)

        with Watch(program.pid) as memory:
            clients = [threading.Thread(target=talk, args=(number,)) for number in range(16)]
            for each in clients:
                each.start()
            for each in clients:
                each.join(seconds + 60)
        assert not wrong and min(answered) > 3
        fifths = [max(part) for part in np.array_split(memory.mib, 5)]
        print(f"{sum(answered)} answers; MiB: {memory.mib[0]:.1f}, then {[float(round(each, 1)) for each in fifths]}")
        assert fifths[-1] < fifths[1] + 4.0 and fifths[-1] < memory.mib[0] + 64.0


# ---- abuse


def half_closed(port: int, data: bytes) -> None:
    """Send something and go without waiting."""
    with closing(raw(port, data)):
        pass


def tcp_only(port: int, data: bytes) -> None:
    """Send what is no request for a WebSocket."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as tcp:
        tcp.sendall(data)


def refused(port: int, message: bytes, kind: int = BYTES) -> None:
    """Send a message that cannot be answered, and read what the server says, be it a farewell."""
    with closing(raw(port, frame(kind, message))) as tcp:
        tcp.settimeout(60)
        with contextlib.suppress(ConnectionError):
            while tcp.recv(2**16):
                tcp.sendall(frame(8, b"\x03\xe8"))


def drip(port: int, data: bytes) -> None:
    """Send a byte at a time."""
    with closing(raw(port)) as tcp:
        for number in range(len(data)):
            tcp.sendall(data[number : number + 1])
            time.sleep(0.002)


def abuses(draw: random.Random) -> list[tuple[str, Callable[[int], None]]]:
    """One of each kind of what strangers may send, by a name."""
    junk = draw.randbytes(draw.randint(1, 400))
    array = {"__ndarray__": True, "data": b"", "dtype": "<f4", "shape": [2**62, 2**62]}
    deep = b"\x81\xa1a" * 900 + b"\xc0"
    half = frame(BYTES, bytes(draw.randint(1, 8 * MIB - 1)), declared=8 * MIB)
    lists = b"\x81\xa1a\xdd" + struct.pack(">I", 2**32 - 1)
    numbers = [draw.choice([float("nan"), float("inf"), 1e300]), 0.0, 0.0]
    return [
        ("no HTTP", lambda port: tcp_only(port, junk + b"\r\n\r\n")),
        ("a long line", lambda port: tcp_only(port, b"GET /" + b"x" * 20_000)),
        ("half a handshake", lambda port: tcp_only(port, b"GET / HTTP/1.1\r\nHost: x\r\n")),
        ("another method", lambda port: tcp_only(port, b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")),
        ("frames of junk", lambda port: half_closed(port, junk)),
        ("no mask", lambda port: half_closed(port, b"\x82\x05hello")),
        ("a declared size", lambda port: half_closed(port, frame(BYTES, b"x", declared=2**62))),
        ("too large", lambda port: half_closed(port, frame(BYTES, b"x" * 100, declared=8 * MIB + 1))),
        ("killed in a message", lambda port: half_closed(port, half)),
        (
            "fragments",
            lambda port: half_closed(port, frame(BYTES, b"", last=False) + frame(MORE, b"", last=False) * 99),
        ),
        ("pings", lambda port: half_closed(port, frame(PING, b"x" * 125) * 300)),
        ("a byte at a time", lambda port: drip(port, state(1)[:40])),
        ("a text", lambda port: refused(port, b"hello", TEXT)),
        ("no UTF-8", lambda port: refused(port, b"\xff\xfe", TEXT)),
        ("junk", lambda port: refused(port, junk)),
        ("cut off", lambda port: refused(port, state(1)[: draw.randint(0, 60)])),
        ("nested deeply", lambda port: refused(port, deep)),
        ("lists that are promised", lambda port: refused(port, lists)),
        ("a giant shape", lambda port: refused(port, pack({"state": array}, bytes_keys=False))),
        ("numbers that are none", lambda port: refused(port, pack({"state": numbers}, bytes_keys=True))),
        ("8 MiB of nothing", lambda port: refused(port, pack({"x": bytes(8 * MIB - 64)}, bytes_keys=True))),
        ("an image bomb", lambda port: refused(port, image_bomb(20))),
    ]


@pytest.mark.parametrize("messages", [44, pytest.param(2000, marks=pytest.mark.slow)])
def test_abuse_ends_neither_the_server_nor_a_client_that_behaves(messages: int, run: Path) -> None:
    """The larger one takes half a minute of CPU time: it is a storm."""
    draw, failed = random.Random(5), list[str]()
    with served(run) as (program, port), joined(f"ws://127.0.0.1:{port}") as good:
        wanted, longest = ask(good, state(3)), 0.0
        stop = threading.Event()

        def behave() -> None:
            nonlocal longest
            while not stop.wait(0.02):
                begun = time.monotonic()
                if not np.array_equal(ask(good, state(3)), wanted):
                    failed.append("the good client got another answer")
                longest = max(longest, time.monotonic() - begun)

        thread = threading.Thread(target=behave)
        thread.start()
        with Watch(program.pid) as memory:
            sent = 0
            while sent < messages:
                for name, abuse in abuses(draw):
                    try:
                        abuse(port)
                    except ConnectionError:
                        pass  # it was dropped in the middle of what it sent
                    except Exception as error:
                        failed.append(f"{name}: {error!r}")
                    sent += 1
        stop.set()
        thread.join(60)
        assert not failed and not thread.is_alive() and program.poll() is None
        with joined(f"ws://127.0.0.1:{port}") as another:
            assert np.array_equal(ask(another, state(3)), wanted)
        print(f"MiB: {memory.mib[0]:.1f}, at most {max(memory.mib):.1f}, then {memory.now():.1f}; {longest:.3f} s")
        assert max(memory.mib) < memory.mib[0] + MOST_MIB
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == 0


@pytest.mark.slow
def test_64_clients_with_messages_of_the_largest_size_take_no_more_memory_than_there_may_be(run: Path) -> None:
    """Sends a gigabyte, of which the server keeps an eighth."""
    whole = frame(BYTES, pack({"state": [1.0, 0.0, 0.0], "x": bytes(8 * MIB - 400)}, bytes_keys=True))
    with served(run) as (program, port), joined(f"ws://127.0.0.1:{port}") as good, Watch(program.pid) as memory:
        for data in (whole[:-1], whole * 2):

            def flood(data: bytes = data) -> None:
                with closing(raw(port)) as tcp, contextlib.suppress(OSError):
                    tcp.settimeout(5)
                    tcp.sendall(data)
                    time.sleep(1.0)

            floods = [threading.Thread(target=flood) for _ in range(63)]
            for each in floods:
                each.start()
            while any(each.is_alive() for each in floods):
                ask(good, state(1))
                time.sleep(0.05)
        print(f"MiB: {memory.mib[0]:.1f}, at most {max(memory.mib):.1f}, then {memory.now():.1f}")
        assert max(memory.mib) < memory.mib[0] + MOST_MIB


def test_connections_that_say_nothing_keep_nobody_out(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "MOST_SILENT", 8)
    there = server()
    with ExitStack() as stack:
        silent = [stack.enter_context(closing(socket.create_connection(("127.0.0.1", there.port)))) for _ in range(60)]
        for number, tcp in enumerate(silent):
            if number % 2:
                with contextlib.suppress(ConnectionError):
                    tcp.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        with joined(there.url) as client:
            ask(client, state(1))
        assert all(ended(tcp) for tcp in silent[:50]), "the oldest make place"
        assert not ended(silent[-1], within=0.1)


def test_a_message_that_never_ends_is_not_waited_for(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "MESSAGE_S", 0.3)
    monkeypatch.setattr(crowd, "LOOK_S", 0.05)
    there = server()
    with joined(there.url) as idle, ExitStack() as stack:
        for data in (
            frame(BYTES, bytes(9), declared=10),
            b"\x82",
            frame(BYTES, b"x", last=False),
            frame(BYTES, state(1)) + frame(BYTES, b"x", declared=3),
        ):
            assert ended(stack.enter_context(closing(raw(there.port, data)))), data
        assert ask(idle, state(1)).shape == (3, 1), "who says nothing may stay"


def test_answers_that_nobody_reads_are_waited_with_for_a_time(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "UNREAD_S", 0.3)
    monkeypatch.setattr(crowd, "LOOK_S", 0.05)
    monkeypatch.setattr(batching.Batcher, "act", lambda *_: _chunk())
    there = server()
    with closing(raw(there.port)) as tcp:  # answers of 4 MiB fill what the system keeps
        _until(lambda: there.clients == 1)
        with contextlib.suppress(ConnectionError):
            tcp.sendall(frame(BYTES, state(1)) * 8)
        _until(lambda: there.clients == 0, within=10.0)


async def _chunk() -> np.ndarray:
    return np.zeros((MIB, 1), np.float32)


def test_pings_are_answered_as_long_as_somebody_reads_and_they_are_few(
    server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = server()
    with joined(there.url) as good, closing(raw(there.port, frame(PING, b"") * (crowd.MOST_FRAMES + 10))) as tcp:
        tcp.settimeout(20)
        said = b""
        with contextlib.suppress(ConnectionError):
            while piece := tcp.recv(2**16):
                said += piece
                if b"frames within a second" in said:
                    break
        assert b"more than 5,000 frames within a second" in said
        ask(good, state(1))
    monkeypatch.setattr(crowd, "MOST_FRAMES", 10**9)
    there = server()
    with closing(raw(there.port)) as tcp:
        tcp.settimeout(20)
        with pytest.raises(ConnectionError):
            for _ in range(1000):  # 128 MiB, of which the system keeps a few
                tcp.sendall(frame(PING, b"x" * 125) * 1000)
        _until(lambda: there.clients == 0)


def test_messages_of_all_clients_together_have_a_size(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those who hold most the largest goes, not the client that happens to send next."""
    monkeypatch.setattr(crowd, "LARGEST_AT_ONCE", 2)
    there = server()
    with joined(there.url) as good, ExitStack() as stack:
        greedy = [stack.enter_context(closing(raw(there.port))) for _ in range(5)]
        for tcp in greedy:
            tcp.sendall(frame(BYTES, bytes(6 * MIB), declared=7 * MIB))
        ask(good, state(1))
        _until(lambda: there.clients == 3)
        assert ask(good, state(1)).shape == (3, 1)
        assert not ended(greedy[-1], within=0.1) or not ended(greedy[0], within=0.1)


def test_whoever_asks_for_nothing_gives_the_place_to_another(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_CLIENTS", 3)
    monkeypatch.setattr(crowd, "IDLE_S", 0.5)
    there = server()
    with joined(there.url) as idle, joined(there.url) as one, joined(there.url) as two:
        with pytest.raises(InvalidStatus, match="503"):
            joined(there.url)
        time.sleep(0.6)
        for client in (one, two):
            ask(client, state(1))
        with joined(there.url) as late:
            with pytest.raises(ConnectionClosed, match=r"nothing came for 0.5 s, and another client waits"):
                idle.recv(timeout=20)
            with pytest.raises(InvalidStatus, match="503"):
                joined(there.url)
            for client in (one, two, late):
                assert ask(client, state(1)).shape == (3, 1)


def test_a_client_that_does_not_wait_gets_its_answers_in_order(server: Start) -> None:
    there = server()
    with joined(there.url) as client:
        wanted = [ask(client, state(number)) for number in range(40)]
        for number in range(40):
            client.send(state(number))
        for each in wanted:
            answer = client.recv(timeout=20)
            assert isinstance(answer, bytes) and np.array_equal(unpack(answer)["actions"], each)


# ---- ends


def test_clients_that_are_killed_leave_nothing(run: Path) -> None:
    with served(run) as (program, port), joined(f"ws://127.0.0.1:{port}") as good:
        ask(good, state(1))
        server = psutil.Process(program.pid)
        before = server.num_fds()
        code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_storms import *
held = [joined("ws://127.0.0.1:{port}") for _ in range(8)]
for each in held: each.send(state(1))
half = raw({port}, frame(BYTES, bytes(99), declared=100))
print("ready", flush=True)
time.sleep(60)
"""
        with programs.Program(["-c", code], stdout=subprocess.PIPE, text=True) as clients:
            assert clients.stdout is not None and clients.stdout.readline() == "ready\n"
            assert server.num_fds() >= before + 8
            clients.kill()
        _until(lambda: server.num_fds() == before)
        ask(good, state(1))
        assert not children_of(server)
        program.kill()
        program.wait(20)
        with pytest.raises(ConnectionClosed):
            good.recv(timeout=20)
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_a_request_answers_it_first(number: signal.Signals, run: Path) -> None:
    """And no other, though the client does not wait for answers."""
    with served(run, "-c", SLOW) as (program, port), joined(f"ws://127.0.0.1:{port}") as client:
        assert program.stdout is not None
        for _ in range(2):
            client.send(state(1))
        assert program.stdout.readline() == "acting\n"
        program.send_signal(number)
        answer = client.recv(timeout=20)
        assert isinstance(answer, bytes) and unpack(answer)["actions"].shape == (3, 1)
        with pytest.raises(ConnectionClosed, match="the server is ending"):
            client.recv(timeout=20)
        assert program.wait(20) == 0 and "served 1 request in" in program.stdout.read()


def test_a_policy_that_never_answers_does_not_keep_the_server_from_ending(
    server: Start, policy: embodyrl.LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "FINISH_S", 0.2)
    go_on = threading.Event()
    monkeypatch.setattr(policy, "decide", lambda *_, **__: go_on.wait(60))
    there = server()
    with joined(there.url) as client, joined(there.url) as other:
        for each in (client, other):
            each.send(state(1))
        _until(lambda: there._under_way == 2)
        there.close()
        with pytest.raises(ConnectionClosed, match=r"1001 .*the server ended before this was answered"):
            client.recv(timeout=20)
    go_on.set()


def _until(holds: Callable[[], bool], within: float = 20.0) -> None:
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)
