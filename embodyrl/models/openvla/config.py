"""Options of OpenVLA, and what is wrong with a config of it (imports no torch)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config
from embodyrl.models.prismatic.check import check as check_common
from embodyrl.models.prismatic.config import PrismaticConfig


@dataclass(frozen=True, kw_only=True)
class OpenVLAConfig(PrismaticConfig):
    """OpenVLA: one image, one action, its entries said one after the other."""


def check(config: Config) -> Iterator[ConfigIssue]:
    """Object to what OpenVLA cannot do."""
    yield from check_common(config, num_images=1)
