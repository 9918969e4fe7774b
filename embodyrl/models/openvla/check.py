"""What is wrong with a config of OpenVLA; see `models.prismatic.check`."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.config.schema import Config
from embodyrl.models.prismatic.check import Objection
from embodyrl.models.prismatic.check import check as check_common


def check(config: Config) -> Iterator[Objection]:
    """Object to what OpenVLA cannot do."""
    yield from check_common(config, num_images=1)
