"""What is wrong with a config of OpenVLA-OFT; see `models.prismatic.check`."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.config.schema import Config
from embodyrl.models.openvla_oft.options import ACTION_HEAD, PROPRIO_PROJECTOR, ActionHead, OpenVLAOFTConfig
from embodyrl.models.prismatic.check import Objection
from embodyrl.models.prismatic.check import check as check_common


def check(config: Config) -> Iterator[Objection]:
    """Object to what OpenVLA-OFT cannot do."""
    model = config.model
    assert isinstance(model, OpenVLAOFTConfig)
    says_numbers = model.action_head is ActionHead.l1
    heads = [name for name, used in ((ACTION_HEAD, says_numbers), (PROPRIO_PROJECTOR, model.use_proprio)) if used]
    yield from check_common(config, model.num_images, tuple(heads))
