"""What a run chooses to fit into memory, and a GPU that is too small, found before its simulators start."""

from __future__ import annotations

from typing import Any

import pytest

from embodyrl.config import LoadedConfig, load_config
from embodyrl.config.build import to_commented_yaml
from embodyrl.config.schema import Config, ParallelBackend
from embodyrl.errors import UserError
from embodyrl.placement.ranks import RankInfo
from embodyrl.planning.planner import Limits
from embodyrl.runner.fitting import Fitted, choices_of, fit, fit_into, follow_choices

SOURCE = "experiment/gym_pendulum"


def loaded(more: list[str]) -> LoadedConfig:
    return load_config(SOURCE, more)


def fitted(memory: float, more: list[str] | None = None, place: RankInfo | None = None) -> Fitted:
    def load(also: Any) -> Config:
        return loaded([*(more or []), *also]).config

    limits = Limits(cuda=True, gpu=memory, host=None)
    return fit_into(loaded(more or []), place or RankInfo(), limits, load)


def test_a_gpu_that_is_too_small_is_refused_with_what_would_fit() -> None:
    assert list(fitted(1e12).lines) == []
    with pytest.raises(UserError, match=r"weights and optimiser alone need 0.645 GB, and it has 0.001 GB: try"):
        fitted(1e6)


def test_a_gpu_that_may_be_too_small_is_a_warning() -> None:
    [warning] = fitted(645.5e6).lines
    assert warning.startswith("note: this run may need more memory than its GPU has: about")


def test_a_small_model_is_on_every_rank_and_recomputes_nothing(tmp_path: Any) -> None:
    found = fit(loaded([]), RankInfo(size=2, local_size=2), tmp_path)
    engine = found.loaded.config.engine
    assert (engine.parallel.backend, engine.gradient_checkpointing) == (ParallelBackend.none, False)
    assert list(found.lines) == []


def test_the_other_ranks_take_what_the_first_has_chosen_and_files_keep_auto() -> None:
    first = loaded([]).choosing({("engine", "parallel", "backend"): ParallelBackend.hsdp})
    first = first.choosing({("engine", "gradient_checkpointing"): True})
    follower = follow_choices(loaded([]), choices_of(first))
    assert follower.config == first.config and follower.config.engine.gradient_checkpointing is True
    assert follower.config.engine.parallel.backend is ParallelBackend.hsdp
    assert follower.written == loaded([]).written == first.written
    assert "gradient_checkpointing: auto" in to_commented_yaml(follower.written)
