"""The shape of the published OpenVLA and OpenVLA-OFT models (7 billion parameters), without their files.

What a public checkpoint brings besides is made up: ranges, and a vocabulary of words. Good for sizes and speed, not for
acting.
"""

from __future__ import annotations

import json
from typing import Any

from embodyrl.models.prismatic.architecture import THREE_LAYERS
from embodyrl.models.prismatic.files import PREPROCESSOR, STATISTICS, TOKENIZER, CheckpointFiles
from embodyrl.models.prismatic.prompts import word_tokenizer

SIDE = 224
ACTION_DIM, PROPRIO_DIM = 7, 8
CONFIG: dict[str, Any] = {
    "model_type": "openvla",
    "arch_specifier": f"no-align+{THREE_LAYERS}",
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "image_sizes": [SIDE, SIDE],
    "use_fused_vision_backbone": True,
    "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000},
    "pad_token_id": 32000,
    "pad_to_multiple_of": 64,
    "n_action_bins": 256,
    "norm_stats": {},
}
"""As in config.json of the checkpoints; what is missing has LlamaConfig's defaults, which are those of Llama 2 7B but
for the longest sequence."""


def published_files(key: str | None) -> CheckpointFiles:
    """Files of a model of the published size, with statistics called `key`."""
    resize = {"size": [SIDE, SIDE], "interpolation": 3}
    preprocessor = {
        "image_resize_strategy": "resize-naive",
        "tvf_resize_params": [resize] * 2,
        "tvf_normalize_params": [{"mean": [0.5] * 3, "std": [0.5] * 3}] * 2,
    }
    mask = [True] * (ACTION_DIM - 1) + [False]
    statistics = {key or "published": {"action": _unit(ACTION_DIM) | {"mask": mask}, "proprio": _unit(PROPRIO_DIM)}}
    companions = {PREPROCESSOR: preprocessor, STATISTICS: statistics}
    written = {name: json.dumps(content).encode() for name, content in companions.items()}
    return CheckpointFiles(config=CONFIG, companions=written | {TOKENIZER: word_tokenizer([]).to_str().encode()})


def _unit(size: int) -> dict[str, Any]:
    """Ranges of -1 .. 1."""
    low, high = [-1.0] * size, [1.0] * size
    return {"min": low, "max": high, "q01": low, "q99": high}
