"""Frames: beside the images of an observation, those of the decisions before.

Shapes: `B` slots, `F` frames, `V` cameras, `H, W` pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.states import StateError, pack, unpack

Images = NDArray[np.uint8]


class Frames:
    """The last `F` images of each slot's episode, newest first. An episode begins with its first one
    repeated.

    Args:
        count: `F`, at least 2.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._shown: dict[int, Images] = {}
        """By slot, `[F, V, H, W, 3]`."""

    def begin(self, slots: Sequence[int], images: Images) -> Images:
        """Take the first images `[B, V, H, W, 3]` of episodes; returns `[B, F * V, H, W, 3]`."""
        for slot, image in zip(slots, images, strict=True):
            self._shown[slot] = np.repeat(image[None], self.count, axis=0)
        return self.stacked(slots)

    def add(self, slots: Sequence[int], images: Images) -> Images:
        """Take the images `[B, V, H, W, 3]` after a chunk; returns `[B, F * V, H, W, 3]`."""
        for slot, image in zip(slots, images, strict=True):
            self._shown[slot] = np.concatenate([image[None], self._shown[slot][:-1]])
        return self.stacked(slots)

    def stacked(self, slots: Sequence[int]) -> Images:
        """Return all frames of these slots, `[B, F * V, H, W, 3]`: all cameras of the newest, then of that before."""
        images: Images = np.stack([self._shown[slot] for slot in slots])
        return images.reshape(len(slots), -1, *images.shape[3:])

    def save(self, slot: int, state: bytes) -> bytes:
        """Return the simulator's state of a slot together with the slot's frames."""
        return pack({"frames": self.count}, {"simulator": np.frombuffer(state, np.uint8), "images": self._shown[slot]})

    def restore(self, slot: int, state: bytes) -> bytes:
        """Take a slot's frames from what `save` returned; returns the simulator's state.

        Raises:
            StateError: it was saved with another `env.frames`.
        """
        header, arrays = unpack(state)
        if header.get("frames") != self.count:
            raise StateError(f"the state has {header.get('frames', 1)} frames, but env.frames = {self.count}")
        self._shown[slot] = arrays["images"]
        return arrays["simulator"].tobytes()
