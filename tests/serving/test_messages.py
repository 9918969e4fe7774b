"""Messages of strangers: what is read, what is refused, and what it may cost."""

from __future__ import annotations

import io
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

msgpack = pytest.importorskip("msgpack", reason="needs msgpack: pip install 'embodyrl[serve]'")

from embodyrl.messages import LONGEST_LIST, MessageError, pack, unpack  # noqa: E402

IMAGE = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


@pytest.mark.parametrize("bytes_keys", [True, False])
def test_a_message_comes_back_as_it_was(bytes_keys: bool) -> None:
    sent = {
        "observation/image": IMAGE,
        "state": np.array([1.5, -2.0], np.float32),
        "nested": {"done": np.array([True]), "words": ["a", "b"], "nothing": None},
        "empty": np.zeros((0, 7), np.float64),
        "number": np.float32(0.25),
    }
    found = unpack(pack(sent, bytes_keys=bytes_keys))
    assert found["number"] == 0.25 and found["nested"]["words"] == ["a", "b"] and found["nested"]["nothing"] is None
    for name in ("observation/image", "state", "empty"):
        assert found[name].dtype == sent[name].dtype and np.array_equal(found[name], sent[name])
    assert found["nested"]["done"].tolist() == [True]


def test_openpis_own_bytes_are_read_and_written() -> None:
    """Written down from openpi-client 0.1.2: the keys of an array are bytes, and a number has a map of its own."""
    array = {b"__ndarray__": True, b"data": IMAGE.tobytes(), b"dtype": "|u1", b"shape": (4, 5, 3)}
    number = {b"__npgeneric__": True, b"data": 2.5, b"dtype": "<f8"}
    found = unpack(msgpack.packb({"image": array, "gripper": number}))
    assert np.array_equal(found["image"], IMAGE) and found["gripper"] == 2.5
    assert msgpack.unpackb(pack({"image": IMAGE}, bytes_keys=True)) == {"image": array | {b"shape": [4, 5, 3]}}


@pytest.mark.parametrize(("form", "lossless"), [("png", True), ("jpeg", False)])
def test_the_compressed_images_of_vla_eval_are_read(form: str, lossless: bool) -> None:
    smooth = np.repeat(np.arange(64, dtype=np.uint8)[:, None, None], 48, 1).repeat(3, 2) * 2
    file = io.BytesIO()
    Image.fromarray(smooth).save(file, form)
    entries = {"__image__": True, "format": form, "data": file.getvalue(), "shape": [64, 48, 3]}
    found = unpack(msgpack.packb({"images": {"wrist": entries}}))["images"]["wrist"]
    assert found.dtype == np.uint8 and found.shape == (64, 48, 3)
    assert np.abs(found.astype(int) - smooth).max() <= (0 if lossless else 4)
    raw = {"__image__": True, "format": "raw", "data": IMAGE.tobytes(), "dtype": "|u1", "shape": [4, 5, 3]}
    assert np.array_equal(unpack(msgpack.packb({"x": raw}))["x"], IMAGE)


def bomb() -> bytes:
    """A PNG of a few kilobytes that is 25,000 pixels wide and high."""
    file = io.BytesIO()
    Image.new("1", (25_000, 25_000)).save(file, "png")
    return file.getvalue()


def imaged(data: Any) -> bytes:
    """A message with a compressed image."""
    packed: bytes = msgpack.packb({"x": {"__image__": True, "format": "png", "data": data}})
    return packed


def test_an_image_that_would_fill_the_memory_is_not_decoded() -> None:
    data = imaged(bomb())
    with pytest.raises(MessageError, match=r"an image has 25000 x 25000 pixels|an image cannot be decoded: .*bomb"):
        unpack(data)


def test_the_images_of_a_message_are_limited_together() -> None:
    file = io.BytesIO()
    Image.new("1", (2048, 1024)).save(file, "png")
    entry = {"__image__": True, "format": "png", "data": file.getvalue()}
    assert unpack(msgpack.packb({"a": entry, "b": entry}))["b"].shape == (1024, 2048, 3)
    with pytest.raises(MessageError, match=r"an image has 2048 x 1024 pixels; those of a message may have 4,194,304"):
        unpack(msgpack.packb({"a": entry, "b": entry, "c": entry}))


def arrayed(**changes: Any) -> bytes:
    """A message with an array of which something is wrong."""
    entries = {"__ndarray__": True, "data": b"\0" * 8, "dtype": "<f4", "shape": [2]} | changes
    packed: bytes = msgpack.packb({"x": entries})
    return packed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no msgpack message"),
        (b"\xc1", "no msgpack message"),
        (msgpack.packb({"a": 1})[:-1], "no msgpack message"),
        (msgpack.packb({"a": 1}) + b"\0", "no msgpack message"),
        (msgpack.packb([1, 2]), "a message is a map, not list"),
        (b"\x81" * 5000, "no msgpack message"),
        (msgpack.packb({1: 2}), "no msgpack message"),
        (msgpack.packb({"a": msgpack.ExtType(5, b"pickle")}), "no msgpack message"),
        (imaged(b"no image"), "an image cannot be decoded"),
        (imaged(7), "an image cannot be decoded"),
        (arrayed(dtype="|O8"), "type '|O8': want numbers"),
        (arrayed(dtype="<c8"), "want numbers"),
        (arrayed(dtype="i4,i4"), "want numbers"),
        (arrayed(dtype="|S8"), "want numbers"),
        (arrayed(dtype=b"<f4"), "want numbers"),
        (arrayed(dtype="f" * 1000), "want numbers"),
        (arrayed(shape=[3]), r"shape \(3,\) and type float32 holds 8 bytes"),
        (arrayed(shape=[-2]), "want at most 8 whole numbers"),
        (arrayed(shape=[2.0]), "want at most 8 whole numbers"),
        (arrayed(shape=[True, 2]), "want at most 8 whole numbers"),
        (arrayed(shape="2"), "want at most 8 whole numbers"),
        (arrayed(shape=[1] * 9), "want at most 8 whole numbers"),
        (arrayed(shape=[2**62, 2**62, 0, 2]), "holds 8 bytes"),
        (arrayed(data=[0, 0]), "holds list"),
        (msgpack.packb({"x": {"__npgeneric__": True, "dtype": "<f4", "data": "1"}}), "a number of type float32 is str"),
        (msgpack.packb({"x": {"__npgeneric__": True, "dtype": "|u1", "data": 300}}), "no msgpack message"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(MessageError, match=re.escape(message) if "\\" not in message else message):
        unpack(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xa1a\xdd\xff\xff\xff\xff",  # a list of four thousand million values, of which none comes
        b"\x81\xa1a\xdd" + (4 * 2**20).to_bytes(4, "big") + b"\xc0" * 4 * 2**20,
        b"\x81\xa1a" + (b"\xdc" + LONGEST_LIST.to_bytes(2, "big") + b"\x80" * LONGEST_LIST),
        b"\x81\xa1a\xdc\x0f\xff" + (b"\xdc\x0f\xff" + b"\xc0" * 0xFFF) * 0xFFF,
        b"\x81\xa1a" + (b"\xdc\x0f\xff" + b"\xc0" * 0xFFE) * 900,  # one within the other
    ],
)
def test_a_message_takes_no_more_memory_than_it_may(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MessageError):
            unpack(data)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        assert isinstance(unpack(data), dict)
    except MessageError as error:
        assert str(error)
