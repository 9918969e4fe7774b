"""Options of OpenVLA. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.models.prismatic.config import PrismaticConfig


@dataclass(frozen=True, kw_only=True)
class OpenVLAConfig(PrismaticConfig):
    """OpenVLA: one image, one action, whose tokens are generated one after the other."""
