"""The shape of the published pi0 and pi0.5 (3.5 and 3.6 billion parameters), without their files.

What a public checkpoint brings besides is made up: ranges, and a vocabulary of words. Good for sizes and speed, not for
acting.
"""

from __future__ import annotations

import json

from embodyrl.models.pi.files import OPENPI, TOKENIZERS, CheckpointFiles
from embodyrl.models.pi.layout import Layout
from embodyrl.models.pi.prompts import word_tokenizer
from embodyrl.models.pi.ranges import KNOWN

STATE_DIM, ACTION_DIM = 8, 7
"""Those of public checkpoints for LIBERO."""


def published_files() -> CheckpointFiles:
    """Files of a model of the published size; config.json says nothing, which stands for openpi's sizes."""
    above = {name: name in ("std", "q99") for name in KNOWN}
    ranges = {
        key: {name: [float(one)] * count for name, one in above.items()}
        for key, count in (("state", STATE_DIM), ("actions", ACTION_DIM))
    }
    companions = {
        OPENPI: json.dumps({"norm_stats": ranges}).encode(),
        TOKENIZERS[0]: word_tokenizer([]).to_str().encode(),
    }
    return CheckpointFiles(config={}, companions=companions, layout=Layout(expert_head=False))
