"""Resume goes on as if the run had never stopped; evaluation, processes and folders leave no trace in the numbers."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import programs
import psutil
import pytest
from small_runs import WEIGHTS, Run, Runs, copy_of, resumed

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.errors import RunError, UserError, shell_command
from embodyrl.runner.checkpoint import CheckpointError, NoCheckpointError, verify
from embodyrl.runner.rundir import RunDirError

ONCE = "run.iterations=1"


@pytest.fixture(scope="module")
def whole(small_runs: Runs) -> Run:
    """The small run as it is, to be read."""
    return small_runs()


@pytest.fixture
def once(small_runs: Runs, tmp_path: Path) -> Path:
    """A run of one iteration, to be written to."""
    return copy_of(small_runs(ONCE), tmp_path / "run")


def test_a_run_that_is_told_to_go_on_equals_one_that_never_stopped(whole: Run, small_run: Callable[..., Run]) -> None:
    """Though simulators are in other processes, and another sink is there, which change nothing."""
    half = small_run("half", "run.iterations=3")
    again = resumed(half.path, "run.iterations=6", "env.workers=1", "tracking.sinks=[jsonl,console]")
    assert load_config(half.path / "config.yaml").config.run.iterations == 6, "a later resume would stop at once"
    assert len(whole.metrics()) == 7  # iteration 0 is the evaluation before training
    assert [row["iteration"] for row in again.metrics()] == list(range(7))
    found = again.merged()
    assert {"env/return_recent", "env/success_recent"} <= whole.metrics()[-1].keys(), (
        "of episodes before the resume, too"
    )
    for row in whole.metrics():
        # The half run evaluated at its own end, too; what both report is equal.
        other = found[row["iteration"]]
        assert {key: other[key] for key in row} == row
    assert again.contents(6) == whole.contents(6)
    assert {WEIGHTS, "trainer/engine.safetensors", "trainer/simulators/slot_0002.bin"} <= whole.contents(6).keys()
    assert again.summary["env_steps"] == whole.summary["env_steps"] == 6 * 4 * 12


def test_neither_evaluations_nor_the_number_of_processes_change_the_numbers(whole: Run, small_runs: Runs) -> None:
    assert len([row for row in whole.metrics() if "eval/return" in row]) > 2
    without = small_runs("run.eval_every=0", "env.workers=1")
    rows = whole.merged()
    for row in without.metrics():  # the last one is evaluated all the same
        assert {key: rows[row["iteration"]][key] for key in row} == row
    assert without.digest(6) == whole.digest(6)


def test_the_seed_changes_the_numbers(whole: Run, small_runs: Runs) -> None:
    assert small_runs("seed=2", "run.iterations=3", "run.eval_every=0").digest(3) != whole.digest(3)


def test_a_damaged_checkpoint_is_refused_by_file(once: Path) -> None:
    weights = once / "checkpoints" / "last" / WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"policy/model\.safetensors is altered"):
        train.resume(once, [])
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"policy/model\.safetensors is missing"):
        train.evaluate(once, [])


def test_only_settings_of_the_run_may_change_on_resume(once: Path) -> None:
    message = (
        r"algorithm\.gamma = 0\.5 \(it was (0\.\d+)\) cannot change when a run continues: "
        r"set algorithm\.gamma back to \1, or start a new run"
    )
    with pytest.raises(UserError, match=message) as caught:
        train.resume(once, ["algorithm.gamma=0.5"])
    assert caught.value.exit_code == 2  # nothing was started


def test_a_run_cannot_be_made_shorter_than_it_is(small_runs: Runs, tmp_path: Path) -> None:
    path = copy_of(small_runs("run.iterations=2", "run.eval_every=0"), tmp_path / "run")
    done = programs.run(["-m", "embodyrl", "resume", str(path), "run.iterations=1"])
    assert done.returncode == 2 and f"run.iterations = 1, but {path} has done 2: give a larger" in done.stderr
    assert load_config(path / "config.yaml").config.run.iterations == 2


def test_a_run_that_is_made_longer_says_where_schedules_jump(small_runs: Runs, tmp_path: Path) -> None:
    settings = ["run.iterations=2", "run.eval_every=0", "engine.optimizer.lr=6e-4"]
    said = {}
    for schedule in ("linear", "cosine", "constant"):
        run = small_runs(*settings, f"engine.optimizer.schedule={schedule}")
        path = copy_of(run, tmp_path / schedule)
        again = resumed(path, "run.iterations=6")
        said[schedule] = re.findall("warning: (run.iterations is .*)", again.log())
        before, after = (again.merged()[iteration]["train/learning_rate"] for iteration in (2, 3))
        if schedule != "constant":
            assert f"engine.optimizer.lr continues at {after:.3g}, after {before:.3g}" in said[schedule][0]
    begins = "run.iterations is 6 now, after 2, and schedules follow it: engine.optimizer.lr continues at "
    assert said == {
        "linear": [f"{begins}0.0004, after 0.0003"],
        "cosine": [f"{begins}0.00045, after 0.0003"],
        "constant": [],
    }
    assert not re.search("schedules follow", resumed(tmp_path / "linear").log().rpartition("resume ")[2]), (
        "no new length"
    )


def test_a_run_that_cannot_learn_says_so_once_and_changes_nothing(small_runs: Runs) -> None:
    """No episode of Pendulum succeeds here, so with rewards for success alone every group ends alike."""
    hopeless = ["algorithm=grpo", "rollout.episodes=whole", "env.max_episode_steps=10", "rollout.num_chunks=10"]
    hopeless += ["rollout.group_size=2", "algorithm.reward=success", "env.success_return=0.0"]
    run = small_runs(*hopeless, "run.save_every=1", "run.eval_every=0")
    assert run.log().count("warning: nothing was learned in 3 iterations") == 1 and "(success 0.00)" in run.log()
    rows = [row for row in run.metrics() if row["iteration"]]
    assert len(rows) == 6 and all(row["train/epochs"] == 0 for row in rows)
    assert run.digest(1) == run.digest(6)


def test_a_run_directory_is_never_overwritten(small_runs: Runs) -> None:
    run = small_runs(ONCE)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    with pytest.raises(RunDirError, match=r"exists already and is never overwritten.*embodyrl resume"):
        small_runs.fresh(run.path)
    assert before == {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}


def test_a_start_without_results_leaves_its_folder_to_the_next(small_run: Callable[..., Run], tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(RunError, match="env"):
        small_run("run", "env.kwargs={g: nonsense}", "tracking.sinks=[jsonl,tensorboard]")
    assert "failed: " in (path / "run.log").read_text()
    own = path / "workers" / "notes.txt"
    own.write_text("somebody's own")
    with pytest.raises(RunDirError, match="never overwritten"):
        small_run("run", "run.iterations=1")
    assert "nonsense" in (path / "config.yaml").read_text() and own.read_text() == "somebody's own"
    own.unlink()
    run = small_run("run", "run.iterations=1")
    assert "failed: " not in (path / "run.log").read_text() and len(run.metrics()) == 2
    with pytest.raises(RunDirError, match="never overwritten"):
        small_run("run")


def test_a_run_that_saved_nothing_says_what_to_do_with_its_folder(small_runs: Runs, once: Path) -> None:
    shutil.rmtree(once / "checkpoints")
    with pytest.raises(RunDirError, match=r"saved nothing to continue from, so remove the folder"):
        small_runs.fresh(once)
    with pytest.raises(CheckpointError, match=r"stopped before it saved one: remove the folder"):
        train.resume(once, [])


def test_a_run_that_is_good_enough_at_once_stops_and_is_saved(small_runs: Runs) -> None:
    run = small_runs("env.success_return=-1.0e9", "run.stop_at_success=0.5")
    assert run.summary["iterations"] == 0 and run.summary["eval/success_once"] == 1.0
    assert train.evaluate(run.path, []) == 0


def test_a_run_that_is_done_says_so_and_starts_nothing(once: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in once.rglob("*") if path.name != "run.log"}
    assert train.resume(once, []) == 0
    more = f"{shell_command('resume', once)} run.iterations=N"
    assert capsys.readouterr().out == f"{once} is done. For more: {more}\n"
    assert before == {path: path.stat().st_mtime_ns for path in once.rglob("*") if path.name != "run.log"}


def test_a_report_is_of_the_newest_end_or_there_is_none(once: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, short = once / "report.html", "run.eval_every=0"
    resumed(once, "run.iterations=2", "tracking.report=true", short)
    assert page.is_file() and f"\nreport: {page}\n" in capsys.readouterr().out
    resumed(once, "run.iterations=3", "tracking.report=false", short)
    assert not page.exists() and "report:" not in capsys.readouterr().out


def test_a_checkpoint_that_is_taken_for_a_run_stays_as_it_is(once: Path) -> None:
    said = f"is a checkpoint, and only a whole run can continue: {shell_command('resume', once)}"
    with pytest.raises(RunDirError, match=f"{re.escape(said)}$"):
        train.resume(once / "checkpoints" / "last", [])
    verify((once / "checkpoints" / "last").resolve())


def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"is not a run directory \(no config\.yaml\)"):
        train.resume(tmp_path, [])


def test_a_run_in_use_is_left_alone_and_a_signal_saves_it_to_go_on(small_runs: Runs, tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = small_runs.words(path, "run.iterations=100000", "env.workers=1", "run.eval_every=0")
    process = programs.Program(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline, metrics = time.monotonic() + 240, path / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    children = programs.children_of(psutil.Process(process.pid), recursive=True)
    with pytest.raises(RunDirError, match="in use by another process"):
        train.resume(path, [])
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, (out, err)
    assert "stopping after this iteration" in err and "stopped by SIGINT, saved" in out
    assert not psutil.wait_procs(children, timeout=60)[1], "simulator processes are left"
    done = Run(path).summary["iterations"]
    assert resumed(path, f"run.iterations={done + 1}").summary["iterations"] == done + 1


def test_what_is_no_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="does not exist: give a run directory"):
        train.evaluate(tmp_path / "nowhere", [])
    with pytest.raises(NoCheckpointError, match=r"is not a checkpoint \(no manifest\.json\)"):
        train.evaluate(tmp_path, [])
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no checkpoint \(no checkpoints/last\)"):
        train.evaluate(tmp_path, [])
