"""Images of a dataset: PNG (also JPEG, if others wrote them), or H.264 in an MP4. Those written here are lossless and
read back bit for bit. FFmpeg (PyAV) is imported for videos alone.

Videos are stored as RGB, which every FFmpeg decodes, but browsers do not. Of what others wrote, only the named formats
are opened, and nothing is decoded that has another size than the dataset says.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from embodyrl.data.layout import ANEW, DatasetError, size_text
from embodyrl.registry import PYAV

KEY_FRAME_EVERY = 12
"""Frames from one key frame to the next."""
FORMATS = ("PNG", "JPEG")
"""Formats of images, by Pillow's names."""
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")
"""Kinds of pixels, by Pillow's names, that can become RGB of 8 bits."""
CONTAINER = "mp4"
CODECS = ("h264", "hevc", "av1", "vp9", "mpeg4")
"""Formats of videos, by FFmpeg's names."""
MICROSECONDS = 1_000_000
"""FFmpeg's unit of time in containers [1/s]."""
DRIFT = 0.25
"""Largest difference between the time of a frame and its number, in frames."""


def to_png(image: NDArray[np.uint8]) -> bytes:
    """Encode an image `[H, W, 3]` as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()


class ImageError(ValueError):
    """Raised when an image cannot be read; the text says why."""


def decode_image(data: bytes, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Decode a PNG or JPEG file to an image `[H, W, 3]`.

    Args:
        data: contents of the file.
        size: `(H, W)` that the dataset says it has [pixels].

    Raises:
        ImageError: it is damaged, or has another format or size.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.size[::-1] != size:
                raise ImageError(f"it has {image.height}x{image.width} pixels, but the dataset says {size_text(size)}")
            if image.mode not in MODES:
                raise ImageError(f"its pixels are of kind {image.mode!r}, which are not those of 8-bit colours")
            return np.asarray(image.convert("RGB"))
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"it is no {' or '.join(FORMATS)} file") from error
    except Exception as error:  # Pillow raises a dozen kinds of a damaged file
        raise ImageError(f"it is damaged ({error})") from error


class VideoWriter:
    """Writes an MP4 episode by episode.

    Args:
        path: path of the file.
        fps: images per second.
        size: `(H, W)` [pixels].

    Raises:
        MissingPackageError: PyAV is missing.
    """

    def __init__(self, path: Path, *, fps: float, size: tuple[int, int]) -> None:
        self._av = PYAV.load("images are kept as videos")
        self.path = path
        self.frames = 0
        self._bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = self._av.open(str(path), "w")
        self._stream = self._container.add_stream("libx264rgb", rate=Fraction(fps).limit_denominator(10_000))
        self._stream.height, self._stream.width = size
        self._stream.pix_fmt = "rgb24"
        self._stream.options = {"qp": "0", "preset": "veryfast", "bf": "0", "g": str(KEY_FRAME_EVERY)}

    def add(self, images: NDArray[np.uint8]) -> None:
        """Append images `[T, H, W, 3]`."""
        for image in images:
            frame = self._av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = self.frames
            self._mux(self._stream.encode(frame))
            self.frames += 1

    @property
    def size_mb(self) -> float:
        """Compressed size so far [MB], without the last few images that are still in the encoder."""
        return self._bytes / 2**20

    def _mux(self, packets: list[Any]) -> None:
        self._container.mux(packets)
        self._bytes += sum(packet.size for packet in packets)

    def close(self) -> None:
        """Finish the file."""
        self._mux(self._stream.encode(None))
        self._container.close()


@contextmanager
def _opened(path: Path, size: tuple[int, int]) -> Iterator[tuple[Any, Any]]:
    """Open a video for the block; gives the container and its stream.

    Raises:
        DatasetError: it is damaged, also if the block notices that; or it has another format or size.
        MissingPackageError: PyAV is missing.
    """
    av = PYAV.load("images of this dataset are kept as videos, which are read")
    try:
        # As a plain file, and of that container alone: others name further files that FFmpeg would open.
        with av.open(f"file:{path}", format=CONTAINER) as container:
            if not container.streams.video:
                raise DatasetError(f"{path} holds no video", ANEW)
            stream = container.streams.video[0]
            context = stream.codec_context
            codec = context.codec.canonical_name if context is not None else "unknown"
            if codec not in CODECS:
                raise DatasetError(f"{path} has the format {codec!r}, expected one of {', '.join(CODECS)}", ANEW)
            if (context.height, context.width) != size:
                found = size_text((context.height, context.width))
                raise DatasetError(f"{path} has images of {found} pixels, but the dataset says {size_text(size)}", ANEW)
            # Later frames may be larger than the first; encoders pad images, but never by so much.
            context.options = {"max_pixels": str((size[0] + 256) * (size[1] + 256))}
            yield container, stream
    except DatasetError:
        raise
    except (OSError, ValueError, av.FFmpegError) as error:
        why = getattr(error, "strerror", None) or error
        raise DatasetError(f"{path} cannot be read ({why})", ANEW) from error


def check_video(path: Path, size: tuple[int, int]) -> None:
    """Raise `DatasetError` if a file is no video with images of `size`, `(H, W)` [pixels]. Decodes none of them."""
    with _opened(path, size):
        pass


def read_video(path: Path, first: int, count: int, fps: float, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Read consecutive images of a video.

    Args:
        path: an MP4 file.
        first: number of the first image, from 0.
        count: `T`, number of images.
        fps: images per second.
        size: `(H, W)` [pixels].

    Returns:
        `[T, H, W, 3]`

    Raises:
        DatasetError: the video cannot be read, is too short, or has images at other times or of another size.
    """
    images: list[NDArray[np.uint8]] = []
    with _opened(path, size) as (container, stream):
        container.seek(int(first / fps * MICROSECONDS))  # to a key frame before it
        for frame in container.decode(stream):
            number = -1.0 if frame.time is None else frame.time * fps
            if number < first - 0.5:
                continue
            if abs(number - first - len(images)) > DRIFT:
                raise DatasetError(
                    f"{path} has an image at {frame.time:.3f} s, where that at {(first + len(images)) / fps:.3f} s "
                    f"should be, by {fps:g} images per second",
                    ANEW,
                )
            if (frame.height, frame.width) != size:
                raise DatasetError(
                    f"{path} has an image of {size_text((frame.height, frame.width))} pixels in it", ANEW
                )
            images.append(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8))
            if len(images) == count:
                break
    if len(images) < count:
        raise DatasetError(
            f"{path} ends {count - len(images)} images before the episode at {first / fps:.2f} s does: the dataset is "
            "incomplete",
            ANEW,
        )
    return np.stack(images)
