"""Shared memory without a name: made, found by others, mapped, and gone with its processes."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys

import pytest

from embodyrl.placement.transport.segment import Segment

READ = "import sys; print(open(sys.argv[1], 'rb').read(3))"


def test_what_one_process_writes_others_find_at_its_address() -> None:
    segment = Segment.create("test", mmap.PAGESIZE)
    segment.map(mmap.PAGESIZE)[:3] = b"abc"
    other = Segment.open(segment.address, "test")
    assert other.num_bytes == mmap.PAGESIZE and other.map(3)[:] == b"abc"
    other.map(3)[0:1] = b"x"
    found = subprocess.run([sys.executable, "-c", READ, segment.address], capture_output=True, text=True, check=True)
    assert found.stdout == "b'xbc'\n"


def test_a_copied_mapping_keeps_its_changes_to_itself() -> None:
    segment = Segment.create("test", 2 * mmap.PAGESIZE)
    own = segment.map(3, mmap.PAGESIZE, copied=True)
    own[:] = b"own"
    assert segment.map(3, mmap.PAGESIZE)[:] == b"\0\0\0"


def test_it_grows_and_takes_no_memory_before_it_is_written_to() -> None:
    segment = Segment.create("test")
    segment.resize(1 << 48)
    assert segment.num_bytes == 1 << 48 and os.fstat(segment.fd).st_blocks == 0
    with pytest.raises(OSError) as caught:
        segment.map(1 << 48)  # more than a process can address
    assert caught.value.errno == errno.ENOMEM


def test_what_has_been_mapped_outlives_the_file() -> None:
    segment = Segment.create("test", 8)
    address, mapped = segment.address, segment.map(8)
    segment.close()
    segment.close()
    mapped[:3] = b"abc"
    assert mapped[:3] == b"abc" and segment.fd == -1
    with pytest.raises(FileNotFoundError):
        Segment.open(address, "test")


def test_another_kind_of_file_is_refused() -> None:
    segment = Segment.create("test", 8)
    for address in (segment.address, "/dev/zero"):
        with pytest.raises(ValueError, match=f"{address} is no segment of other"):
            Segment.open(address, "other")
