"""Statistics of features, as `meta/stats.json` of a LeRobotDataset has them.

Of numbers, minimum, maximum, mean, standard deviation (of the population) and quantiles are per entry. Quantiles of a
dataset are those of all its frames, not means of the episodes' quantiles. Pictures are looked at in a sample of frames,
per channel, with pixels between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Statistics = dict[str, NDArray[Any]]
"""`min max mean std count q01 q10 q50 q90 q99`; `count` is `[1]`, the others are as the feature or `[3, 1, 1]`."""

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
SAMPLED_PICTURES = 32
"""Pictures of an episode that are looked at."""


def of_numbers(values: NDArray[Any]) -> Statistics:
    """Statistics over `T` of numbers `[T]` or `[T, n]`."""
    table = values.reshape(len(values), -1).astype(np.float64)
    return _of_table(table, len(table))


def of_pictures(images: NDArray[np.uint8]) -> Statistics:
    """Statistics per channel of one camera's pictures `[T, H, W, 3]`."""
    chosen = np.unique(np.linspace(0, len(images) - 1, SAMPLED_PICTURES).round().astype(int))
    table = images[chosen].reshape(-1, 3) / 255.0
    found = _of_table(table, len(chosen))
    return {name: value if name == "count" else value.reshape(3, 1, 1) for name, value in found.items()}


def _of_table(table: NDArray[np.float64], count: int) -> Statistics:
    found = {"min": table.min(0), "max": table.max(0), "mean": table.mean(0), "std": table.std(0)}
    quantiles = np.quantile(table, list(QUANTILES.values()), axis=0)
    return found | {"count": np.array([count])} | dict(zip(QUANTILES, quantiles, strict=True))


def pooled(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of several sets together; quantiles are means, weighted by the number of frames."""
    counts = np.array([float(part["count"][0]) for part in parts])
    weights = counts / counts.sum()

    def mean(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.tensordot(weights, np.stack(values), 1)

    centre = mean([part["mean"] for part in parts])
    variance = mean([part["std"] ** 2 + (part["mean"] - centre) ** 2 for part in parts])
    return {
        "min": np.min([part["min"] for part in parts], axis=0),
        "max": np.max([part["max"] for part in parts], axis=0),
        "mean": centre,
        "std": np.sqrt(variance),
        "count": np.array([int(counts.sum())]),
        **{name: mean([part[name] for part in parts]) for name in QUANTILES},
    }
