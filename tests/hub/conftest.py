"""A stand-in for the hub on the loopback device, with as much of its interface as huggingface_hub needs here."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import programs
import pytest


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False

    @property
    def commit(self) -> str:
        return hashlib.sha1(b"".join(name.encode() + self.files[name] for name in sorted(self.files))).hexdigest()


class Hub(ThreadingHTTPServer):
    """Repositories by `models/owner/name` or `datasets/owner/name`, and what was asked for and uploaded."""

    daemon_threads = True
    anew: ClassVar[dict[str, tuple[str, ...]]] = {
        "preload": ("huggingface_hub.hf_api",),
        "forget": ("huggingface_hub",),
    }
    """For programs: the library reads variables when it is imported, but what it imports itself need not be."""

    def __init__(self, home: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.home = home
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.made: list[dict[str, Any]] = []
        self.sizes: dict[str, int] = {}

    @property
    def downloads(self) -> list[str]:
        return [line.rpartition("/")[2] for line in self.requests if line.startswith("GET") and "/resolve/" in line]

    def add(self, name: str, folder: Path, **more: Any) -> Repository:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories[name] = Repository(files, **more)
        return self.repositories[name]

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        address = f"http://127.0.0.1:{self.server_port}"
        return {**kept, "HF_HOME": str(self.home), "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", **more}

    def run(self, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a Python program."""
        return programs.run(words, **{**self.anew, "env": self.environment(), "stdin": subprocess.DEVNULL, **options})

    def embodyrl(self, *words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command."""
        return self.run(["-m", "embodyrl", *words], cwd=cwd, env=self.environment(**more))


class Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Nothing goes to the screen."""

    def send(self, status: int, content: Any = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        url = urlsplit(self.path)
        parts = unquote(url.path).strip("/").split("/")
        if parts[0] == "api" and len(parts) == 2 and not url.query:
            self.send(404)  # lists of the hub itself, which nothing here needs
            return
        if parts[0] == "api" and len(parts) == 2:
            words = parse_qs(url.query)["search"][0]
            known = [key.partition("/")[2] for key in self.server.repositories if key.startswith(parts[1])]
            self.send(200, [{"id": name} for name in known if words[:4] in name])
            return
        kind, *rest = parts[1:] if parts[0] == "api" else parts if parts[0] == "datasets" else ["models", *parts]
        repository = self.server.repositories.get("/".join([kind, *rest[:2]]))
        if repository is None:
            self.send(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif repository.gated and "Authorization" not in self.headers:
            self.send(401, X_Error_Code="GatedRepo", X_Error_Message="Access to this is restricted")
        elif len(rest) > 3 and rest[3] not in ("main", repository.commit):
            self.send(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        elif parts[0] == "api":
            self.about(repository, rest)
        else:
            self.file(repository, "/".join(rest[4:]))

    def about(self, repository: Repository, rest: list[str]) -> None:
        sizes = {name: self.server.sizes.get(name, len(content)) for name, content in repository.files.items()}
        oids = {name: hashlib.sha1(content).hexdigest() for name, content in repository.files.items()}
        if rest[2] == "tree":
            self.send(200, [{"type": "file", "path": n, "size": s, "oid": oids[n]} for n, s in sizes.items()])
        else:
            siblings = [{"rfilename": n, "size": s, "blobId": oids[n]} for n, s in sizes.items()]
            self.send(200, {"id": "/".join(rest[:2]), "sha": repository.commit, "siblings": siblings})

    def file(self, repository: Repository, name: str) -> None:
        content = repository.files.get(name)
        if content is None:
            self.send(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            return
        self.send(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=repository.commit)

    def do_POST(self) -> None:
        self.server.requests.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://127.0.0.1:{self.server.server_port}"
        if self.headers.get("Authorization") is None:
            self.send(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.server.made.append(asked)
            self.server.repositories[f"models/{name}"] = Repository({})
            self.send(200, {"url": f"{address}/{name}"})
        elif "/preupload/" in self.path:
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(body)["files"]]
            self.send(200, {"files": [each | {"shouldIgnore": False} for each in files]})
        elif "/commit/" in self.path:
            _, _, kind, owner, name, *_ = self.path.split("/")
            repository = self.server.repositories[f"{kind}/{owner}/{name}"]
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    repository.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{address}/{owner}/{name}/commit/{repository.commit}"
            self.send(200, {"commitOid": repository.commit, "commitUrl": url, "success": True})
        else:
            self.send(200, {"errors": [], "warnings": []})


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub cache") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
