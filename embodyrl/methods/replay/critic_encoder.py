"""What critics of actions see where the policy shows them nothing: a vision-language-action model, say, that learns by
its supervised loss alone. They have an encoder of their own then.

Shapes: `M` decisions, `V` images of a moment, `S` proprio dims, `C` actions in a chunk, `D` action dims, `F` features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import unit_range
from embodyrl.models.cnn.network import Encoder
from embodyrl.models.cnn.options import DRQ, CNNConfig
from embodyrl.models.normalizer import SMALLEST_DEVIATION, RunningNormalizer
from embodyrl.models.policy import Inputs
from embodyrl.seeding import derive_seed

LARGEST_SIDE = 64
"""Images larger than this are made smaller first [pixels]: where things are is seen there, too, and an image costs the
critics no more than it does in published work."""
EYE = CNNConfig(name="cnn", encoder=DRQ, strides=[2, 1, 1, 1], image_features=50)
"""Encoder of an image, as in DrQ-v2 (Yarats et al. 2021, arXiv:2107.09645)."""
CODE_SIZE = 16
"""Numbers that stand for a task description."""


class CriticEncoder(nn.Module):
    """Features of observations in a replay: the state, scaled by statistics; each image through an encoder that learns
    with the critics; and a code of the task description, since what an action is worth depends on what is wanted.

    Args:
        simulator: its spec.
        chunk_size: `C`.
        seed: the run's seed.
    """

    decided = "actions"
    """Column of a replay that the critics value."""
    scaled = "proprio"
    """Column of a replay whose statistics scale the state."""
    centre: Tensor
    half_width: Tensor

    def __init__(self, simulator: SimulatorSpec, chunk_size: int, seed: int) -> None:
        super().__init__()
        self.decision_size = chunk_size * simulator.action_dim
        """Numbers of a chunk of actions."""
        self.task_descriptions: Sequence[str] = ()
        """Those that the column `task_index` refers to."""
        self.normalizer = (
            RunningNormalizer(simulator.proprio_dim, SMALLEST_DEVIATION) if simulator.proprio_dim else None
        )
        self.encoder = None
        if simulator.num_images:
            size = tuple(min(side, LARGEST_SIDE) for side in simulator.image_size)
            with torch.random.fork_rng(devices=[]):  # nothing else draws differently because there are critics
                torch.manual_seed(derive_seed(seed, "onlooker"))
                self.encoder = Encoder(EYE, (size[0], size[1]), frames=1)
        self.feature_dim = simulator.proprio_dim + simulator.num_images * EYE.image_features + CODE_SIZE
        """`F`."""
        centre, half_width = unit_range(simulator)
        self.register_buffer("centre", torch.from_numpy(centre), persistent=False)
        self.register_buffer("half_width", torch.from_numpy(half_width), persistent=False)

    def encode_stored(self, stored: Inputs) -> Tensor:
        """Return the features `[M, F]` of observations: `proprio [M, S]`, `images [M, V, H, W, 3]`, `task_index [M]`;
        differentiable in `encoder_parameters`."""
        seen = [self._codes(stored["task_index"])]
        if self.normalizer is not None:
            seen.append(self.normalizer(stored["proprio"]))
        if self.encoder is not None:
            seen.append(self._encoded(stored["images"]))
        return torch.cat(seen, 1)

    def encoder_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that learn with the critics."""
        return [*self.parameters()]

    def to_unit(self, actions: Tensor) -> Tensor:
        """Convert actions `[M, C, D]` in the simulator's units to the range -1 .. 1, `[M, C*D]`."""
        unit: Tensor = (actions - self.centre) / self.half_width
        return unit.flatten(1)

    @property
    def scaling(self) -> RunningNormalizer | None:
        """What scales states; None without states."""
        return self.normalizer

    def update_statistics(self, inputs: Inputs) -> None:
        """Add `proprio [M, S]` to the statistics that scale states."""
        if self.normalizer is not None:
            self.normalizer.update(inputs["proprio"])

    def _encoded(self, images: Tensor) -> Tensor:
        assert self.encoder is not None, "asked before"
        pixels = images.flatten(0, 1).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        smaller = [min(side, LARGEST_SIDE) for side in pixels.shape[-2:]]
        if list(pixels.shape[-2:]) != smaller:
            pixels = functional.interpolate(pixels, smaller, mode="area")
        encoded: Tensor = self.encoder(pixels)
        features: Tensor = encoded.unflatten(0, images.shape[:2]).flatten(1)
        return features

    def _codes(self, index: Tensor) -> Tensor:
        codes = torch.stack([_code(each) for each in self.task_descriptions]).to(index.device)
        return codes[index]


@cache
def _code(task_description: str) -> Tensor:
    """Return the numbers that stand for a task description: the same in every run, and almost at right angles to those
    of any other."""
    digest = hashlib.sha256(task_description.encode()).digest()
    stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    code: Tensor = torch.randn(CODE_SIZE, generator=stream) / CODE_SIZE**0.5
    return code
