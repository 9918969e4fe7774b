"""A stand-in for a server of chat completions with images, on the loopback device."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

KEY = "sk-very-secret-0123456789"
Behave = Callable[["Stand", BaseHTTPRequestHandler, dict[str, Any]], None]


class Stand:
    """What it was asked, and how it behaves."""

    def __init__(self, behave: Behave) -> None:
        self.behave, self.asked, self.headers = behave, list[dict[str, Any]](), list[dict[str, str]]()
        self.url = ""
        self.lock = threading.Lock()
        self.at_once = self.most_at_once = 0


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        stand: Stand = self.server.stand  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stand.lock:
            stand.asked.append(body)
            stand.headers.append({**dict(self.headers), "path": self.path})
            stand.at_once += 1
            stand.most_at_once = max(stand.most_at_once, stand.at_once)
        try:
            stand.behave(stand, self, body)
        except OSError:  # whoever asked has gone
            pass
        finally:
            with stand.lock:
                stand.at_once -= 1

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def standing_in(behave: Behave) -> Iterator[Stand]:
    """Serve until the block ends."""
    stand = Stand(behave)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.block_on_close = False
    server.stand = stand  # type: ignore[attr-defined]
    stand.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield stand
    finally:
        server.shutdown()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    """Answer."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def say(handler: BaseHTTPRequestHandler, text: str, tokens: tuple[int, int] | None = (100, 10)) -> None:
    """Answer with a chat completion."""
    found: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    if tokens is not None:
        found["usage"] = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    send(handler, 200, json.dumps(found).encode())


def images_of(body: dict[str, Any]) -> list[NDArray[np.uint8]]:
    """The images of a request."""
    urls = [part["image_url"]["url"] for part in body["messages"][1]["content"] if part["type"] == "image_url"]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))) for url in urls]


def texts_of(body: dict[str, Any]) -> list[str]:
    """The texts of a request."""
    return [part["text"] for part in body["messages"][1]["content"] if part["type"] == "text"]


def drip(stand: Stand, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Send a byte now and then, for ever."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(600):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)
