"""A policy behind a WebSocket, asked by clients that are many, slow, wrong or gone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets: pip install 'embodyrl[serve]'")
pytest.importorskip("msgpack", reason="needs msgpack: pip install 'embodyrl[serve]'")

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

import embodyrl
from embodyrl.messages import pack, unpack
from embodyrl.rollout.action_queue import ActionQueue
from embodyrl.serving import server as serving

Start = Callable[..., embodyrl.PolicyServer]


def observation(number: int) -> dict[str, Any]:
    """A state unlike any other."""
    angle = 0.1 * number
    return {"observation/state": np.array([np.cos(angle), np.sin(angle), 0.01 * number], np.float32)}


def ask(client: ClientConnection, message: dict[str, Any]) -> dict[str, Any]:
    """The answer to a message."""
    client.send(pack(message, bytes_keys=True))
    answer = client.recv(timeout=20)
    assert isinstance(answer, bytes), answer
    return unpack(answer)


def acting(policy: embodyrl.LoadedPolicy, number: int) -> np.ndarray:
    """What the policy does by itself."""
    state = observation(number)["observation/state"]
    return policy.act(embodyrl.Observation(proprio=state[None], task_descriptions=["swing up"]))[0]


def test_a_client_gets_what_the_policy_does_bit_for_bit(server: Start, policy: embodyrl.LoadedPolicy) -> None:
    there = server()
    with connect(there.url, compression=None) as client:
        told = unpack(client.recv(timeout=20))
        assert (told["chunk_size"], told["action_dim"], told["state_dim"]) == (3, 1, 3) and told["model"] == "mlp"
        for number in range(5):
            answer = ask(client, observation(number))
            assert np.array_equal(answer["actions"], acting(policy, number)) and answer["actions"].shape == (3, 1)
            assert answer["server_timing"]["infer_ms"] > 0 and ("prev_total_ms" in answer["server_timing"]) == (
                number > 0
            )
    assert there.figures.requests == 5


def test_sixteen_clients_at_once_get_each_their_own(server: Start, policy: embodyrl.LoadedPolicy) -> None:
    there, wrong = server(wait_ms=5.0), list[Any]()

    def play(number: int) -> None:
        try:
            with connect(there.url, compression=None) as client:
                client.recv(timeout=20)
                for step in range(25):
                    mine = 100 * number + step
                    found, wanted = ask(client, observation(mine))["actions"], acting(policy, mine)
                    if not np.allclose(found, wanted, atol=1e-6, rtol=1e-5):
                        wrong.append((number, step))
        except Exception as error:
            wrong.append(error)

    clients = [threading.Thread(target=play, args=(number,)) for number in range(16)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(60)
    assert not wrong and there.figures.requests == 16 * 25
    assert there.figures.batches < 16 * 25 / 2, "requests within a few milliseconds are one batch"
    deadline = time.monotonic() + 10
    while there.clients and time.monotonic() < deadline:
        time.sleep(0.01)
    assert there.clients == 0


def test_a_benchmark_gets_one_action_for_each_observation(server: Start, policy: embodyrl.LoadedPolicy) -> None:
    """Of vla-eval: chunks are executed to their end, and forgotten where an episode ends."""
    there = server(protocol="vla-eval")
    with connect(there.url, compression=None) as client:

        def say(kind: str, seq: int, payload: dict[str, Any]) -> None:
            client.send(pack({"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0}, bytes_keys=False))

        def hear(kind: str, seq: int) -> dict[str, Any]:
            answer = unpack(client.recv(timeout=20))
            assert (answer["type"], answer["seq"]) == (kind, seq) and answer["timestamp"] > 0
            return answer["payload"]

        say("hello", 1, {"harness_version": "0.8.0", "protocol_version": 1})
        told = hear("hello", 1)
        assert told["protocol_version"] == 1
        assert told["observation_params"] == {"send_wrist_image": False, "send_state": True}
        for episode, seq in ((1, 10), (2, 20)):
            say("episode_start", seq, {"task": {"name": "x"}})
            for step in range(4):
                number = 10 * episode + step
                sent = {"states": observation(number)["observation/state"], "task_description": "swing up"}
                say("observation", seq + 1 + step, sent)
                chunk = acting(policy, 10 * episode + (3 if step == 3 else 0))
                assert np.array_equal(hear("action", seq + 1 + step)["actions"], chunk[step % 3])
            say("episode_end", seq + 9, {"success": False})
        say("observation", 30, {"task_description": "swing up"})
        assert "the state is missing" in hear("error", 30)["error"]
        say("dance", 31, {})
        assert "messages of the type 'dance' are unknown" in hear("error", 31)["error"]


def test_what_is_drawn_depends_on_seed_client_and_episode_alone(server: Start) -> None:
    there = server(sample=True, seed=7)

    def drawn(client: int, episodes: list[int]) -> list[float]:
        found = []
        with connect(f"{there.url}/?client={client}", compression=None) as connection:
            connection.recv(timeout=20)
            for episode in episodes:
                for _ in range(2):
                    answer = ask(connection, observation(1) | {"episode": episode})
                    found.append(float(answer["actions"][0, 0]))
        return found

    first, again, other = drawn(3, [0, 1]), drawn(3, [0, 1]), drawn(4, [0])
    assert first == again and len({*first, *other}) == 6
    assert drawn(3, [1]) == first[2:], "an episode's numbers do not depend on the one before"
    plain = server()
    with connect(plain.url) as client:
        client.recv(timeout=20)
        one, two = (ask(client, observation(1))["actions"] for _ in range(2))
        assert np.array_equal(one, two)
        client.send(pack(observation(1) | {"episode": -1}, bytes_keys=True))
        assert client.recv(timeout=20) == "episode is -1: want a whole number, 0 or more"


def test_a_benchmark_gets_the_actions_of_an_evaluation(run: Path) -> None:
    """Of vla-eval, for a policy that decides within chunks, late, and averages them."""
    words = ["eval.actions=1", "eval.ensemble=0.3", "eval.delay=1", "rollout.chunk_size=3"]
    policy = embodyrl.load_policy(run, words)
    queue = ActionQueue(1, 3, 1, 0.3, executed=1, delay=1)
    with embodyrl.serve(policy, port=0, protocol="vla-eval") as there, connect(there.url, compression=None) as client:
        for episode in range(2):
            client.send(pack(_said("episode_start", {}), bytes_keys=False))
            queue.begin(np.zeros(1, np.int64))
            for step in range(4):
                number = 10 * episode + step
                seen = {"states": observation(number)["observation/state"]}
                client.send(pack(_said("observation", seen), bytes_keys=False))
                found = unpack(client.recv(timeout=20))["payload"]["actions"]
                wanted = queue.act(np.zeros(1, np.int64), acting(policy, number)[None])[0, 0]
                assert np.array_equal(found, wanted)
            client.send(pack(_said("episode_end", {}), bytes_keys=False))


def test_an_episode_that_nobody_ended_is_over_when_the_next_begins(server: Start) -> None:
    """Of vla-eval: what is drawn is that of another episode, and the same again for another client of this name."""

    def drawn() -> list[float]:
        found = []
        with connect(there.url, compression=None) as client:
            for _ in range(2):
                client.send(pack(_said("episode_start", {}), bytes_keys=False))
                seen = {"states": observation(1)["observation/state"]}
                client.send(pack(_said("observation", seen), bytes_keys=False))
                found.append(float(unpack(client.recv(timeout=20))["payload"]["actions"][0]))
        return found

    there = server(protocol="vla-eval", sample=True)
    first = drawn()
    assert first[0] != first[1] and drawn() == first


def _said(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "payload": payload, "seq": 1, "timestamp": 0.0}


def test_what_cannot_be_answered_is_said_and_the_next_one_is_answered(server: Start) -> None:
    there = server()
    with connect(there.url) as client:
        client.recv(timeout=20)
        for data, said in (
            (
                pack({"prompt": "x"}, bytes_keys=True),
                "the state is missing: it is looked for under 'observation/state'",
            ),
            (pack({"state": [1.0]}, bytes_keys=True), "state has 1 numbers, but the policy sees 3"),
            (b"\xc1", "this is no msgpack message that can be read"),
            ("hello", "this is a text: send msgpack"),
        ):
            client.send(data)
            answer = client.recv(timeout=20)
            assert isinstance(answer, str) and said in answer
        assert ask(client, observation(1))["actions"].shape == (3, 1)
        with pytest.raises(ConnectionClosed, match="10 refused messages in a row"):
            for _ in range(serving.IN_A_ROW + 1):
                client.send(b"\xc1")
                client.recv(timeout=20)
    assert there.figures.refused == 4 + serving.IN_A_ROW


def test_a_message_that_is_too_large_is_not_read(server: Start) -> None:
    there = server()
    with connect(there.url, compression=None) as client, pytest.raises(ConnectionClosed, match="1009"):
        client.recv(timeout=20)
        client.send(bytes(serving.SMALLEST_LIMIT + 1))
        client.recv(timeout=20)
    with connect(there.url) as client:
        client.recv(timeout=20)
        assert ask(client, observation(1))["actions"].shape == (3, 1)


def test_only_who_knows_the_token_may_ask(server: Start) -> None:
    there = server(token="swordfish")
    for headers in ({}, {"Authorization": "Api-Key swordfis"}, {"Authorization": "Api-Key swordfishh"}):
        with pytest.raises(InvalidStatus, match="401"), connect(there.url, additional_headers=headers):
            pass
    with connect(there.url, additional_headers={"Authorization": "Api-Key swordfish"}) as client:
        client.recv(timeout=20)
        assert ask(client, observation(1))["actions"].shape == (3, 1)
    with urllib.request.urlopen(there.url.replace("ws:", "http:") + "/healthz", timeout=20) as answer:
        assert answer.status == 200 and answer.read() == b"OK\n"


def test_clients_that_come_and_go_and_say_nothing_leave_nothing(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_CLIENTS", 3)
    there = server()
    for number in range(20):  # half-open handshakes, halves of messages, and clients that do not wait for an answer
        raw = socket.create_connection(("127.0.0.1", there.port), timeout=10)
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" if number % 2 else b"\x16\x03\x01")
        raw.close()
        with connect(there.url) as client:
            client.send(pack(observation(number), bytes_keys=True))
            client.socket.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 20
    while there.clients and time.monotonic() < deadline:
        time.sleep(0.01)
    with ExitStack() as clients:
        three = [clients.enter_context(connect(there.url)) for _ in range(3)]
        for client in three:
            client.recv(timeout=20)
        with pytest.raises(InvalidStatus, match="503"):
            clients.enter_context(connect(there.url))
        assert ask(three[0], observation(1))["actions"].shape == (3, 1)


def test_a_policy_that_fails_fails_one_request(
    server: Start, policy: embodyrl.LoadedPolicy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = policy.decide

    def decide(observation: embodyrl.Observation, **options: Any) -> Any:
        if observation.proprio is not None and observation.proprio[0, 2] == 13.0:
            raise RuntimeError("a kernel failed")
        return whole(observation, **options)

    monkeypatch.setattr(policy, "decide", decide)
    there = server()
    with connect(there.url) as client:
        client.recv(timeout=20)
        client.send(pack({"state": [1.0, 0.0, 13.0]}, bytes_keys=True))
        assert client.recv(timeout=20) == "a kernel failed"
        assert ask(client, observation(1))["actions"].shape == (3, 1)
    assert "a request failed: RuntimeError: a kernel failed" in capsys.readouterr().out


def test_what_cannot_be_served_is_refused_before_anything_listens(
    server: Start, policy: embodyrl.LoadedPolicy, run: Path
) -> None:
    for options, message in (
        ({"protocol": "openpy"}, "protocol 'openpy' is unknown - did you mean 'openpi'?"),
        ({"max_batch": 0}, "max_batch = 0: want 1 .. 1024"),
        ({"token": " "}, "the token is empty"),
        ({"keys": {"camera": "x"}}, "--map camera=...: the policy sees no 'camera'"),
    ):
        with pytest.raises(embodyrl.UserError, match=re.escape(message)):
            embodyrl.serve(policy, **options)  # type: ignore[arg-type]
    taken = server()
    with (
        pytest.raises(embodyrl.RunError, match=f"cannot listen at 127.0.0.1:{taken.port}: .* choose another --port"),
        embodyrl.serve(run, port=taken.port),
    ):
        pass


def test_the_command_line_serves_until_it_is_told_to_end(run: Path) -> None:
    command = [sys.executable, "-m", "embodyrl", "serve", str(run), "--port", "0", "--map", "state=robot/q"]
    surroundings = {**os.environ, "EMBODYRL_TOKEN": "t"}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings) as program,
        ExitStack() as ended,
    ):
        assert program.stdout is not None
        ended.callback(program.kill)  # before it is waited for, if something is wrong
        said: list[str] = []
        while not said or not said[-1].startswith("Ctrl-C ends it"):
            said.append(program.stdout.readline())
            assert said[-1], said
        url = re.search(r"ws://127.0.0.1:\d+", "".join(said))
        assert url is not None and re.search(r"state +3 numbers: robot/q\n", "".join(said))
        with connect(url[0], additional_headers={"Authorization": "Bearer t"}) as client:
            client.recv(timeout=20)
            answer = ask(client, {"robot": {"q": [1.0, 0.0, 0.0]}})
            assert answer["actions"].shape == (3, 1)
            program.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed):
                client.recv(timeout=20)
        assert program.wait(20) == 0
        assert re.search(r"served 1 request in \d+ s\n", program.stdout.read())
