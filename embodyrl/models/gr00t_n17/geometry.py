"""How a checkpoint's processor pads, crops and resizes images: settings, and the sizes that follow from them.

Imports no torch and no OpenCV, so that lengths of prompts are known before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from embodyrl.models.errors import PolicyError
from embodyrl.models.gr00t_n17.config import VLM, VisionLanguage
from embodyrl.models.vla.folder import check_real, check_whole, wrong

PREPROCESSOR = f"{VLM}/preprocessor_config.json"
TARGET, CROP = [256, 256], [230, 230]
"""Size of images, and of the part that is kept of them, where no file says: those of the training of N1.7."""
FEWEST, MOST = 65_536, 16_777_216
"""Fewest and most pixels of an image for Qwen3-VL, where no file says."""


class Step(NamedTuple):
    """A change of an image; `height` and `width` are those of the result."""

    kind: Literal["pad", "area", "crop", "bicubic"]
    """pad: black borders. area: resize with OpenCV's INTER_AREA. bicubic: resize with antialiasing."""
    height: int
    width: int
    top: int = 0
    left: int = 0


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How images are padded, cropped and resized."""

    target: tuple[int, int]
    """Height and width of images [pixels]."""
    edge: int
    """Length of the shorter side."""
    kept: float | None
    """Share of each side that is kept by the crop; None: everything is."""
    area: bool
    """Whether the aspect ratio stays and OpenCV resizes, as albumentations do; else images become squares."""
    letter_box: bool
    """Whether images are padded to squares first."""
    unit: int
    """Sides are rounded to multiples of it in the end."""
    fewest: int
    most: int
    """Fewest and most pixels in the end."""

    @classmethod
    def read(
        cls,
        settings: Mapping[str, Any],
        file: str,
        vlm: VisionLanguage,
        preprocessor: Mapping[str, Any],
        limits: tuple[int, int],
    ) -> Geometry:
        """Read settings of a processor.

        Args:
            settings: of the processor.
            file: where they are from, for messages.
            vlm: sizes of the vision-language model.
            preprocessor: contents of that model's preprocessor_config.json; empty: it has none.
            limits: fewest and most pixels if it does not say.

        Raises:
            PolicyError: a setting is damaged.
        """
        target = _pair(settings.get("image_target_size"), file, "image_target_size")
        crop = _pair(settings.get("image_crop_size"), file, "image_crop_size")
        if target is None:
            target, crop = (TARGET[0], TARGET[1]), crop or (CROP[0], CROP[1])
        edge, kept = settings.get("shortest_image_edge"), settings.get("crop_fraction")
        if kept is None and crop is not None:
            kept = crop[0] / target[0]
        if kept is not None:
            kept = check_real(kept, "crop_fraction", above=0.0, file=file)
        size: Any = preprocessor.get("size") or {}
        ends = [size.get(name) if isinstance(size, Mapping) else size for name in ("shortest_edge", "longest_edge")]
        ends = [
            preprocessor.get(other) if end is None else end
            for end, other in zip(ends, ("min_pixels", "max_pixels"), strict=True)
        ]
        fewest, most = (
            usual if end is None else check_whole(end, "size", file=PREPROCESSOR)
            for end, usual in zip(ends, limits, strict=True)
        )
        _check_preprocessor(preprocessor, vlm)
        return cls(
            target=target,
            edge=target[0] if edge is None else check_whole(edge, "shortest_image_edge", file=file),
            kept=kept if kept is not None and kept < 1.0 else None,
            area=_flag(settings, "use_albumentations", file),
            letter_box=_flag(settings, "letter_box_transform", file),
            unit=vlm.unit,
            fewest=fewest,
            most=most,
        )

    def frame(self, height: int, width: int) -> list[Step]:
        """Return the changes of an image of a size before it is cut into patches, without `fit`."""
        steps: list[Step] = []
        if self.letter_box and height != width:
            side = max(height, width)
            steps.append(Step("pad", side, side, (side - height) // 2, (side - width) // 2))
            height, width = side, side
        scaled = self._scaled(height, width)
        steps += self._resized((height, width), scaled)
        height, width = scaled
        if self.kept is not None:
            cut = int if self.area else round
            tall, wide = (max(1, int(cut(side * self.kept))) for side in (height, width))
            steps.append(Step("crop", tall, wide, max(0, (height - tall) // 2), max(0, (width - wide) // 2)))
            height, width = tall, wide
        return steps + self._resized((height, width), self._scaled(height, width) if self.area else self.target)

    def fit(self, height: int, width: int) -> list[Step]:
        """Return the resizing that makes the sides multiples of `unit` and keeps the number of pixels in its limits."""
        sides = [max(self.unit, round(side / self.unit) * self.unit) for side in (height, width)]
        if math.prod(sides) > self.most:
            shrink = math.sqrt(height * width / self.most)
            sides = [max(self.unit, math.floor(side / shrink / self.unit) * self.unit) for side in (height, width)]
        elif math.prod(sides) < self.fewest:
            grow = math.sqrt(self.fewest / (height * width))
            sides = [math.ceil(side * grow / self.unit) * self.unit for side in (height, width)]
        return [] if sides == [height, width] else [Step("bicubic", *sides)]

    def steps(self, height: int, width: int) -> list[Step]:
        """Return all changes of an image of a size."""
        framed = self.frame(height, width)
        return framed + self.fit(*_size(framed, (height, width)))

    def tokens(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of tokens of an image of a size."""
        tall, wide = _size(self.steps(height, width), (height, width))
        return tall // self.unit, wide // self.unit

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return the size after resizing to the shorter side, or to a square."""
        if not self.area:
            return self.edge, self.edge
        scale = self.edge / min(height, width)
        return max(1, round(height * scale)), max(1, round(width * scale))

    def _resized(self, before: tuple[int, int], after: tuple[int, int]) -> list[Step]:
        # Of the longer side only the rounding could differ.
        if before == after or (self.area and min(before) == self.edge):
            return []
        return [Step("area" if self.area else "bicubic", *after)]


def _size(steps: Sequence[Step], before: tuple[int, int]) -> tuple[int, int]:
    return (steps[-1].height, steps[-1].width) if steps else before


def _pair(found: Any, file: str, key: str) -> tuple[int, int] | None:
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2:
        raise wrong(f"{file}: {key}", found, "two whole numbers")
    height, width = (check_whole(side, key, file=file) for side in found)
    return height, width


def _flag(settings: Mapping[str, Any], key: str, file: str) -> bool:
    found = settings.get(key, False)
    if not isinstance(found, bool):
        raise wrong(f"{file}: {key}", found, "true or false")
    return found


def _check_preprocessor(preprocessor: Mapping[str, Any], vlm: VisionLanguage) -> None:
    """Raise a `PolicyError` if a preprocessor_config.json does not suit the model."""
    wanted = {"patch_size": vlm.patch, "merge_size": vlm.merge, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for key, value in wanted.items():
        if preprocessor.get(key, value) != value:
            raise PolicyError(
                f"{PREPROCESSOR}: {key} is {preprocessor[key]!r:.60}, the model needs {value}",
                "download the files of one and the same vision-language model again",
            )
