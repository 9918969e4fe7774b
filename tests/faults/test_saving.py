"""Processes that are killed while they save, and disks that are full: a checkpoint that was published stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from shlex import quote
from subprocess import PIPE
from typing import Any

import programs
import pytest
from slow import rest_slow

from embodyrl.errors import DiskFull, RunError
from embodyrl.runner.rundir import RunDir, RunDirLostError
from embodyrl.runner.session import held

pytestmark = pytest.mark.faults

MOUNT = ["unshare", "--mount"]
SMALL = [
    *("env.num_envs=4", "env.workers=2", "env.max_episode_steps=40", "rollout.num_chunks=24", "algorithm.epochs=1"),
    *("algorithm.minibatches=2", "model.hidden_sizes=[8]", "run.eval_every=0", "run.iterations=100000"),
]


def saving(program: str, folder: Path, *words: str, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run one of the programs in `saving.py`."""
    # An interpreter: it forks hundreds of times, which a program that has imported everything takes longer for.
    command = [*prefix, sys.executable, str(Path(__file__).with_name("saving.py")), program, str(folder), *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    findings: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return findings


def test_killed_before_any_line_of_saving_a_whole_checkpoint_is_found(tmp_path: Path) -> None:
    findings = saving("every_line", tmp_path / "runs")
    for found in findings.values():
        assert len(found) > 80, "the lines of saving were not seen"
        contents = [content for content, _ in found]
        assert contents == sorted(contents, reverse=True), "once the new one is there it stays"  # "old 3" > "new"
        assert set(contents) == {"old 3", "new"} and {warning for _, warning in found} == {None}


@pytest.mark.parametrize("kills", rest_slow([4, 12]))
def test_killed_at_any_moment_nothing_published_is_lost_or_torn(tmp_path: Path, kills: int) -> None:
    findings = saving("any_moment", tmp_path / "run", str(kills))
    assert findings["kills"] == kills
    assert findings["torn"] or kills < 12, "the kills did not fall into the saving"


def may_mount(folder: Path) -> bool:
    """Whether this process may mount a file system of its own, that nobody else sees."""
    command = [*MOUNT, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("words", [[], pytest.param(["run.save_async=true"], marks=pytest.mark.slow)])
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(tmp_path: Path, words: list[str]) -> None:
    if not may_mount(tmp_path):
        pytest.skip("no right to mount a small disk (unshare --mount)")
    findings = saving("full_disk", tmp_path / "disk", *words, prefix=tuple(MOUNT))
    full, room = findings["full"], findings["room"]
    assert full["code"] == 1 and "Traceback" not in full["stderr"]
    failed = int(full["last"]) + 1
    assert f"error: the checkpoint of iteration {failed} could not be written to" in full["stderr"]
    assert "No space left on device" in full["stderr"] and "Make room, then continue: embodyrl resume" in full["stderr"]
    assert f"checkpoints/{full['last']} is whole and remains the last" in full["stderr"]
    assert full["left"][-2:] == [full["last"], "last"] and not full["left"][0].startswith(".")
    assert "No space left on device. Once that is fixed: embodyrl report" in room.pop("log"), "a report needs more"
    assert room == {"code": 0, "stderr": "", "last": "000008", "left": ["000008", "last"]}
    no_byte = findings["no_byte"]
    assert no_byte["code"] == 1 and no_byte["last"] == "000008"
    assert no_byte["stderr"].startswith("error: No space left on device"), no_byte["stderr"]
    told = no_byte["stderr"].replace(" (Nor could run.log be written: No space left on device.)", "")  # by its length
    assert told.endswith(f"Make room, then continue: embodyrl resume {quote(str(tmp_path / 'disk' / 'run'))}\n")


@pytest.mark.parametrize("words", [[], pytest.param(["run.save_async=true"], marks=pytest.mark.slow)])
def test_a_run_whose_folder_is_deleted_says_so_and_stops(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "run"
    settings = [*SMALL, "run.save_every=1", "tracking.sinks=[console,jsonl]", f"run.dir={path}"]
    command = ["-m", "embodyrl", "run", "experiment/gym_pendulum", *settings, *words]
    with programs.Program(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        while not (path / "checkpoints" / "last").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        path.rename(tmp_path / "gone")
        _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert err.startswith(f"error: {path} is not there any more: it was deleted or moved during the run, and")
    assert err.count("\n") == 1 and "Make room" not in err and not path.exists()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_lost_is_why_nothing_could_be_written(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "run"
    path.mkdir()
    with pytest.raises(RunDirLostError), held(RunDir(path)) as directory:
        path.rename(tmp_path / "elsewhere")
        if replaced:
            path.mkdir()
        with pytest.raises(RunDirLostError):
            directory.keep()
        (path / "videos" / "first.mp4").write_text("")


def test_a_log_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "run.log").symlink_to("/dev/full")
    with pytest.raises(RunError, match="the loss is not finite") as caught, held(RunDir(tmp_path)):
        raise RunError("the loss is not finite")
    assert caught.value.__notes__ == ["(Nor could run.log be written: No space left on device.)"]


@pytest.mark.parametrize("saved", [False, True])
def test_a_full_disk_names_resume_only_where_something_was_saved(tmp_path: Path, saved: bool) -> None:
    if saved:
        (tmp_path / "checkpoints" / "000003").mkdir(parents=True)
    with pytest.raises(DiskFull) as caught, held(RunDir(tmp_path)):
        Path("/dev/full").write_text("lost")
    go_on = f"embodyrl resume {quote(str(tmp_path))}" if saved else "the same command"
    assert str(caught.value) == f"No space left on device. Make room, then continue: {go_on}"
    assert str(caught.value) in (tmp_path / "run.log").read_text()
