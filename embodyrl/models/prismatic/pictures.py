"""From a simulator's pictures to what the vision towers take, as the public evaluation code does it.

Resizing is PIL's, which is what the public image processor calls. Public evaluations in LIBERO resize with TensorFlow
(Lanczos, after writing and reading a JPEG) before that; this is not repeated here, so pixels differ slightly from
theirs unless the simulator draws at the model's own size.

Shapes: `B` samples, `V` cameras, `H, W` pixels, `h` the model's side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.errors import PolicyError

CROP_AREA = 0.9
"""Share of the picture's area that a centre crop keeps."""


class PicturePipeline(nn.Module):
    """Resize, crop, normalise.

    Args:
        config: contents of preprocessor_config.json. The means are taken from `tvf_normalize_params`, because these are
            what public code uses; they are rounded to bfloat16 there.
        center_crop: keep the middle 90 % of the area.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: Mapping[str, Any], center_crop: bool) -> None:
        super().__init__()
        if config.get("image_resize_strategy") != "resize-naive":
            raise PolicyError(
                f"preprocessor_config.json: image_resize_strategy is {config.get('image_resize_strategy')!r}, only "
                "'resize-naive' is supported"
            )
        resizes = [(*entry["size"], entry["interpolation"]) for entry in config["tvf_resize_params"]]
        if len(set(resizes)) != 1 or resizes[0][0] != resizes[0][1]:
            raise PolicyError("preprocessor_config.json: expected the same square size for every vision tower")
        self.side, self._interpolation = resizes[0][0], Image.Resampling(resizes[0][2])
        self.center_crop = center_crop
        for name in ("mean", "std"):
            numbers = [number for entry in config["tvf_normalize_params"] for number in entry[name]]
            self.register_buffer(name, torch.tensor(numbers).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """`pixel_values [B, V*channels, h, h]` in float32 of `images [B, V, H, W, 3]` in uint8."""
        batch = len(images)
        pictures = self._resize(images.flatten(0, 1)).to(self.mean.device)
        planes = pictures.permute(0, 3, 1, 2)
        if self.center_crop:
            planes = _crop(planes)
        copies = len(self.mean) // 3
        normalised = (planes.float().div(255).repeat(1, copies, 1, 1) - self.mean) / self.std
        return normalised.unflatten(0, (batch, -1)).flatten(1, 2)

    def _resize(self, pictures: Tensor) -> Tensor:
        if pictures.shape[1:3] == (self.side, self.side):
            return pictures
        size = (self.side, self.side)
        resized = [Image.fromarray(picture).resize(size, self._interpolation) for picture in pictures.cpu().numpy()]
        return torch.from_numpy(np.stack([np.asarray(picture) for picture in resized]))


def _crop(planes: Tensor) -> Tensor:
    """The middle of `[M, 3, h, h]` in uint8, enlarged to the same size.

    The same sampling points and the same rounding as TensorFlow's crop_and_resize and convert_image_dtype.
    """
    side = planes.shape[-1]
    line = torch.linspace(-1.0, 1.0, side, device=planes.device) * math.sqrt(CROP_AREA)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).expand(len(planes), -1, -1, -1)
    cropped = functional.grid_sample(planes.float() / 255, grid, mode="bilinear", align_corners=True)
    return (cropped.clamp(0.0, 1.0) * 255.5).floor().clamp(max=255.0)
