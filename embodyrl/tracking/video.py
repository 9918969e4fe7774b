"""Videos of episodes: one tile per episode, labelled with its outcome, as an MP4 that every browser plays."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import ceil, sqrt
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from embodyrl.registry import PYAV

TILE = 256
"""Width of a tile [pixels]; images are scaled to it."""
_BAR = 20
"""Height of the strip with text above each image [pixels]."""
_GREY, _GREEN, _RED, _WHITE = (60, 66, 78), (22, 128, 61), (176, 42, 42), (255, 255, 255)


class TiledVideo:
    """Writes a video in which `len(titles)` episodes run side by side from their first step.

    Images are encoded as soon as every tile has its next one, so only tiles that run ahead of others are kept in
    memory. An episode that is over shows its last image until the video ends, a second after the longest one. The file
    appears under its name when the video is complete.

    Args:
        path: of the file; parent folders are created.
        titles: of the tiles, in a few words.
        fps: images per second; the simulator's control frequency plays in real time.
        columns: of tiles; None: as many as rows.

    Raises:
        MissingPackageError: PyAV is missing.
    """

    def __init__(self, path: Path, titles: Sequence[str], *, fps: float, columns: int | None = None) -> None:
        self._av = PYAV.load("videos are written")
        self.path = path
        self._tiles = [_Tile(title) for title in titles]
        self._columns = columns or ceil(sqrt(len(titles)))
        self._partial = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = self._av.open(str(self._partial), "w", format="mp4")
        self._stream = self._container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        self._stream.pix_fmt = "yuv420p"
        self._stream.options = {"crf": "23", "preset": "veryfast"}
        self._ending = ceil(fps)
        self._size: tuple[int, int] | None = None

    def add(self, tile: int, frames: Iterable[NDArray[np.uint8]]) -> None:
        """Append images `[H, W, 3]` of a tile's episode."""
        self._tiles[tile].waiting.extend(_scaled(frame) for frame in frames)
        self._write_complete()

    def end(self, tile: int, *, success: bool | None) -> None:
        """End the episode of a tile: its last image stays, labelled with the outcome unless that is unknown (None)."""
        self._tiles[tile].success, self._tiles[tile].cut = success, True
        self._write_complete()

    def _write_complete(self) -> None:
        """Encode the images for which every tile is ready."""
        while all(tile.is_ready for tile in self._tiles) and any(tile.waiting for tile in self._tiles):
            self._encode([tile.next_image() for tile in self._tiles])

    def _encode(self, images: list[NDArray[np.uint8]]) -> None:
        height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
        rows = ceil(len(images) / self._columns)
        sheet = np.zeros((rows * height, self._columns * width, 3), np.uint8)
        for number, image in enumerate(images):
            top, left = number // self._columns * height, number % self._columns * width
            sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
        if self._size is None:
            self._size = sheet.shape[0] + sheet.shape[0] % 2, sheet.shape[1] + sheet.shape[1] % 2
            self._stream.height, self._stream.width = self._size  # the codec wants even numbers
        padded = np.zeros((*self._size, 3), np.uint8)
        padded[: sheet.shape[0], : sheet.shape[1]] = sheet
        self._container.mux(self._stream.encode(self._av.VideoFrame.from_ndarray(padded, format="rgb24")))

    def close(self) -> None:
        """Finish the video. Tiles whose episodes are not over stop at their last image."""
        for tile in self._tiles:
            tile.cut = True
        self._write_complete()
        if self._size is not None:
            for _ in range(self._ending):
                self._encode([tile.next_image() for tile in self._tiles])
            self._container.mux(self._stream.encode(None))
        self._container.close()
        if self._size is None:
            self._partial.unlink(missing_ok=True)
        else:
            self._partial.replace(self.path)

    def discard(self) -> None:
        """Delete the unfinished video."""
        self._container.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()


class _Tile:
    """One episode of a video."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.waiting: deque[NDArray[np.uint8]] = deque()
        self.success: bool | None = None
        self.cut = False
        self._last: NDArray[np.uint8] | None = None

    @property
    def is_ready(self) -> bool:
        """True if there is an image to show: the next one, or the last of an episode that is over."""
        return bool(self.waiting) or self.cut

    def next_image(self) -> NDArray[np.uint8]:
        """Return the next image with its strip of text."""
        if self.waiting:
            self._last = self.waiting.popleft()
        if self._last is None:
            self._last = np.zeros((TILE, TILE, 3), np.uint8)
        outcome = None if self.waiting else self.success
        return np.concatenate([_bar(self._last.shape[1], self.title, outcome), self._last])


def _scaled(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Scale an image to the width of a tile."""
    if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
        raise ValueError(f"an image is {frame.dtype} {frame.shape}, want uint8 (H, W, 3)")
    height = max(1, round(frame.shape[0] * TILE / frame.shape[1]))
    image = Image.fromarray(frame).resize((TILE, height), Image.Resampling.BILINEAR)
    return np.asarray(image)


def _bar(width: int, title: str, success: bool | None) -> NDArray[np.uint8]:
    """Draw the strip above an image: the title, and the outcome once it is known."""
    color = _GREY if success is None else _GREEN if success else _RED
    bar = Image.new("RGB", (width, _BAR), color)
    draw, font = ImageDraw.Draw(bar), ImageFont.load_default(12)
    outcome = "" if success is None else "success" if success else "failed"
    room = width - 8 - (draw.textlength(outcome, font) + 8 if outcome else 0)
    text = title
    while text and draw.textlength(text, font) > room:
        text = text[:-1]
    draw.text((4, 3), text, fill=_WHITE, font=font)
    draw.text((width - 4, 3), outcome, fill=_WHITE, font=font, anchor="ra")
    return np.asarray(bar)
