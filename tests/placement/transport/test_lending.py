"""Memory and files that a process lends to others."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from embodyrl.placement.transport.lending import (
    MemoryClient,
    MemoryServer,
    RemoteFolder,
    RemoteMemory,
    copy_file,
    copy_folder,
)
from embodyrl.placement.transport.line import LineError, connect

HOST = "127.0.0.3"


def memory(content: bytes) -> int:
    fd = os.memfd_create("embodyrl-test", os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


def read(client: MemoryClient, lent: RemoteMemory, *parts: tuple[int, int]) -> list[bytes]:
    rooms = [bytearray(length) for _, length in parts]
    client.read(lent, [start for start, _ in parts], [memoryview(room) for room in rooms])
    return [bytes(room) for room in rooms]


def test_parts_are_read_as_they_are_now_until_they_are_withdrawn() -> None:
    fd = memory(b"0123456789")
    with MemoryServer(HOST) as server:
        lent = RemoteMemory.from_plain(json.loads(json.dumps(dataclasses.asdict(server.lend(fd)))))
        assert lent.size == 10
        with MemoryClient(lent.line, timeout_s=5.0) as client:
            assert read(client, lent, (7, 3), (0, 2)) == [b"789", b"01"]
            os.pwrite(fd, b"ab", 1)
            os.close(fd)
            assert read(client, lent, (0, 4)) == [b"0ab3"]
            server.withdraw(lent)
            with pytest.raises(LineError, match=r"127\.0\.0\.3:\d+ could not answer: .* not lent any more"):
                read(client, lent, (0, 4))


def test_nothing_else_of_the_process_can_be_read() -> None:
    fd = memory(b"0123456789")
    with MemoryServer(HOST) as server:
        lent = server.lend(fd)
        with MemoryClient(lent.line, timeout_s=5.0) as client, pytest.raises(LineError, match="not lent any more"):
            read(client, dataclasses.replace(lent, number=7), (0, 1))
        with MemoryClient(lent.line, timeout_s=5.0) as client, pytest.raises(ValueError, match="room for other sizes"):
            read(client, lent, (8, 4))
    os.close(fd)


def test_a_folder_is_copied_with_everything_in_it(tmp_path: Path) -> None:
    source = tmp_path / "one"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "empty").touch()
    (source / "deep" / "er" / "some").write_bytes(bytes(range(256)) * 1000)
    with MemoryServer(HOST) as server, server.folder(source) as lent:
        again = RemoteFolder.from_plain(json.loads(json.dumps(dataclasses.asdict(lent))))
        copy_folder(again, tmp_path / "two", timeout_s=5.0)
        copy_file(lent.files["deep/er/some"], tmp_path / "three", timeout_s=5.0)
    expected = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    found = {
        str(path.relative_to(tmp_path / "two")): path.read_bytes()
        for path in (tmp_path / "two").rglob("*")
        if path.is_file()
    }
    assert found == expected and len(found) == 2
    assert (tmp_path / "three").read_bytes() == expected["deep/er/some"]


def test_a_link_in_a_folder_is_not_lent(tmp_path: Path) -> None:
    source, secret = tmp_path / "one", tmp_path / "secret"
    source.mkdir()
    (source / "own").write_text("own")
    secret.mkdir()
    (secret / "key").write_text("secret")
    (source / "link").symlink_to(secret / "key")
    (source / "folder").symlink_to(secret)
    with MemoryServer(HOST) as server:
        with server.folder(source) as lent:
            assert list(lent.files) == ["own"]
        with pytest.raises(OSError, match="symbolic links"):
            server.lend_file(source / "link")


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    """Whoever lends a folder chooses where its files go."""
    odd = ["../out", "deep/../../out", str(tmp_path / "out"), "", ".", "a//b", "nul\0"]
    with MemoryServer(HOST) as server:
        lent = server.lend(memory(b"x"))
        for name in odd:
            with pytest.raises(LineError, match=r"lends files called .*, which are no names in a folder"):
                copy_folder(RemoteFolder(lent.line, {"first": lent, name: lent}), tmp_path / "to", timeout_s=5.0)
    assert not (tmp_path / "out").exists() and not (tmp_path / "to").exists()


def test_odd_offers_and_requests_are_errors_of_the_line(tmp_path: Path) -> None:
    with MemoryServer(HOST) as server:
        lent = server.lend(memory(b"0123456789"))
        plain = json.loads(json.dumps(dataclasses.asdict(lent)))
        for odd in ({}, [], None, plain | {"size": -1}, plain | {"size": "1"}, plain | {"line": {}}):
            for read in (
                RemoteMemory.from_plain,
                lambda each: RemoteFolder.from_plain({"line": plain["line"], "files": {"x": each}}),
            ):
                with pytest.raises(LineError, match="cannot be understood"):
                    read(odd)  # type: ignore[arg-type]
        with connect(lent.line, 5.0) as line:
            for request in ({}, {"number": []}, {"number": 0}, {"number": 0, "parts": [[0]]}):
                with pytest.raises(LineError, match=re.escape("could not answer: LineError: the request cannot be")):
                    line.ask(request, timeout_s=5.0)
