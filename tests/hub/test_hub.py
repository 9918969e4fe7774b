"""`hf://owner/name` in place of a folder, against a stand-in for the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import programs
import pytest
import yaml

pytest.importorskip("huggingface_hub", reason="needs the extra hub")

SMALL = (
    *("experiment/gym_pendulum", "env.num_envs=2", "env.workers=1", "env.max_episode_steps=10"),
    *("rollout.num_chunks=8", "algorithm.minibatches=2", "run.iterations=1", "eval.episodes=2"),
    *("run.eval_every=0", "run.dir=out"),
)
START = (*SMALL, "model.checkpoint=hf://me/pendulum")


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved policy, with files beside it that no download may fetch."""
    folder = tmp_path_factory.mktemp("policy")
    done = programs.run(["-m", "embodyrl", "run", *SMALL], cwd=folder)
    assert done.returncode == 0, done.stderr
    saved = folder / "out" / "checkpoints" / "last" / "policy"
    (saved / "modeling.py").write_text("raise SystemExit")
    (saved / "pytorch_model.bin").write_bytes(b"\x80\x02")
    return saved


def config_of(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_a_run_starts_from_the_hub_and_goes_on_from_exactly_that(hub: Any, policy: Path, tmp_path: Path) -> None:
    first = hub.add("models/me/pendulum", policy)
    pinned = f"hf://me/pendulum@{first.commit}"
    done = hub.embodyrl("run", *START, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"weights from {pinned}" in done.stdout
    assert sorted(hub.downloads) == ["model.safetensors", "policy.json"]  # each once, and neither code nor pickles
    assert config_of(tmp_path / "out")["model"]["checkpoint"] == pinned
    assert config_of(tmp_path / "out" / "checkpoints" / "last")["model"]["checkpoint"] == pinned
    hub.repositories.clear()
    hub.requests.clear()
    again = hub.embodyrl("resume", "out", "run.iterations=2", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert not hub.requests
    assert config_of(tmp_path / "out")["model"]["checkpoint"] == pinned
