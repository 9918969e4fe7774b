"""Videos of evaluations: the right episodes, labelled with what came of them, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import av
import pytest
from small_runs import Runs, evaluation_in

from embodyrl.cli import train

SETTINGS = [
    *("env.num_envs=2", "env.workers=1", "env.max_episode_steps=25", "rollout.num_chunks=8", "algorithm.minibatches=2"),
    *("run.iterations=2", "run.eval_every=1", "eval.episodes=5", "tracking.sinks=[]", "tracking.report=false"),
]


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that the tests share, and only read."""
    return Runs(tmp_path_factory.mktemp("cartpole"), "experiment/gym_cartpole", SETTINGS)


def videos(run_dir: Path) -> dict[str, int]:
    """Images in every video of a run."""
    counts = {}
    for path in sorted((run_dir / "videos").glob("*")):
        with av.open(str(path)) as container:
            counts[path.name] = sum(1 for _ in container.decode(video=0))
    return counts


def test_videos_of_every_so_many_evaluations_change_no_number(cartpole: Runs) -> None:
    plain, recorded = cartpole(), cartpole("tracking.video.episodes=3", "tracking.video.every=2")
    evaluations = plain.summary["evaluations"]
    assert recorded.summary["evaluations"] == evaluations and not (plain.path / "videos").exists()
    counts = videos(recorded.path)
    assert list(counts) == ["iteration_000000.mp4", "iteration_000002.mp4"]  # the first evaluation and the third
    for name, count in counts.items():
        longest = count - 50  # CartPole runs at 50 Hz, and a video ends with a second of standing still
        assert 1 <= longest <= 25
        assert longest >= evaluations[str(int(name[10:16]))]["eval/episode_length"] / 5


def test_eval_records_into_a_file_and_finds_the_same(
    cartpole: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, video = cartpole(), tmp_path / "video.mp4"
    said = []
    for recorded in (None, video):
        capsys.readouterr()
        assert train.evaluate(str(run.path), ["eval.episodes=6"], video=recorded) == 0
        said.append(capsys.readouterr().out)
    assert evaluation_in(said[0]) == evaluation_in(said[1])
    assert f"recorded the first 4: {video}" in said[1].splitlines()
    assert video.stat().st_size > 1000
