from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # where `small_runs` is

from small_runs import SMALL, Run

from embodyrl.cli import train
from embodyrl.config import load_config


@pytest.fixture
def small_run(tmp_path: Path) -> Callable[..., Run]:
    """Train in this process: small_run("name", "key=value", ...)."""

    def run(name: str, *overrides: str) -> Run:
        path = tmp_path / name
        code = train.run(load_config("experiment/gym_pendulum", [*SMALL, f"run.dir={path}", *overrides]))
        assert code == 0
        return Run(path)

    return run
