from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # where `small_runs` is

from learners import LEARNERS, Learner
from small_runs import SMALL, Run, Runs, once

from embodyrl.registry import EXPERTS


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what all tests here may read, whichever process makes it."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "runs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def small_runs(shared_folder: Path) -> Runs:
    """Small runs of Pendulum, which tests share and only read; episodes (20 steps) straddle rollouts (12)."""
    settings = [*SMALL, "env.max_episode_steps=20", "rollout.num_chunks=12"]
    return Runs(shared_folder / "small", "experiment/gym_pendulum", settings)


@pytest.fixture
def small_run(small_runs: Runs, tmp_path: Path) -> Callable[..., Run]:
    """One of a test's own: small_run("name", "key=value", ...)."""
    return lambda name, *overrides: small_runs.fresh(tmp_path / name, *overrides)


@pytest.fixture(scope="session")
def runs_of(shared_folder: Path) -> Callable[[str], tuple[Learner, Runs]]:
    """A learner and its runs, which tests share and only read."""

    def find(name: str) -> tuple[Learner, Runs]:
        learner, folder = LEARNERS[name], shared_folder / name
        for package in learner.needs:
            if find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        with once(folder) as is_made:
            if not is_made:
                folder.mkdir()
                learner.write(folder)
        return learner, Runs(folder, folder / "my.yaml")

    return find


@pytest.fixture(scope="module")
def own_experts() -> Iterator[None]:
    """What plug-ins add is gone afterwards."""
    assert "metaworld" in EXPERTS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXPERTS, "_entries", dict(EXPERTS._entries))
        yield
    sys.modules.pop("swinger", None)
