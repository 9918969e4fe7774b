"""A GPU that is too small for a run is found before its simulators start."""

from __future__ import annotations

import pytest

from embodyrl.config import load_config
from embodyrl.config.schema import Config
from embodyrl.errors import UserError
from embodyrl.placement.ranks import RankInfo
from embodyrl.runner.fitting import compare_memory

SOURCE = "experiment/gym_pendulum"


def load(more: list[str]) -> Config:
    return load_config(SOURCE, more).config


def test_a_gpu_that_is_too_small_is_refused_with_what_would_fit() -> None:
    config = load([])
    assert compare_memory(config, RankInfo(), 1e12, load) is None
    with pytest.raises(UserError, match=r"weights and optimiser alone need 0.645 GB, and it has 0.001 GB: try"):
        compare_memory(config, RankInfo(), 1e6, load)


def test_a_gpu_that_may_be_too_small_is_a_warning() -> None:
    warning = compare_memory(load([]), RankInfo(), 645.5e6, load)
    assert warning is not None and warning.startswith("note: this run may need more memory than its GPU has: about")
