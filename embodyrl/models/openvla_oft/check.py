"""What is wrong with a config of OpenVLA-OFT; see `models.prismatic.check`."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.config.schema import Config
from embodyrl.models.openvla_oft.options import ACTION_HEAD, PROPRIO_PROJECTOR, ActionHead, OpenVLAOFTConfig
from embodyrl.models.prismatic.check import Objection
from embodyrl.models.prismatic.check import check as check_common
from embodyrl.registry import ALGORITHMS


def check(config: Config) -> Iterator[Objection]:
    """Object to what OpenVLA-OFT cannot do."""
    model = config.model
    assert isinstance(model, OpenVLAOFTConfig)
    says_numbers = model.action_head is ActionHead.l1
    heads = [name for name, used in ((ACTION_HEAD, says_numbers), (PROPRIO_PROJECTOR, model.use_proprio)) if used]
    algorithm = config.algorithm.name
    if says_numbers and algorithm in ALGORITHMS and not ALGORITHMS.entry(algorithm).demonstrations:
        yield (
            "model.action_head",
            f"model.action_head = l1 says numbers without probabilities, which algorithm {algorithm!r} cannot improve",
            "set model.action_head to discrete, or algorithm to one that learns from demonstrations",
        )
    if says_numbers and config.eval.sample:
        yield (
            "eval.sample",
            "eval.sample = true draws actions, but model.action_head = l1 says numbers without probabilities",
            "set eval.sample to false",
        )
    yield from check_common(config, model.num_images, tuple(heads))
