"""Videos of evaluations: the right episodes, labelled with what came of them, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import av
import pytest

from embodyrl.cli import train
from embodyrl.config import load_config

CARTPOLE = ["env.num_envs=2", "env.workers=2", "rollout.num_chunks=8", "algorithm.minibatches=2", "run.iterations=2"]


def videos(run_dir: Path) -> dict[str, int]:
    """Images in every video of a run."""
    counts = {}
    for path in sorted((run_dir / "videos").glob("*")):
        with av.open(str(path)) as container:
            counts[path.name] = sum(1 for _ in container.decode(video=0))
    return counts


def run(path: Path, *overrides: str) -> dict[str, dict[str, float]]:
    settings = [
        *CARTPOLE,
        "run.eval_every=1",
        "eval.episodes=5",
        "tracking.sinks=[]",
        "tracking.report=false",
        f"run.dir={path}",
        *overrides,
    ]
    assert train.run(load_config("experiment/gym_cartpole", settings)) == 0
    evaluations: dict[str, dict[str, float]] = json.loads((path / "summary.json").read_text())["evaluations"]
    return evaluations


def test_videos_of_every_so_many_evaluations_change_no_number(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain")
    recorded = run(tmp_path / "recorded", "tracking.video.episodes=3", "tracking.video.every=2")
    assert recorded == plain and not (tmp_path / "plain" / "videos").exists()
    counts = videos(tmp_path / "recorded")
    assert list(counts) == ["iteration_000000.mp4", "iteration_000002.mp4"]  # the first evaluation and the third
    for name, count in counts.items():
        longest = count - 50  # CartPole runs at 50 Hz, and a video ends with a second of standing still
        assert 1 <= longest <= 500
        assert longest >= plain[str(int(name[10:16]))]["eval/episode_length"] / 5


def test_eval_records_into_a_file_and_finds_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run")
    capsys.readouterr()
    lines = []
    for video in (None, tmp_path / "video.mp4"):
        assert train.evaluate(str(tmp_path / "run"), ["eval.episodes=6"], train.Evaluated(video=video)) == 0
        lines.append(capsys.readouterr().out.splitlines())
    assert lines[0][1].split("(")[0] == lines[1][1].split("(")[0]
    assert lines[1][2] == f"recorded the first 4: {tmp_path / 'video.mp4'}"
    assert (tmp_path / "video.mp4").stat().st_size > 1000
