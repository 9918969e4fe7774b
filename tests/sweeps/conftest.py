import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import programs
import pytest

sys.path.append(str(Path(__file__).parents[1] / "runner"))  # where `small_runs` is

from small_runs import SMALL

from embodyrl.config import ConfigUse, load_config
from embodyrl.runner.build import Host
from embodyrl.sweeps import conductor, session, sharing
from embodyrl.sweeps.session import SweepEnding, Wish

PENDULUM = "experiment/gym_pendulum"


def load(words: Sequence[str]) -> Any:
    return load_config(PENDULUM, words, use=ConfigUse.run)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of sweeps in this process are forked from the server of `programs`: the same code without the same imports
    each time."""

    class Forked(programs.Program):
        def __init__(self, command: Sequence[str], **options: Any) -> None:
            super().__init__(command[command.index("-c") :], **options)

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return programs.run(command[command.index("-c") :], timeout=options["timeout"])

    for module, name, value in ((conductor, "Popen", Forked), (sharing, "run", run)):
        monkeypatch.setattr(module, "subprocess", _With(name, value))


class _With:
    """The module `subprocess` with something else for one of its names."""

    def __init__(self, name: str, value: object) -> None:
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


@pytest.fixture
def sweep(forked: None, tmp_path: Path) -> Callable[..., SweepEnding]:
    """Run a sweep of small runs in this process: sweep("key=1,2", seeds="2")."""

    def run(*words: str, seeds: str | None = None, at_once: int | None = 2) -> SweepEnding:
        folder = f"run.dir={tmp_path / 'sweep'}"
        return session.start(
            load,
            [*SMALL, folder, *words],
            seeds=seeds,
            wish=Wish(at_once=at_once),
            host=Host(progress=True),
        )

    return run
