"""Options of OpenVLA (part of the config schema; imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.models.prismatic.options import PrismaticConfig


@dataclass(frozen=True, kw_only=True)
class OpenVLAConfig(PrismaticConfig):
    """OpenVLA: one picture, one action, its entries said one after the other."""
