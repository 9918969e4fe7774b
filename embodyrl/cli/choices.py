"""Words that options of the command line can have. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

from enum import StrEnum


class Keep(StrEnum):
    """Which episodes are kept."""

    successes = "successes"
    all = "all"


class PictureFormat(StrEnum):
    """How pictures are kept."""

    image = "image"
    video = "video"
