"""Pictures as bytes: PNG in a table, or H.264 without loss in an MP4. What is read is what was written, bit for bit.

Videos are kept as RGB, which every FFmpeg decodes, and browsers do not.
"""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from embodyrl.data.layout import DatasetError

KEY_FRAME_EVERY = 12
"""Frames from one that can be decoded by itself to the next."""


def to_png(picture: NDArray[np.uint8]) -> bytes:
    """A picture `[H, W, 3]` as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()


def from_png(data: bytes) -> NDArray[np.uint8]:
    """The picture `[H, W, 3]` in a PNG or JPEG file."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


class VideoWriter:
    """An MP4 that grows by episodes.

    Args:
        path: where it goes.
        fps: pictures per second.
        size: `(H, W)` [pixels].
    """

    def __init__(self, path: Path, *, fps: int, size: tuple[int, int]) -> None:
        self.path = path
        self.frames = 0
        self._bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w")
        self._stream = self._container.add_stream("libx264rgb", rate=fps)
        self._stream.height, self._stream.width = size
        self._stream.pix_fmt = "rgb24"
        self._stream.options = {"qp": "0", "preset": "veryfast", "bf": "0", "g": str(KEY_FRAME_EVERY)}

    def add(self, pictures: NDArray[np.uint8]) -> None:
        """Append `[T, H, W, 3]`."""
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = self.frames
            self._mux(self._stream.encode(frame))
            self.frames += 1

    @property
    def size_mb(self) -> float:
        """Size of what has been compressed so far [MB]; the last few pictures still wait."""
        return self._bytes / 2**20

    def _mux(self, packets: list[av.Packet]) -> None:
        self._container.mux(packets)
        self._bytes += sum(packet.size for packet in packets)

    def close(self) -> None:
        """Finish the file."""
        self._mux(self._stream.encode(None))
        self._container.close()


def read_video(path: Path, start_s: float, count: int, fps: int) -> NDArray[np.uint8]:
    """Some consecutive pictures of a video.

    Args:
        path: an MP4 file.
        start_s: time of the first picture [s].
        count: `T`, how many.
        fps: pictures per second.

    Returns:
        `[T, H, W, 3]`

    Raises:
        DatasetError: the video cannot be read, or is too short.
    """
    pictures: list[NDArray[np.uint8]] = []
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            container.seek(int(start_s * av.time_base))  # to a key frame before it
            for frame in container.decode(stream):
                if frame.time < start_s - 0.5 / fps:
                    continue
                pictures.append(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8))
                if len(pictures) == count:
                    break
    except (OSError, av.FFmpegError) as error:
        raise DatasetError(f"{path} cannot be read ({error}): record or download the dataset anew") from error
    if len(pictures) < count:
        raise DatasetError(
            f"{path} ends {count - len(pictures)} pictures before the episode at {start_s:.2f} s does: the dataset is "
            f"incomplete; record or download it anew"
        )
    return np.stack(pictures)
