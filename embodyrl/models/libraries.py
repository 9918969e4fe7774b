"""timm, transformers and peft, importable beside a CPU torch.

All import torchvision. Its plain wheel carries operators that were compiled for CUDA, which do not load beside a CPU
torch. torchvision then fails on import, because it registers implementations of operators that are not declared.
Declaring two names is enough here; the operators themselves (box suppression) are never called.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "AttentionInterface",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LlamaRotaryEmbedding",
    "Qwen2Tokenizer",
    "Qwen3Config",
    "Qwen3Model",
    "Qwen3RotaryEmbedding",
    "SiglipVisionConfig",
    "SiglipVisionModel",
    "load_peft",
    "timm",
]

_OPERATORS = ("nms", "qnms")


def _make_torchvision_importable() -> Any:
    """Declare the operators if torchvision needs it; the declaration lives as long as the returned object."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        make: Any = torch.library.Library  # untyped
        library = make("torchvision", "FRAGMENT")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


_declared = _make_torchvision_importable()

import timm  # noqa: E402 - needs the operators
from transformers import (  # noqa: E402
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding  # noqa: E402


def load_peft() -> Any:
    """Import peft, which few runs need, and return the module."""
    import peft

    return peft
