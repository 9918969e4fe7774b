"""Download from a hub that answers oddly: each time there is a policy, or one sentence, and nothing outside the cache.

A server on 127.0.0.1 stands for a mirror (HF_ENDPOINT) that is hostile, broken, or a network's page to sign in. One of
its answers is odd: the description of the repository, the list of its files, the head of a file, or its contents. A
traceback, a wait of more than 90 s, a file outside the cache, or other contents than listed counts as a failure, and
the exit code is then 1.

    nice python benchmarks/hub_answers.py [--only N] [--every 1] [--out FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from embodyrl.version import __version__

HANG_S = 90.0
"""Six attempts of the library at an answer that comes to nothing after 6 s, and its pauses between them, are 59 s."""
FILES = {"config.json": b'{"type": "act"}', "model.safetensors": b"weights" * 400, "vlm/config.json": b"{}"}
LARGE = "model.safetensors"
COMMIT = hashlib.sha1(b"commit").hexdigest()
PAGE = b"<!DOCTYPE html><html><body>Please sign in to this network</body></html>"


@dataclass
class Answer:
    """An answer of the server."""

    status: int = 200
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = -1
    """Content-Length; -1: of the body, None: none."""
    endless: bool = False
    """Whether the body never ends."""
    silent: bool = False
    """Whether nothing is sent."""


Change = Callable[[Answer], object]


def with_body(body: Any, **more: Any) -> Change:
    """Return a change of an answer's body."""
    return lambda answer: answer.__dict__.update(body=body, **more)


def with_entry(path: Sequence[Any], value: Any) -> Change:
    """Return a change of one entry of a JSON answer; ... removes it."""

    def change(answer: Answer) -> None:
        holder = answer.body = json.loads(json.dumps(answer.body))
        try:
            for key in path[:-1]:
                holder = holder[key]
            if value is ...:
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            pass  # the other list has no such entry

    return change


def with_header(name: str, value: str | None) -> Change:
    """Return a change of a header; None removes it."""
    return lambda answer: answer.headers.pop(name, None) if value is None else answer.headers.update({name: value})


ODD: list[Any] = [
    None,
    True,
    3,
    -1,
    2**70,
    0.5,
    "",
    "x",
    "../../../escape",
    "/tmp/escape",
    "a" * 41,
    "A" * 40,
    [],
    {},
    [1],
    "\x1b[2J",
]
BODIES: list[Change] = [
    *(with_body(body) for body in (PAGE, b"", b"null", b"[]", b"{}", b"3", b'"text"', b"{", b"\xff\xfe", b"\x00" * 50)),
    *(
        with_body(body)
        for body in (b"[" * 100_000, b'{"a":' * 50_000, b"NaN", b"[null]", b'[{"path": 3}]', b"1" * 9000)
    ),
    with_body(b"[1, 2, 3]", length=None),
    with_body(b"x" * 1000, length=None, endless=True),
    with_body(b"{}", length=10**12),
    with_body(b"{}" * 50, length=3),
    *(
        with_body(PAGE, status=status)
        for status in (200, 203, 204, 206, 302, 304, 307, 400, 401, 403, 404, 418, 429, 500, 503)
    ),
    lambda answer: answer.__dict__.update(status=302, headers={"Location": "/nowhere/at/all"}),
    lambda answer: answer.__dict__.update(status=307, headers={"Location": "http://["}),
    lambda answer: answer.__dict__.update(status=302, headers={"Location": ""}),
    lambda answer: answer.__dict__.update(silent=True),
    with_header("Content-Encoding", "gzip"),
    with_header("Content-Type", "text/html; charset=nothing"),
]
ENTRIES: list[Change] = [
    *(with_entry(["sha"], value) for value in [..., *ODD, COMMIT[:-1], f"{COMMIT}/../../x"]),
    *(with_entry(["siblings"], value) for value in [..., *ODD]),
    *(
        with_entry(["siblings", 0, "rfilename"], value)
        for value in [..., *ODD, "a\\b", "a/../../b", "a//b", "a" * 5000]
    ),
    *(with_entry(["siblings", 1, "size"], value) for value in [..., *ODD, 1]),
    *(with_entry(["siblings", 0, "blobId"], value) for value in [..., "../../x", 3]),
    *(with_entry(["siblings", 1, "lfs"], value) for value in [..., "x", [], {}, {"sha256": "../x"}]),
    *(with_entry(["siblings", 1, "lfs", "sha256"], value) for value in ("0" * 64, "../../x")),
    *(with_entry([0, "path"], value) for value in [..., *ODD, "a\\b", "a/../../b"]),
    *(with_entry([1, "size"], value) for value in [..., *ODD]),
]
HEADS: list[Change] = [
    *(
        with_header("ETag", value)
        for value in (None, "", '"', '"../../../escape"', '"/tmp/escape"', '"x"', f'"{"a" * 5000}"', 'W/"..\\..\\x"')
    ),
    *(with_header("X-Linked-Etag", value) for value in ('"../../../../escape"', '""', '"0"')),
    *(with_header("X-Repo-Commit", value) for value in (None, "", "../../../escape", "main", "0" * 40, COMMIT.upper())),
    *(with_header("X-Linked-Size", value) for value in ("", "x", "-1", "1", str(10**15), "9" * 5000)),
    *(with_header("Location", value) for value in ("/elsewhere", "http://[", "")),
    *(with_header("X-Xet-Hash", value) for value in ("x", "../x")),
]
CONTENTS: list[Change] = [
    with_body(b"other" * 560),
    with_body(b"short"),
    with_body(FILES[LARGE] + b"more"),
    with_body(FILES[LARGE] + b"more", length=None),
    with_body(b"x" * 1000, length=None, endless=True),
    with_body(PAGE, length=None),
]
STAGES = {"description": [*BODIES, *ENTRIES], "list": [*BODIES, *ENTRIES[-36:]], "file": [*BODIES, *HEADS, *CONTENTS]}
CASES = [(stage, number) for stage, changes in STAGES.items() for number in range(len(changes))]
"""Which answer is odd, and how."""


class Server(ThreadingHTTPServer):
    """The mirror; repositories are called `odd/<number of the case>`."""

    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Say nothing about lines that the other side has cut."""


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does, but for one thing."""

    protocol_version = "HTTP/1.1"
    timeout = 40

    def log_message(self, *_: Any) -> None:
        """Nothing goes to the screen."""

    def do_HEAD(self) -> None:
        """See `do_GET`."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer."""
        path = unquote(urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        at = parts.index("odd") if "odd" in parts else -1
        if at < 0 or at + 1 >= len(parts) or not parts[at + 1].isdigit():
            self.send(Answer(404, PAGE))
            return
        case, rest = int(parts[at + 1]), parts[at + 2 :]
        stage, answer = self.usual(parts[0] == "api", rest)
        if case < len(CASES) and CASES[case][0] == stage and (stage != "file" or rest[-1] == LARGE):
            STAGES[stage][CASES[case][1]](answer)
        self.send(answer)

    def usual(self, about: bool, rest: list[str]) -> tuple[str, Answer]:
        """Return the answer of the hub, and what it is about."""
        sums = {name: hashlib.sha1(content).hexdigest() for name, content in FILES.items()}
        sha256 = hashlib.sha256(FILES[LARGE]).hexdigest()
        rows = [
            {
                "size": len(content),
                "blobId": sums[name],
                **({"lfs": {"sha256": sha256, "size": len(content), "pointerSize": 1}} if name == LARGE else {}),
            }
            for name, content in FILES.items()
        ]
        if about and rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": sums[name]} for name in FILES]
            tree[1]["lfs"] = {"oid": sha256, "size": len(FILES[LARGE]), "pointerSize": 1}
            return "list", Answer(body=tree)
        if about:
            siblings = [{"rfilename": name, **row} for name, row in zip(FILES, rows, strict=True)]
            return "description", Answer(body={"id": "odd/1", "sha": COMMIT, "siblings": siblings})
        name = "/".join(rest[2:])
        if name not in FILES:
            return "none", Answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        tag = sha256 if name == LARGE else sums[name]
        return "file", Answer(body=FILES[name], headers={"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

    def send(self, answer: Answer) -> None:
        """Send an answer."""
        if answer.silent:
            time.sleep(6)
            self.close_connection = True
            return
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.length is None:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body) if answer.length < 0 else answer.length))
            self.close_connection = answer.length >= 0
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            while answer.endless:
                self.wfile.write(body)


def attempt(number: int, place: Path) -> str | None:
    """Fetch the repository of that number; returns what was wrong, None if nothing was."""
    from embodyrl import hub

    before, began = everything(place.parent), time.monotonic()
    try:
        folder = hub.fetch(hub.parse(f"hf://odd/{number}", hub.Kind.model))
        wrong = [
            name
            for name, content in FILES.items()
            if (folder / name).exists() and (folder / name).read_bytes() != content
        ]
        fault = f"accepted other contents of {wrong}" if wrong else None
    except hub.HubError as error:
        fault = None if len(str(error)) < 2000 and "\x1b" not in str(error) else f"a long sentence: {error!s:.200}"
    except KeyboardInterrupt:
        raise
    except BaseException:  # what this is looking for
        fault = traceback.format_exc()
    if time.monotonic() - began > HANG_S:
        fault = f"took {time.monotonic() - began:.0f} s; {fault or ''}"
    if outside := [str(path) for path in everything(place.parent) - before if not path.is_relative_to(place)]:
        fault = f"wrote outside the cache: {outside}; {fault or ''}"
    return fault


def everything(folder: Path) -> set[Path]:
    """Return all paths below a folder, and those that escapes would lead to."""
    return {*folder.rglob("*"), *Path("/tmp").glob("escape*")}


def serve(cache: Path) -> Server:
    """Start the server, and point the library at it; call this before the library is imported."""
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    os.environ |= {
        "HF_HOME": str(cache),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_ETAG_TIMEOUT": "2",
        "HF_HUB_DOWNLOAD_TIMEOUT": "2",
    }
    return server


def main() -> None:
    """Ask, count and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try every so manieth case")
    parser.add_argument("--only", type=int, help="number of the only case to try")
    parser.add_argument("--out", type=Path, help="JSON file for what was found")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name, "deep", "cache")
        cache.mkdir(parents=True)
        server = serve(cache)
        from embodyrl import hub, hub_answers

        hub.TIMEOUT_S, hub_answers.PATIENCE_S = 2.0, 4.0
        numbers = range(0, len(CASES), args.every) if args.only is None else [args.only]
        faults = {number: fault for number in numbers if (fault := attempt(number, cache)) is not None}
        usual = attempt(len(CASES), cache)
        server.shutdown()
    found = {"cases": len(numbers), "failures": len(faults), "an answer as usual": usual or "a policy"}
    print(json.dumps(found))
    if args.out is not None:
        args.out.write_text(json.dumps({"version": __version__, **found}, indent=2) + "\n")
    for number, fault in faults.items():
        print(number, CASES[number], fault, sep="\n")
    sys.exit(1 if faults or usual else 0)


if __name__ == "__main__":
    main()
