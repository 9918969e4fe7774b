import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runner"))  # where `small_runs` is

from small_runs import SMALL

from embodyrl.config import ConfigUse, load_config
from embodyrl.runner.build import ProgramInfo
from embodyrl.sweeps import session
from embodyrl.sweeps.session import SweepEnding, SweepOptions

PENDULUM = "experiment/gym_pendulum"


def load(words: Sequence[str]) -> Any:
    return load_config(PENDULUM, words, use=ConfigUse.run)


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., SweepEnding]:
    """Run a sweep of small runs in this process: sweep("key=1,2", seeds="2")."""

    def run(*words: str, seeds: str | None = None, at_once: int | None = 2) -> SweepEnding:
        folder = f"run.dir={tmp_path / 'sweep'}"
        return session.start(
            load,
            [*SMALL, folder, *words],
            seeds=seeds,
            options=SweepOptions(at_once=at_once),
            host=ProgramInfo(progress=True),
        )

    return run
