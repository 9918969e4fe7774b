"""What LeRobot keeps beside a policy's weights. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load

from embodyrl.models.errors import PolicyError


def parse_statistics(content: bytes, name: str) -> dict[str, dict[str, Any]]:
    """Statistics by feature, from safetensors in which LeRobot keeps them as `feature.number`.

    Args:
        content: of the file.
        name: of the file, for messages.

    Raises:
        PolicyError: it is damaged.
    """
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise PolicyError(f"{name} is damaged ({error}): download it again") from error
    features: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        feature, _, number = key.rpartition(".")
        features.setdefault(feature, {})[number] = tensor.tolist()
    return features
