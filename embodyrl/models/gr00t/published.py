"""The shape of the published GR00T N1.5 (2.7 billion parameters), without its files.

What a public checkpoint brings besides is made up: ranges, and a vocabulary of words. Good for sizes and speed, not for
acting.
"""

from __future__ import annotations

from embodyrl.models.gr00t.architecture import Architecture
from embodyrl.models.gr00t.embodiments import EMBODIMENTS
from embodyrl.models.gr00t.files import TOKENIZER, CheckpointFiles
from embodyrl.models.gr00t.prompts import word_tokenizer
from embodyrl.models.gr00t.statistics import ENTRIES

STATE_DIM, ACTION_DIM, CAMERAS = 8, 7, ("image", "wrist_image")
"""Those of public checkpoints for LIBERO."""


def published_files(tag: str | None) -> CheckpointFiles:
    """Files of a model of the published size, with statistics of a robot called `tag`."""
    sizes = Architecture()
    numbers = {
        name: {name: {entry: [float(entry in ("max", "std"))] * count for entry in ENTRIES}}
        for name, count in (("state", STATE_DIM), ("action", ACTION_DIM))
    }
    robot = {"statistics": numbers, "modalities": {"video": {camera: {} for camera in CAMERAS}}}
    return CheckpointFiles(
        config=sizes.to_config(),
        eagle=None,
        metadata={tag or next(iter(EMBODIMENTS)): robot},
        tokenizer={TOKENIZER: word_tokenizer([], sizes.image_token).to_str().encode()},
        origin="the published model",
    )
