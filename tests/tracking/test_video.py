from __future__ import annotations

import re
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

import embodyrl
from embodyrl import api
from embodyrl.config import ConfigError, load_config
from embodyrl.errors import MissingPackageError
from embodyrl.registry import Requirement
from embodyrl.runner import start_rules
from embodyrl.tracking.video import TILE, TiledVideo

SOURCES = Path(embodyrl.__file__).parent

BAR = 20


def frames(color: tuple[int, int, int], count: int, height: int = 120, width: int = 240) -> list[NDArray[np.uint8]]:
    return [np.full((height, width, 3), color, np.uint8) for _ in range(count)]


def read(path: Path) -> tuple[NDArray[np.uint8], float]:
    """All images `[N, H, W, 3]` of a video, and images per second."""
    with av.open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]), rate


def near(image: NDArray[np.uint8], color: tuple[int, int, int]) -> bool:
    return bool((np.abs(image.reshape(-1, 3).mean(0) - color) < 12).all())


RED, BLUE, GREEN_BAR, RED_BAR, GREY_BAR = (200, 30, 30), (30, 30, 200), (22, 128, 61), (176, 42, 42), (60, 66, 78)


def test_tiles_run_side_by_side_and_carry_their_outcome(tmp_path: Path) -> None:
    path = tmp_path / "videos" / "video.mp4"
    with TiledVideo(path, ["first", "second"], fps=20) as video:
        video.add(0, frames(RED, 3))
        video.add(1, frames(BLUE, 5))
        video.end(0, success=True)
        video.end(1, success=False)
    images, rate = read(path)
    height = BAR + TILE // 2
    assert images.shape == (5 + 20, height, 2 * TILE, 3) and rate == 20  # a second at the end
    assert all(near(image[BAR:, :TILE], RED) for image in images)  # the shorter one shows its last image
    assert all(near(image[BAR:, TILE:], BLUE) for image in images)
    empty_of_text = np.s_[2:18, TILE // 2 - 30 : TILE // 2 + 20]
    assert near(images[0][empty_of_text], GREY_BAR)
    assert near(images[-1][empty_of_text], GREEN_BAR)
    assert near(images[-1][:, TILE:][empty_of_text], RED_BAR)
    assert (images[-1][:BAR, TILE - 60 : TILE] > 200).any()  # something is written there


def test_a_video_of_tiles_that_follow_each_other_starts_each_at_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    with TiledVideo(path, ["first", "second", "third"], fps=12.5) as video:
        for tile in range(3):
            video.add(tile, frames(RED, 4))
            video.end(tile, success=True)
    images, rate = read(path)
    assert images.shape[0] == 4 + 13 and rate == 12.5
    assert images.shape[1] == 2 * (BAR + TILE // 2)
    assert near(images[0][-TILE // 2 :, TILE:], (0, 0, 0))  # three tiles leave a dark corner


def test_nothing_is_left_of_a_video_that_failed_or_has_no_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"float64 \(3, 3, 3\), want uint8 \(H, W, 3\)"):  # noqa: SIM117
        with TiledVideo(tmp_path / "video.mp4", ["one"], fps=10) as video:
            video.add(0, frames(RED, 2))
            video.add(0, [np.zeros((3, 3, 3))])  # type: ignore[list-item]
    with TiledVideo(tmp_path / "empty.mp4", ["one"], fps=10):
        pass
    assert list(tmp_path.iterdir()) == []


def test_episodes_that_were_cut_off_end_where_they_are(tmp_path: Path) -> None:
    with TiledVideo(tmp_path / "video.mp4", ["one", "two"], fps=10) as video:
        video.add(0, frames(RED, 3))
        video.add(1, frames(BLUE, 1))
    images, _ = read(tmp_path / "video.mp4")
    assert len(images) == 3 + 10


def test_videos_alone_need_the_package_that_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = [path for path in SOURCES.rglob("*.py") if re.search(r"^(import av$|from av\b)", path.read_text(), re.M)]
    assert not everyone, "no module imports it before there is a video"
    monkeypatch.setitem(sys.modules, "av", None)
    message = "videos are written with package 'av', which cannot be imported here .*: pip install av"
    with pytest.raises(MissingPackageError, match=message):
        TiledVideo(tmp_path / "a.mp4", ["one"], fps=10.0)
    with pytest.raises(MissingPackageError, match=message):
        api._video(tmp_path / "a.mp4")
    monkeypatch.setattr(start_rules, "PYAV", Requirement(module="no_such_package_xyz", install="pip install xyz"))
    words = ["tracking.video.episodes=2", f"run.dir={tmp_path / 'new'}"]
    with pytest.raises(ConfigError, match=r"episodes = 2, but videos .* - run: pip install xyz, or set .* to 0"):
        load_config("gym_pendulum", words, also=[start_rules.start_rules])
    assert load_config("gym_pendulum", [words[1], "tracking.video.episodes=0"], also=[start_rules.start_rules])
