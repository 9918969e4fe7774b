"""Questions with images to a server of chat completions, and what may go wrong."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from chat_server import KEY, drip, images_of, say, send, standing_in

from embodyrl.chat import MOST_BYTES, ChatError, ChatServer, Question, is_readable_on_the_way, why_no_server
from embodyrl.errors import UserError

QUESTION = Question(rubric="Judge.", parts=["Task: push", np.full((4, 6, 3), 7, np.uint8), "end"])


def server(url: str, key: str | None = None, deadline_s: float = 5.0) -> ChatServer:
    return ChatServer(url=url, model="judge", key_variable=key, deadline_s=deadline_s, body={"temperature": 0.0})


def refused(url: str, **options: Any) -> ChatError:
    with pytest.raises(ChatError) as caught:
        server(url, **options).ask(QUESTION)
    return caught.value


def test_a_question_arrives_with_its_images_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    with standing_in(lambda stand, handler, body: say(handler, "yes", (12, 3))) as stand:
        reply = server(stand.url, "JUDGE_KEY").ask(QUESTION)
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens) == ("yes", 12, 3)
    [body], [headers] = stand.asked, stand.headers
    assert headers["Authorization"] == f"Bearer {KEY}" and headers["path"] == "/v1/chat/completions"
    assert body["model"] == "judge" and body["temperature"] == 0.0
    assert body["messages"][0] == {"role": "system", "content": "Judge."}
    assert [part["type"] for part in body["messages"][1]["content"]] == ["text", "image_url", "text"]
    assert np.array_equal(images_of(body)[0], QUESTION.parts[1])


def test_a_hash_says_all_that_an_answer_depends_on() -> None:
    base = server("http://a/v1").digest(QUESTION)
    assert server("http://b/v1").digest(QUESTION) == base, "the same model may be anywhere"
    assert ChatServer(url="http://a/v1", model="other", key_variable=None, deadline_s=1).digest(QUESTION) != base
    for other in (
        Question(rubric="Judge!", parts=QUESTION.parts),
        Question(rubric="Judge.", parts=["Task: pull", *QUESTION.parts[1:]]),
        Question(rubric="Judge.", parts=["Task: push", np.full((4, 6, 3), 8, np.uint8), "end"]),
        Question(rubric="Judge.", parts=["Task: push", np.full((6, 4, 3), 7, np.uint8), "end"]),
    ):
        assert server("http://a/v1").digest(other) != base


def test_a_server_that_is_slow_or_drips_is_left_at_the_deadline() -> None:
    for behave in (drip, lambda stand, handler, body: time.sleep(3)):
        with standing_in(behave) as stand:
            begun = time.monotonic()
            error = refused(stand.url, deadline_s=0.3)
            assert time.monotonic() - begun < 2
        assert error.passes and "0.3 s" in str(error)


def test_a_deadline_is_told_as_one_if_the_sockets_own_timeout_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodyrl.chat._cut", lambda opened, late: None)  # as on a busy machine, where it comes late
    with standing_in(lambda stand, handler, body: time.sleep(1)) as stand:
        assert "no whole answer within 0.2 s" in str(refused(stand.url, deadline_s=0.2))


def test_nobody_there() -> None:
    error = refused("http://127.0.0.1:9/v1")
    assert error.passes and "cannot be asked (ConnectionRefusedError" in str(error)


@pytest.mark.parametrize(
    ("status", "passes", "said"),
    [(429, True, ""), (503, True, ""), (401, False, "it wants a key"), (404, False, ""), (413, False, "")],
)
def test_a_refusal_says_whether_it_passes(status: int, passes: bool, said: str) -> None:
    def refuse(stand: Any, handler: Any, body: Any) -> None:
        send(handler, status, b'{"error": "too large\x1b[2J"}', Retry_After="2.5")

    with standing_in(refuse) as stand:
        error = refused(stand.url)
    assert error.passes is passes and error.wait_s == 2.5
    assert f"status {status}" in str(error) and said in str(error) and "too large" in str(error)
    assert "\x1b" not in str(error)


@pytest.mark.parametrize("wait", ["-5", "nan", "inf", "1e9", "Wed, 21 Oct 2026 07:28:00 GMT", ""])
def test_pauses_that_a_server_asks_for_have_a_limit(wait: str) -> None:
    with standing_in(lambda stand, handler, body: send(handler, 429, b"", Retry_After=wait)) as stand:
        assert 0.0 <= refused(stand.url).wait_s <= 300.0


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\xff\xfe\x00", b"<html>", b"[]", b"3", b"{}", b'{"choices": []}', b"[" * 100_000),
        *(b'{"choices": [{"message": {"content": null}}]}', b'{"choices": [{"message": {"content": [1]}}]}'),
        b'{"choices": [{"message": {"content": "yes"}}], "usage": [1]}',
    ],
)
def test_garbage_is_no_answer(body: bytes) -> None:
    with standing_in(lambda stand, handler, asked: send(handler, 200, body)) as stand:
        assert refused(stand.url).passes


def test_counts_of_a_stranger_count_only_if_they_are_some() -> None:
    for tokens in ((-1, 2), (True, 2), (1e3, 2), ("1", 2), (10**12, 2)):
        with standing_in(lambda stand, handler, body, tokens=tokens: say(handler, "yes", tokens)) as stand:
            reply = server(stand.url).ask(QUESTION)
        assert reply.prompt_tokens is None and reply.completion_tokens == 2


def test_an_answer_that_is_huge_is_not_read() -> None:
    with standing_in(lambda stand, handler, body: send(handler, 200, b"x" * (8 * MOST_BYTES))) as stand:
        assert "more than 1,048,576 bytes" in str(refused(stand.url))


def test_a_key_goes_nowhere_else_and_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with standing_in(lambda stand, handler, body: say(handler, "yes")) as other:

        def elsewhere(stand: Any, handler: Any, body: Any) -> None:
            send(handler, 307, f"go with {KEY}".encode(), Location=f"{other.url}/chat/completions")

        with standing_in(elsewhere) as stand:
            error = refused(stand.url, key="JUDGE_KEY")
        assert not other.asked
    assert "which is not followed" in str(error) and KEY not in str(error) and "<key>" in str(error)
    assert not error.passes
    with standing_in(lambda stand, handler, body: say(handler, f"your key is {KEY}")) as stand:
        assert KEY not in server(stand.url, "JUDGE_KEY").ask(QUESTION).text
    for wrong in ("", "two\nlines", "schlüssel"):
        monkeypatch.setenv("JUDGE_KEY", wrong)
        with pytest.raises(UserError, match="JUDGE_KEY") as caught:
            server("http://127.0.0.1:9/v1", "JUDGE_KEY").ask(QUESTION)
        assert not wrong or wrong not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "is_one"),
    [
        *(("http://localhost:8000/v1", True), ("https://host/v1", True), ("http://[::1]:8000/v1", True)),
        *(("localhost:8000", False), ("ftp://host", False), ("http://", False), ("http://host:x", False)),
        *(("http://me:secret@host/v1", False), ("http://host/v1?key=3", False), ("http://[::1", False)),
        ("http://localhost:8000/v1/chat/completions", False),
    ],
)
def test_addresses(url: str, is_one: bool) -> None:
    assert (why_no_server(url) is None) is is_one


def test_what_others_can_read() -> None:
    open_to_all = ("http://host/v1", "http://10.0.0.3:8000/v1", "http://localhost.evil.com/v1")
    assert all(map(is_readable_on_the_way, open_to_all))
    assert not any(map(is_readable_on_the_way, ("https://host/v1", "http://localhost:1/v1", "http://127.0.0.9/v1")))
