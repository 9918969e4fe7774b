"""Questions with images to a server that speaks OpenAI's chat completions: vLLM, Ollama, a cloud.

The standard library alone; nothing is followed to another address, so that a key goes nowhere else.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import ipaddress
import json
import math
import os
import re
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError, without_controls

MOST_BYTES = 2**20
"""Bytes of an answer."""
MOST_SHOWN = 300
"""Characters of what a server says, in messages and in files."""
MOST_WAIT_S = 300.0
"""Longest pause that a server may ask for [s]."""
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which it may be asked again."""
MOST_TOKENS = 10**9
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
"""Name of an environment variable with a key; a key itself is not written so."""


class ChatError(Exception):
    """Raised when a question has no answer.

    Args:
        reason: what happened, without the key.
        passes: it may be asked again.
        wait_s: pause that the server asks for before that [s].
    """

    def __init__(self, reason: str, *, passes: bool, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.passes, self.wait_s = passes, wait_s


def why_no_server(url: str) -> str | None:
    """Return why a text is no address of such a server, with what is wanted; None if it is one."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        named = False
    if not named:
        return "want http://host:port/v1 or https://host/v1, in front of /chat/completions"
    if parts.path.rstrip("/").endswith("/chat/completions"):
        return "leave out /chat/completions, which is added to the address"
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        return "it is written into files, so that it may hold no password and no query: a key is read from a variable"
    return None


def is_readable_on_the_way(url: str) -> bool:
    """Return whether others could read what is sent: neither encrypted nor to this machine."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not _is_here(parts.hostname or "")


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class Question:
    """A text with images."""

    rubric: str
    """Instructions, the system message."""
    parts: Sequence[str | NDArray[np.uint8]]
    """Texts, and images `[H, W, 3]`, in the order in which they are read."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a server said."""

    text: str
    prompt_tokens: int | None
    """None: it did not say."""
    completion_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class ChatServer:
    """A server and how it is asked.

    Raises:
        UserError: of `ask`: the variable is not set.
    """

    url: str
    model: str
    key_variable: str | None
    """Environment variable with the key; None: it wants none."""
    deadline_s: float
    """Seconds within which an answer must be there [s]."""
    body: dict[str, Any] = field(default_factory=dict)
    """Further fields of a request."""

    def digest(self, question: Question) -> str:
        """Return the SHA-256 of all that an answer depends on. Images count by their pixels, whatever library packs
        them."""
        parts = [
            part if isinstance(part, str) else [list(part.shape), hashlib.sha256(part.tobytes()).hexdigest()]
            for part in question.parts
        ]
        asked = {"model": self.model, "body": self.body, "rubric": question.rubric, "parts": parts}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def ask(self, question: Question) -> Reply:
        """Ask once.

        Raises:
            ChatError: there is no answer.
            UserError: the key is missing.
        """
        key = self._key()
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        try:
            status, wait_s, raw = self._post(json.dumps(self._message(question)).encode(), headers)
        except (OSError, http.client.HTTPException, ValueError) as error:
            # Never the error itself, in whose text or frames a header could be.
            reason = without_key(f"{type(error).__name__}: {error}", key)
            raise ChatError(
                f"{self.url} cannot be asked ({reason}); start the server, or write its right address", passes=True
            ) from None
        said = without_key(raw.decode("utf-8", "replace"), key)
        if status != 200:
            raise self._refused(status, wait_s, said)
        return _reply(self.url, said)

    def _key(self) -> str | None:
        if self.key_variable is None:
            return None
        key = os.environ.get(self.key_variable, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise UserError(
                f"the environment variable {self.key_variable} {'holds no key' if key else 'is not set'}: set it to "
                f"the key of {self.url}, or set algorithm.reward.key_variable to null"
            )
        return key

    def _message(self, question: Question) -> dict[str, Any]:
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": _data_url(part)}}
            for part in question.parts
        ]
        messages = [{"role": "system", "content": question.rubric}, {"role": "user", "content": content}]
        return {"model": self.model, "messages": messages, "stream": False, **self.body}

    def _post(self, body: bytes, headers: dict[str, str]) -> tuple[int, float, bytes]:
        """Send a request; returns the status, the pause that the server asks for, and the first bytes of what it says,
        one more than it may say."""
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        connection = (
            http.client.HTTPSConnection(host, port, timeout=self.deadline_s, context=ssl.create_default_context())
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=self.deadline_s)
        )
        opened, late = list[socket.socket](), threading.Event()
        # A timeout of a socket is one of each byte: a server that drips would hold us for ever.
        watch = threading.Timer(self.deadline_s, _cut, [opened, late])
        watch.daemon = True
        watch.start()
        try:
            connection.connect()
            opened.append(connection.sock)
            if late.is_set():  # it found nothing to cut yet
                raise TimeoutError
            connection.request("POST", f"{parts.path.rstrip('/')}/chat/completions", body, headers)
            response = connection.getresponse()
            raw = response.read(MOST_BYTES + 1)
            if late.is_set():  # it was cut, and looks like an answer without length that has ended
                raise TimeoutError
            return response.status, _seconds(response.getheader("Retry-After")), raw
        except (OSError, http.client.HTTPException, ValueError) as error:
            # The socket's own timeout, which has no number, may end before the watch does.
            if late.is_set() or (isinstance(error, TimeoutError) and error.errno is None):
                raise TimeoutError(f"no whole answer within {self.deadline_s:g} s") from None
            raise
        finally:
            watch.cancel()
            connection.close()

    def _refused(self, status: int, wait_s: float, said: str) -> ChatError:
        shown = without_controls(said.strip())[:MOST_SHOWN]
        what = f"{self.url} answers with status {status}"
        if 300 <= status < 400:
            what += " (another address, which is not followed)"
        elif status == 404:
            what += " (it has no such model, or no /chat/completions below this address, which mostly ends in /v1)"
        elif status in (401, 403):
            which = "a key" if self.key_variable is None else f"another key than that of {self.key_variable}"
            what += f" (it wants {which})"
        return ChatError(f"{what}: {shown}" if shown else what, passes=status in PASSING, wait_s=wait_s)


def without_key(text: str, key: str | None) -> str:
    """Return a text in which a key is hidden."""
    return text.replace(key, "<key>") if key else text


def _cut(opened: list[socket.socket], late: threading.Event) -> None:
    late.set()
    for each in opened:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _seconds(text: str | None) -> float:
    """Return the pause that a server asks for; 0 if it names none that can be read."""
    try:
        found = float(text or 0.0)
    except ValueError:  # a date
        return 0.0
    return min(max(found, 0.0), MOST_WAIT_S) if math.isfinite(found) else 0.0


def _data_url(image: NDArray[np.uint8]) -> str:
    from PIL import Image

    packed = io.BytesIO()
    Image.fromarray(image).save(packed, "PNG")
    return f"data:image/png;base64,{base64.b64encode(packed.getvalue()).decode()}"


def _reply(url: str, said: str) -> Reply:
    """Read a server's answer.

    Raises:
        ChatError: it is none.
    """
    if len(said) > MOST_BYTES:
        raise ChatError(f"{url} answers with more than {MOST_BYTES:,} bytes", passes=True)
    try:
        found = json.loads(said)
        text = found["choices"][0]["message"]["content"]
        usage = found.get("usage") or {}
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        shown = without_controls(said.strip())[:MOST_SHOWN]
        raise ChatError(f"{url} answers with what is no chat completion: {shown}", passes=True) from None
    if not isinstance(text, str):
        raise ChatError(f"{url} answers with no text", passes=True)
    tokens = [count if type(count) is int and 0 <= count <= MOST_TOKENS else None for count in counts]
    return Reply(text=text, prompt_tokens=tokens[0], completion_tokens=tokens[1])
