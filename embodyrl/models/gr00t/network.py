"""GR00T N1.5: a vision-language model, and an action head that looks at its tokens.

Parameter names are those of the public checkpoints, but for what `NAMING` says.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from embodyrl.models.gr00t.architecture import Architecture
from embodyrl.models.gr00t.backbone import EagleModel
from embodyrl.models.gr00t.head import ActionHead
from embodyrl.models.weights import Naming

LEROBOT_PREFIX = "_groot_model."
VISION, TEXT = "backbone.eagle_model.vision_model.", "backbone.eagle_model.language_model."
POOLING = VISION + "vision_model.head."
"""A head of SigLIP that nothing uses; some files hold it."""


def checkpoint_name(name: str) -> str:
    """The name that a parameter has in public checkpoints."""
    return re.sub(rf"^({VISION})", r"\1vision_model.", re.sub(rf"^({TEXT})", r"\1model.", name))


def parameter_name(name: str) -> str | None:
    """The inverse of `checkpoint_name`, also for LeRobot's files.

    The output layer of the language model is the table of its tokens; a file may hold it under either name.
    """
    name = name.removeprefix(LEROBOT_PREFIX)
    if name.startswith(POOLING):
        return None
    if name == TEXT + "lm_head.weight":
        return TEXT + "embed_tokens.weight"
    return re.sub(rf"^({VISION}|{TEXT})(vision_model|model)\.", r"\1", name)


NAMING = Naming(public=checkpoint_name, own=parameter_name)


class EagleBackbone(nn.Module):
    """Holds the vision-language model under the name that checkpoints have."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.eagle_model = EagleModel(sizes)

    def forward(self, pixel_values: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
        """See `EagleModel`."""
        tokens: Tensor = self.eagle_model(pixel_values, input_ids, mask)
        return tokens


class Gr00tNetwork(nn.Module):
    """All parts; see `EagleModel` and `ActionHead`."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.sizes = sizes
        self.backbone = EagleBackbone(sizes)
        self.action_head = ActionHead(sizes)

    @classmethod
    def on_meta(cls, sizes: Architecture) -> Gr00tNetwork:
        """The network without memory for its parameters, which are to be assigned."""
        with torch.device("meta"):
            network = cls(sizes)
        network.backbone.eagle_model.give_memory_to_tables()
        return network
