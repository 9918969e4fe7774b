"""Memory and files that a process lends to others."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from embodyrl.placement.lending import Borrower, Lender, Lent, LentFolder, copy_file, copy_folder
from embodyrl.placement.line import LineError

HOST = "127.0.0.3"


def memory(content: bytes) -> int:
    fd = os.memfd_create("embodyrl-test", os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


def read(borrower: Borrower, lent: Lent, *parts: tuple[int, int]) -> list[bytes]:
    rooms = [bytearray(length) for _, length in parts]
    borrower.read(lent, [start for start, _ in parts], [memoryview(room) for room in rooms])
    return [bytes(room) for room in rooms]


def test_parts_are_read_as_they_are_now_until_they_are_withdrawn() -> None:
    fd = memory(b"0123456789")
    with Lender(HOST) as lender:
        lent = Lent.from_plain(json.loads(json.dumps(dataclasses.asdict(lender.lend(fd)))))
        assert lent.size == 10
        with Borrower(lent.line, timeout_s=5.0) as borrower:
            assert read(borrower, lent, (7, 3), (0, 2)) == [b"789", b"01"]
            os.pwrite(fd, b"ab", 1)
            os.close(fd)
            assert read(borrower, lent, (0, 4)) == [b"0ab3"]
            lender.withdraw(lent)
            with pytest.raises(LineError, match=r"127\.0\.0\.3:\d+ could not answer: .* not lent any more"):
                read(borrower, lent, (0, 4))


def test_nothing_else_of_the_process_can_be_read() -> None:
    fd = memory(b"0123456789")
    with Lender(HOST) as lender:
        lent = lender.lend(fd)
        with Borrower(lent.line, timeout_s=5.0) as borrower, pytest.raises(LineError, match="not lent any more"):
            read(borrower, dataclasses.replace(lent, number=7), (0, 1))
        with Borrower(lent.line, timeout_s=5.0) as borrower, pytest.raises(ValueError, match="room for other sizes"):
            read(borrower, lent, (8, 4))
    os.close(fd)


def test_a_folder_is_copied_with_everything_in_it(tmp_path: Path) -> None:
    source = tmp_path / "one"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "empty").touch()
    (source / "deep" / "er" / "some").write_bytes(bytes(range(256)) * 1000)
    with Lender(HOST) as lender, lender.folder(source) as lent:
        again = LentFolder.from_plain(json.loads(json.dumps(dataclasses.asdict(lent))))
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
