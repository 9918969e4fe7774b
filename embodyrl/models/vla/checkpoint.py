"""Parts of checkpoints beside the weights, shared by several models: files and statistics. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import is_discrete
from embodyrl.errors import did_you_mean
from embodyrl.models.errors import PolicyError

CONFIG = "config.json"


# ---------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, kw_only=True)
class FilesBesideWeights:
    """Files of a checkpoint's folder, except the weights."""

    config: Mapping[str, Any]
    """config.json."""
    companions: Mapping[str, bytes]
    """Contents of the other files by path within the folder; `write` writes them unchanged."""

    def write(self, folder: Path) -> None:
        """Write all of it into an existing folder."""
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")
        for path, content in self.companions.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


# ----------------------------------------------------------------------------------------- models without checkpoint


def simulator_to_start_in(simulator: SimulatorSpec | None) -> SimulatorSpec:
    """Return the simulator that a model without a checkpoint is built for.

    Raises:
        PolicyError: there is no simulator, or its actions are discrete.
    """
    if simulator is None:
        raise PolicyError("give a checkpoint: without a simulator there is nothing to build a new model for")
    if is_discrete(simulator):
        raise PolicyError("this simulator takes one choice among n, the model needs continuous actions")
    return simulator


# ----------------------------------------------------------------------------------------------------------- statistics


def first_not_finite(numbers: Sequence[Any]) -> int | None:
    """Return the index of the first entry of a JSON list that is not a finite number; None if all are."""
    for place, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            return place
    return None


def parse_statistics(content: bytes, name: str) -> dict[str, dict[str, Any]]:
    """Return statistics by feature from LeRobot's safetensors, whose tensors are named `feature.number`.

    Args:
        content: contents of the file.
        name: name of the file, for messages.

    Raises:
        PolicyError: the file is damaged.
    """
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise PolicyError(f"{name} is damaged ({error})", "download it again") from error
    features: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        feature, _, number = key.rpartition(".")
        features.setdefault(feature, {})[number] = tensor.tolist()
    return features


def choose_key(statistics: Mapping[str, Any], key: str | None) -> str:
    """Return the data set to use: `key`, its version without idle steps (`<key>_no_noops`), or the only one.

    Raises:
        PolicyError: no data set has this name, or there are several and `key` is None.
    """
    known = ", ".join(sorted(statistics)) or "none"
    if key is None:
        if len(statistics) != 1:
            raise PolicyError("the checkpoint has statistics of several data sets", f"set unnorm_key to one of {known}")
        return next(iter(statistics))
    for name in (key, f"{key}_no_noops"):
        if name in statistics:
            return name
    hint = did_you_mean(key, statistics, lead=" - ")
    raise PolicyError(f"the checkpoint has no statistics of unnorm_key = {key!r}{hint} (known: {known})")
