"""`embodyrl graph` as a user runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import programs


def graph(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "embodyrl", "graph", *words], cwd=cwd)


def test_it_prints_mermaid(tmp_path: Path) -> None:
    printed = graph("experiment/gym_pendulum", cwd=tmp_path)
    assert printed.returncode == 0 and printed.stdout.startswith("flowchart TD\n") and not list(tmp_path.iterdir())


def test_it_shows_what_the_config_changes(tmp_path: Path) -> None:
    done = graph("experiment/gym_pendulum", "pipeline.insert=[{name: again, stage: filter_groups}]", cwd=tmp_path)
    assert done.returncode == 2 and "the iteration filters groups" in done.stderr
    done = graph("experiment/gym_pendulum", "pipeline.drop=[reward]", cwd=tmp_path)
    assert (
        done.returncode == 2 and "stage 'advantage' reads column 'shaped_rewards', which no stage writes" in done.stderr
    )
    (tmp_path / "mine.py").write_text(
        "from embodyrl.registry import STAGES\n"
        "STAGES.register('mine', target=print, reads=('success',), summary='mine')\n"
    )
    (tmp_path / "my.yaml").write_text(
        "defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]\nplugins: [mine]\n"
        "pipeline: {insert: [{name: watch, stage: mine}]}\n"
    )
    done = graph("my.yaml", cwd=tmp_path)
    assert '  rollout -- "success" --> watch' in done.stdout, done.stderr
