"""A policy that somebody else serves."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest

pytest.importorskip("websockets", reason="needs websockets: pip install 'embodyrl[serve]'")
pytest.importorskip("msgpack", reason="needs msgpack: pip install 'embodyrl[serve]'")

import embodyrl
from tests.serving.stand_in import stand_in

Start = Callable[..., embodyrl.PolicyServer]


def seen(rows: int) -> embodyrl.Observation:
    """An observation of several envs."""
    angles = 0.3 * np.arange(rows, dtype=np.float32)
    proprio = np.stack([np.cos(angles), np.sin(angles), angles], 1)
    return embodyrl.Observation(proprio=proprio, task_descriptions=["swing up"] * rows)


def test_it_acts_as_the_policy_does_here(server: Start, policy: embodyrl.LoadedPolicy) -> None:
    there = server(token="t")
    with embodyrl.RemotePolicy(there.url, token="t") as remote:
        assert remote.metadata["model"] == "mlp"
        for rows in (1, 4, 2):
            found = remote.act(seen(rows))
            assert found.dtype == np.float32 and found.shape == (rows, 3, 1)
            np.testing.assert_allclose(found, policy.act(seen(rows)), rtol=1e-5, atol=1e-6)
        assert there.clients == 4, "a connection for each row"
    assert np.array_equal(embodyrl.RemotePolicy(there.url, token="t").act(seen(1)), policy.act(seen(1)))


def test_servers_of_openpi_are_asked_by_its_keys() -> None:
    asked: list[dict[str, Any]] = []

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        asked.append(message)
        return {"actions": np.full((5, 7), message["observation/state"][0], np.float64), "server_timing": {}}

    images = np.arange(2 * 2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 2, 4, 4, 3)
    observation = embodyrl.Observation(
        images=images, proprio=np.array([[1.0] * 8, [2.0] * 8], np.float32), task_descriptions=["a", "b"]
    )
    with stand_in(answer) as url, embodyrl.RemotePolicy(url) as remote:
        found = remote.act(observation)
    assert found.shape == (2, 5, 7) and found[:, 0, 0].tolist() == [1.0, 2.0]
    asked.sort(key=lambda message: message["prompt"])
    assert [message["prompt"] for message in asked] == ["a", "b"]
    assert np.array_equal(asked[1]["observation/image"], images[1, 0])
    assert np.array_equal(asked[1]["observation/wrist_image"], images[1, 1])


def test_what_a_server_says_of_itself_is_not_believed_blindly(policy: embodyrl.LoadedPolicy) -> None:
    for told, message in (
        ({"keys": {"state": 7, "prompt": []}, "cameras": 3}, None),
        ({"cameras": ["a", "b", "c"]}, "does not say under which key it looks for 'c': name them in `keys`"),
        ({"keys": {"state": ["q+gripper"]}}, "looks for the state in parts, q+gripper"),
    ):
        with stand_in(lambda _: {"actions": np.ones((1, 1))}, told) as url:
            if message is None:
                assert embodyrl.RemotePolicy(url).act(seen(1)).shape == (1, 1, 1)
                continue
            with pytest.raises(embodyrl.UserError, match=re.escape(message)):
                embodyrl.RemotePolicy(url)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("Traceback: out of memory", "cannot answer: Traceback: out of memory"),
        (b"\xc1", "sent what cannot be read"),
        ({"actions": np.zeros(7)}, "sent actions of shape [7]: want finite [chunk, action dims]"),
        ({"actions": np.full((2, 7), np.nan)}, "want finite [chunk, action dims]"),
        ({"action": np.zeros((2, 7))}, "sent actions of shape [0]"),
    ],
)
def test_an_answer_that_is_none_is_no_action(answer: Any, message: str) -> None:
    with (
        stand_in(lambda _: answer) as url,
        embodyrl.RemotePolicy(url) as remote,
        pytest.raises(embodyrl.RunError, match=re.escape(message)),
    ):
        remote.act(seen(1))


def test_a_lost_connection_is_opened_again_within_the_deadline(server: Start, policy: embodyrl.LoadedPolicy) -> None:
    first = server()
    remote = embodyrl.RemotePolicy(first.url, deadline_s=20.0)
    wanted = remote.act(seen(2))
    first.close()
    later = threading.Timer(0.7, lambda: begun.append(embodyrl.serve(policy, port=first.port).__enter__()))
    begun: list[embodyrl.PolicyServer] = []
    later.start()
    try:
        np.testing.assert_allclose(remote.act(seen(2)), wanted, rtol=1e-5, atol=1e-6)
    finally:
        later.join()
        for each in begun:
            each.close()
        remote.close()


def test_nobody_is_waited_for_for_ever(server: Start) -> None:
    there = server(token="t")
    with pytest.raises(embodyrl.UserError, match=re.escape("want ws://host:port")):
        embodyrl.RemotePolicy("127.0.0.1:8000")
    with pytest.raises(
        embodyrl.RunError,
        match=r"wants a token \(the token is missing or another one\): set the variable EMBODYRL_TOKEN",
    ):
        embodyrl.RemotePolicy(there.url)
    there.close()
    begun = time.monotonic()
    with pytest.raises(embodyrl.RunError, match=f"nobody answers at {there.url} within 1 s .*: start it"):
        embodyrl.RemotePolicy(there.url, token="t", deadline_s=1.0)
    assert time.monotonic() - begun < 5.0


def test_an_answer_that_is_late_is_not_taken_for_the_next_one() -> None:
    late = [1.0, 0.0]

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        time.sleep(late.pop(0) if late else 0.0)
        return {"actions": message["observation/state"][None]}

    with stand_in(answer) as url, embodyrl.RemotePolicy(url, deadline_s=0.5) as remote:
        with pytest.raises(embodyrl.RunError, match=re.escape("has not answered within 0.5 s")):
            remote.act(seen(1))
        two = seen(2)
        assert np.array_equal(remote.act(two)[:, 0], two.proprio)


def test_the_robot_of_the_example_does_not_wait(server: Start) -> None:
    example = Path(__file__).parents[2] / "examples" / "async_client.py"
    done = programs.run([example, server().url, "gym/pendulum", "20"])
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"20 control steps, .*\nanswers took [0-9.]+ control steps, \d+ at most; the robot waited", done.stdout
    )
