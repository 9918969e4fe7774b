"""What checkpoints of several vision-language-action models have beside their weights (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load

from embodyrl.errors import did_you_mean
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


def choose_key(statistics: Mapping[str, Any], key: str | None) -> str:
    """The data set to take: `key`, the same without idle steps (`<key>_no_noops`), or the only one.

    Raises:
        PolicyError: there is no such data set, or there are several and none is named.
    """
    known = ", ".join(sorted(statistics)) or "none"
    if key is None:
        if len(statistics) != 1:
            raise PolicyError(f"the checkpoint has statistics of several data sets: set unnorm_key to one of {known}")
        return next(iter(statistics))
    for name in (key, f"{key}_no_noops"):
        if name in statistics:
            return name
    hint = did_you_mean(key, statistics, lead=" - ")
    raise PolicyError(f"the checkpoint has no statistics of unnorm_key = {key!r}{hint} (known: {known})")
