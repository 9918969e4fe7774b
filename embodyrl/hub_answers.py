"""Checks of what a hub, or a mirror of it (HF_ENDPOINT), answers, before the library uses it.

The library takes names of files, of commits and of contents (ETag) from answers, and makes paths of them; and it reads
bodies to their end. So every answer is checked first, in one place: a hook of the library's client.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from embodyrl.errors import UserError
from embodyrl.files import digest, foreign_entry

COMMIT = re.compile(r"[0-9a-f]{40}")
_CONTENT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Name of a file's contents: git's, or their SHA-256."""
_FILE = re.compile(r"/resolve/[^/]+/(.+)$")
_ABOUT = re.compile(r"/api/(?:models|datasets)/")
LARGEST_ANSWER = 64 * 2**20
"""Most bytes of an answer that is no file."""
LONGEST_PATH = 1000
PATIENCE_S = 60.0
"""Time that every answer may take [s]; a file has more, by its size."""
SLOWEST = 10_000
"""Bytes per second that a file comes with at least, on the average."""


class AnswerError(UserError):
    """Raised for an answer that no hub gives."""

    exit_code = 2


class Expected:
    """Sizes of the files that are being downloaded, by path [bytes]. None: not known yet."""

    sizes: Mapping[str, int] | None = None


expected = Expected()


_watched: list[Any] = []
"""The library as it was imported, once its clients check answers."""


def watch() -> None:
    """Let every client that the library makes from now on check answers."""
    import huggingface_hub
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    if huggingface_hub in _watched:
        return
    _watched.append(huggingface_hub)

    def factory() -> Any:
        client = default_client_factory()
        client.event_hooks = {**client.event_hooks, "response": [*client.event_hooks["response"], check_answer]}
        return client

    set_client_factory(factory)


def check_answer(response: Any) -> None:
    """Check the head of an answer, and limit its body; of lists of files, check the body.

    Raises:
        AnswerError: no hub answers so.
    """
    commit = response.headers.get("X-Repo-Commit")
    if commit is not None and not COMMIT.fullmatch(commit):
        raise AnswerError(f"names the commit {commit!r:.60}, 40 hexadecimal digits were expected")
    path = response.request.url.path
    file = _FILE.search(path)
    if _ABOUT.search(path) or response.is_error:
        _limit(response, LARGEST_ANSWER, PATIENCE_S)
        if response.is_success and response.request.method == "GET":
            response.read()
            _check_list(response.content)
        return
    if file is None:  # where the hub sends readers for the contents of a file
        limit = max((expected.sizes or {}).values(), default=LARGEST_ANSWER)
        _limit(response, limit, PATIENCE_S + limit / SLOWEST)
        return
    # Also of the answer that leads elsewhere: the library takes the name from there.
    contents = response.headers.get("X-Linked-Etag") or response.headers.get("ETag")
    if contents is not None and not _CONTENT.fullmatch(contents.removeprefix("W/").strip('"')):
        raise AnswerError(f"names the contents of {file[1]} {contents!r:.60}, hexadecimal digits were expected")
    size = None if expected.sizes is None else expected.sizes.get(file[1])
    _check_size(file[1], response.headers.get("X-Linked-Size"), size)
    limit = LARGEST_ANSWER if size is None else size
    _limit(response, limit, PATIENCE_S + limit / SLOWEST)


def _check_size(file: str, stated: str | None, size: int | None) -> None:
    if stated is not None and size is not None and stated != str(size):
        raise AnswerError(f"gives {file} {stated:.30} bytes, in the list it has {size}")


def _limit(response: Any, size: int, patience: float) -> None:
    """Let the body of an answer end with an error where it is too long [bytes], or takes too long [s]."""
    library = sys.modules[type(response).__module__.partition(".")[0]]
    limited = type("Limited", (_Limited, library.SyncByteStream), {})
    response.stream = limited(response.stream, size, patience)


class _Limited:
    """Body of an answer that ends with an error where it is too long, or takes too long."""

    def __init__(self, stream: Any, limit: int, patience: float) -> None:
        self._stream, self._limit = stream, limit
        self._deadline = time.monotonic() + patience

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        for chunk in self._stream:
            count += len(chunk)
            if count > self._limit:
                raise AnswerError(f"sends more than {self._limit} bytes, which is all that was expected")
            if time.monotonic() > self._deadline:
                raise AnswerError("takes too long to send what was asked for")
            yield chunk

    def close(self) -> None:
        """Close the connection's stream."""
        self._stream.close()


def _check_list(content: bytes) -> None:
    """Check the commit and the names of files in the description of a repository, or in a list of its files."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        start = " ".join(content[:200].decode(errors="replace").split())
        raise AnswerError(f"sends no JSON but {start!r:.80}") from error
    files: Any = found
    if isinstance(found, dict):
        if "sha" in found and not COMMIT.fullmatch(str(found["sha"])):
            raise AnswerError(f"names the commit {found['sha']!r:.60}, 40 hexadecimal digits were expected")
        files = found.get("siblings") or []
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise AnswerError(f"lists the files {files!r:.60}, a list of objects was expected")
    for file in files:
        for name in ("rfilename", "path"):
            if name in file and not is_path(file[name]):
                raise AnswerError(f"lists a file {file[name]!r:.60}, which is no path within a repository")
        size = file.get("size", 0)
        if size is not None and (type(size) is not int or size < 0):
            raise AnswerError(f"lists a file of {size!r:.30} bytes")
        if "blobId" in file and file["blobId"] is not None and not _CONTENT.fullmatch(str(file["blobId"])):
            raise AnswerError(f"lists the contents {file['blobId']!r:.60}, hexadecimal digits were expected")
        lfs = file.get("lfs")
        if lfs is not None and not (
            isinstance(lfs, dict) and _CONTENT.fullmatch(str(lfs.get("sha256", lfs.get("oid"))))
        ):
            raise AnswerError(f"lists the contents {lfs!r:.60}, an object with a SHA-256 was expected")


def is_path(found: object) -> bool:
    """Return whether something is the path of a file within a repository."""
    if not isinstance(found, str) or not 0 < len(found) <= LONGEST_PATH or not found.isprintable() or "\\" in found:
        return False
    path = PurePosixPath(found)
    return not path.is_absolute() and ".." not in path.parts and str(path) == found


def check_download(folder: Path, files: Mapping[str, tuple[int | None, str | None]]) -> None:
    """Compare downloaded files with what the hub listed. A wrong file is removed from the cache.

    Args:
        folder: of the commit in the cache.
        files: size [bytes] and SHA-256 by path; None: not listed.

    Raises:
        AnswerError: a file differs, or leads out of the cache.
    """
    if (foreign := foreign_entry(folder)) is not None:
        raise AnswerError(f"filled the cache so that {foreign}")
    for name, (size, sha256) in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        fault = None
        if size is not None and found != size:
            fault = f"has {found} bytes, in the list it has {size}"
        elif sha256 is not None and digest(path) != sha256:
            fault = "has other contents than the SHA-256 in the list"
        if fault is not None:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise AnswerError(f"sends {name}, which {fault}")
