"""Messages between policies and robots: msgpack with arrays, as openpi's clients and vla-eval write them.

What is read comes from strangers: nothing is unpickled, and what a message may hold is limited before it is built.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from embodyrl.errors import MissingPackageError, UserError

MOST_VALUES = 100_000
"""Values in the lists of a message; arrays count as one."""
LONGEST_LIST = 4096
MOST_KEYS = 256
"""Keys of one map."""
MOST_MAPS = 1000
MOST_DIMS = 8
KINDS = "biuf"
"""Kinds of numbers that an array may hold: bool, int, unsigned, float."""
ARRAY, DATA, DTYPE, SHAPE, SCALAR = "__ndarray__", "data", "dtype", "shape", "__npgeneric__"
IMAGE, FORMAT = "__image__", "format"
MOST_PIXELS = 2**22
"""Pixels of the compressed images of a message together: what they say of their sizes is looked at before they are
decoded."""


class MessageError(UserError):
    """A message that cannot be read."""


def pack(value: Any, *, bytes_keys: bool) -> bytes:
    """Return a message.

    Args:
        value: of maps, lists, texts, numbers and arrays.
        bytes_keys: write the keys of arrays as bytes, as openpi does; False: as texts, as vla-eval does.
    """

    def key(name: str) -> Any:
        return name.encode() if bytes_keys else name

    def of_array(each: Any) -> Any:
        if isinstance(each, np.generic):
            return each.item()
        if not isinstance(each, np.ndarray) or each.dtype.kind not in KINDS:
            raise TypeError(f"{type(each).__name__} is no part of a message")
        entries = {DATA: each.tobytes(), DTYPE: each.dtype.str, SHAPE: list(each.shape)}
        return {key(ARRAY): True} | {key(name): entry for name, entry in entries.items()}

    packed: bytes = _msgpack().packb(value, default=of_array, use_bin_type=True)
    return packed


def unpack(data: bytes) -> dict[str, Any]:
    """Return the map that a message is, with its arrays; the keys of nested maps are texts.

    Raises:
        MessageError: it is none, or holds more than a message may.
    """
    count = _Count()
    try:
        found = _msgpack().unpackb(
            data,
            object_pairs_hook=count.of_map,
            list_hook=count.of_list,
            max_array_len=LONGEST_LIST,
            max_map_len=MOST_KEYS,
            max_ext_len=0,
        )
    except MessageError:
        raise
    # What msgpack raises has no class of its own below ValueError; nested too deeply, it says RecursionError.
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise MessageError(
            f"this is no msgpack message that can be read: {str(error) or type(error).__name__}"
        ) from error
    if not isinstance(found, dict):
        raise MessageError(f"a message is a map, not {type(found).__name__}")
    return found


class _Count:
    """Counts what a message holds while it is read, so that it takes no more memory than it may."""

    def __init__(self) -> None:
        self._values = self._maps = self._pixels = 0

    def of_list(self, values: list[Any]) -> list[Any]:
        self._values += len(values)
        if self._values > MOST_VALUES:
            raise MessageError(f"more than {MOST_VALUES:,} values in lists: send numbers as arrays")
        return values

    def of_map(self, pairs: list[tuple[Any, Any]]) -> Any:
        self._maps += 1
        if self._maps > MOST_MAPS:
            raise MessageError(f"more than {MOST_MAPS:,} maps")
        entries: dict[str, Any] = {}
        for name, value in pairs:
            entries[name if isinstance(name, str) else name.decode("utf-8", "replace")] = value
        if ARRAY in entries:
            return array_of(entries)
        if SCALAR in entries:
            return _scalar_of(entries)
        if IMAGE in entries:
            return self._image_of(entries)
        return entries

    def _image_of(self, entries: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        """Return the image uint8 `[height, width, 3]` of a PNG, a JPEG or an array, as vla-eval sends them."""
        if entries.get(FORMAT) == "raw":
            return array_of(entries)
        from PIL import Image

        try:
            with Image.open(io.BytesIO(entries.get(DATA, b"")), formats=("PNG", "JPEG")) as image:
                self._pixels += image.width * image.height
                if self._pixels > MOST_PIXELS:
                    size = f"{image.width} x {image.height} pixels"
                    raise MessageError(f"an image has {size}; those of a message may have {MOST_PIXELS:,} together")
                return np.asarray(image.convert("RGB"))
        except MessageError:
            raise
        # A file that is cut off or wrong is one of many errors of Pillow.
        except (OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
            raise MessageError(f"an image cannot be decoded: {error}") from error


def array_of(entries: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return the array that a map describes.

    Raises:
        MessageError: it describes none, or one of objects.
    """
    dtype, shape, data = _dtype_of(entries), entries.get(SHAPE), entries.get(DATA)
    lengths = shape if isinstance(shape, list | tuple) else None
    if lengths is None or len(lengths) > MOST_DIMS or not all(type(each) is int and each >= 0 for each in lengths):
        raise MessageError(f"an array has the shape {shape!r:.60}: want at most {MOST_DIMS} whole numbers")
    if not isinstance(data, bytes) or len(data) != math.prod(lengths) * dtype.itemsize:
        there = f"{len(data):,} bytes" if isinstance(data, bytes) else type(data).__name__
        raise MessageError(f"an array of shape {tuple(lengths)} and type {dtype} holds {there}")
    return np.frombuffer(data, dtype).reshape(lengths)


def _scalar_of(entries: Mapping[str, Any]) -> np.generic:
    dtype, value = _dtype_of(entries), entries.get(DATA)
    if not isinstance(value, bool | int | float):
        raise MessageError(f"a number of type {dtype} is {type(value).__name__}")
    made: np.generic = dtype.type(value)
    return made


def _dtype_of(entries: Mapping[str, Any]) -> np.dtype[Any]:
    name = entries.get(DTYPE)
    if isinstance(name, str) and len(name) <= 8:
        try:
            dtype = np.dtype(name)
        except TypeError:
            pass
        else:
            if dtype.kind in KINDS and dtype.itemsize:
                return dtype
    raise MessageError(f"an array has the type {name!r:.40}: want numbers, such as '<f4' or '|u1'")


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError:
        raise MissingPackageError("messages need msgpack: pip install 'embodyrl[serve]'") from None
    return msgpack
