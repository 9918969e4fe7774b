"""How the state of a slot is written down: a JSON header and the raw bytes of named arrays. Never a pickle.

In this order: 16 bytes `embodyrl-state` and two zeros; 4 bytes, the length of the header; the header, a JSON object
whose entry `arrays` lists [name, dtype, shape] of each array; these arrays, rows first. All little-endian.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import RunError

MAGIC = b"embodyrl-state\0\0"
VERSION = 2
KINDS = "biuf"
"""Kinds of numbers that an array may hold: bool, integers, floats."""


class StateError(RunError):
    """Raised when a saved state does not fit this simulator or is damaged."""


def pack(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """`header` (what JSON can hold) and `arrays` as bytes."""
    parts = {name: np.asarray(array, array.dtype.newbyteorder("<"), order="C") for name, array in arrays.items()}
    listing = [[name, array.dtype.str, list(array.shape)] for name, array in parts.items()]
    text = json.dumps({"version": VERSION, **header, "arrays": listing}).encode()
    return b"".join([MAGIC, struct.pack("<I", len(text)), text, *(array.tobytes() for array in parts.values())])


def unpack(state: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What `pack` was given; the arrays are copies in native byte order.

    Raises:
        StateError: the bytes are something else, or damaged.
    """
    start = len(MAGIC) + 4
    if state[: len(MAGIC)] != MAGIC or len(state) < start:
        raise StateError("the state was not saved by this kind of simulator")
    (length,) = struct.unpack_from("<I", state, len(MAGIC))
    try:
        header = json.loads(state[start : start + length])
        listing = [(name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in header.pop("arrays")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError("the state is damaged: its header cannot be read") from error
    if header["version"] != VERSION:
        raise StateError(f"the state has version {header['version']}, want {VERSION}")
    position, arrays = start + length, {}
    want = position + sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in listing)
    if len(state) != want or any(dtype.kind not in KINDS for _, dtype, _ in listing):
        raise StateError(f"the state is damaged: {len(state)} bytes, want {want}")
    for name, dtype, shape in listing:
        flat = np.frombuffer(state, dtype, math.prod(shape), position)
        arrays[name] = flat.reshape(shape).astype(dtype.newbyteorder("="))
        position += flat.nbytes
    return header, arrays
