"""Options of OpenVLA, and the check of its config. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config
from embodyrl.models.prismatic.check import check as check_common
from embodyrl.models.prismatic.config import PrismaticConfig


@dataclass(frozen=True, kw_only=True)
class OpenVLAConfig(PrismaticConfig):
    """OpenVLA: one image, one action, whose tokens are generated one after the other."""


def check(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each fault of a config of OpenVLA."""
    yield from check_common(config, num_images=1)
