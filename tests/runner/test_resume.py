"""Resume goes on as if the run had never stopped; evaluation, processes and folders leave no trace in the numbers."""

from __future__ import annotations

import os
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
from small_runs import SMALL, Run

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.errors import RunError, UserError, shell_command
from embodyrl.runner.checkpoint import CheckpointError, verify
from embodyrl.runner.rundir import RunDirError

WEIGHTS, OPTIMISER, SIMULATOR = (
    "policy/model.safetensors",
    "trainer/engine.safetensors",
    "trainer/simulators/slot_0002.bin",
)


def test_a_resumed_run_equals_one_that_never_stopped(small_run: Callable[..., Run]) -> None:
    whole = small_run("whole")
    half = small_run("half", "run.iterations=3")
    assert train.resume(half.path, ["run.iterations=6"]) == 0
    resumed = Run(half.path)
    assert load_config(half.path / "config.yaml").config.run.iterations == 6, "a later resume would stop at once"
    assert len(whole.metrics()) == 7  # iteration 0 is the evaluation before training
    assert [row["iteration"] for row in resumed.metrics()] == list(range(7))
    final_only = {row["iteration"]: row for row in resumed.metrics()}
    for row in whole.metrics():
        # The half run evaluated at its own end, too; what both report is equal.
        other = final_only[row["iteration"]]
        assert {key: other[key] for key in row} == row
    for name in (WEIGHTS, OPTIMISER, SIMULATOR):
        assert whole.digest(6, name) == resumed.digest(6, name), name
    assert resumed.summary["env_steps"] == whole.summary["env_steps"] == 6 * 4 * 24


def test_the_reference_policy_and_the_groups_that_wait_survive_a_resume(small_run: Callable[..., Run]) -> None:
    settings = [
        *("algorithm=dapo", "rollout.episodes=whole", "rollout.num_chunks=40", "rollout.group_size=2"),
        *("algorithm.reward=dense", "algorithm.filter.name=accuracy", "algorithm.filter.accuracy_low=0.0"),
        *("env.success_return=-270.0", "algorithm.loss=decoupled_ppo", "algorithm.kl_coef=0.1", "run.save_every=1"),
    ]
    whole, half = small_run("whole", *settings), small_run("half", *settings, "run.iterations=3")
    rows = {row["iteration"]: row for row in whole.metrics()}
    assert rows[3]["filter/groups_waiting"] > 0, "nothing waits where the run is cut; choose another success_return"
    assert rows[6]["train/reference_kl"] > 0
    assert train.resume(half.path, ["run.iterations=6"]) == 0
    resumed = Run(half.path)
    for row in resumed.metrics()[4:]:
        assert row == {key: rows[row["iteration"]][key] for key in row}
    for name in (WEIGHTS, OPTIMISER):
        assert whole.digest(6, name) == resumed.digest(6, name), name


def test_evaluation_does_not_touch_training(small_run: Callable[..., Run]) -> None:
    with_evaluation, without = small_run("with", "run.eval_every=1"), small_run("without", "run.eval_every=0")
    assert with_evaluation.digest(6, WEIGHTS) == without.digest(6, WEIGHTS)


def test_the_number_of_processes_does_not_change_the_numbers(small_run: Callable[..., Run]) -> None:
    two, one = small_run("two"), small_run("one", "env.workers=1")
    assert two.metrics() == one.metrics()
    assert two.digest(6, WEIGHTS) == one.digest(6, WEIGHTS)


def test_the_seed_changes_the_numbers(small_run: Callable[..., Run]) -> None:
    assert small_run("one").digest(6, WEIGHTS) != small_run("two", "seed=2").digest(6, WEIGHTS)


def test_a_damaged_checkpoint_is_refused_by_file(small_run: Callable[..., Run]) -> None:
    run = small_run("run", "run.iterations=3")
    weights = run.path / "checkpoints" / "last" / WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"policy/model\.safetensors is altered"):
        train.resume(run.path, [])
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"policy/model\.safetensors is missing"):
        train.evaluate(run.path, [])


def test_only_settings_of_the_run_may_change_on_resume(small_run: Callable[..., Run]) -> None:
    run = small_run("run", "run.iterations=1")
    message = (
        r"algorithm\.gamma = 0\.5 \(it was (0\.\d+)\) cannot change when a run goes on: "
        r"set algorithm\.gamma back to \1, or start a new run"
    )
    with pytest.raises(UserError, match=message) as caught:
        train.resume(run.path, ["algorithm.gamma=0.5"])
    assert caught.value.exit_code == 2  # nothing was started


def test_a_run_that_cannot_learn_says_so_once_and_changes_nothing(small_run: Callable[..., Run]) -> None:
    """No episode of Pendulum succeeds here, so with rewards for success alone every group ends alike."""
    hopeless = ["algorithm=grpo", "rollout.episodes=whole", "rollout.num_chunks=40", "rollout.group_size=2"]
    run = small_run("hopeless", *hopeless, "algorithm.reward=success", "env.success_return=0.0", "run.save_every=1")
    log = (run.path / "run.log").read_text()
    assert log.count("warning: nothing was learned in 3 iterations") == 1 and "(success 0.00)" in log
    assert all(row["train/epochs"] == 0 for row in run.metrics() if row["iteration"])
    assert run.digest(1, "policy/model.safetensors") == run.digest(6, "policy/model.safetensors")


def test_a_run_directory_is_never_overwritten(small_run: Callable[..., Run]) -> None:
    run = small_run("run", "run.iterations=1")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    with pytest.raises(RunDirError, match=r"exists already and is never overwritten.*embodyrl resume"):
        small_run("run")
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


def test_a_run_that_saved_nothing_says_what_to_do_with_its_folder(small_run: Callable[..., Run]) -> None:
    run = small_run("run", "run.iterations=1")
    shutil.rmtree(run.path / "checkpoints")
    with pytest.raises(RunDirError, match=r"saved nothing to go on from, so remove the folder"):
        small_run("run")
    with pytest.raises(CheckpointError, match=r"stopped before it saved one: remove the folder"):
        train.resume(run.path, [])


def test_a_run_that_is_good_enough_at_once_stops_and_is_saved(small_run: Callable[..., Run]) -> None:
    run = small_run("run", "env.success_return=-1.0e9", "run.stop_at_success=0.5")
    assert run.summary["iterations"] == 0 and run.summary["eval/success_once"] == 1.0
    assert train.evaluate(run.path, []) == 0


def test_a_run_that_is_done_says_so_and_starts_nothing(
    small_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run("run", "run.iterations=1")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.name != "run.log"}
    capsys.readouterr()
    assert train.resume(run.path, []) == 0
    more = f"{shell_command('resume', run.path)} run.iterations=N"
    assert capsys.readouterr().out == f"{run.path} is done. For more: {more}\n"
    assert before == {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.name != "run.log"}


def test_a_report_is_of_the_newest_end_or_there_is_none(
    small_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run("run", "run.iterations=1", "tracking.report=true")
    page = run.path / "report.html"
    assert page.is_file() and f"\nreport: {page}\n" in capsys.readouterr().out
    assert train.resume(run.path, ["run.iterations=2", "tracking.report=false"]) == 0
    assert not page.exists() and "report:" not in capsys.readouterr().out


def test_a_checkpoint_that_is_taken_for_a_run_stays_as_it_is(small_run: Callable[..., Run]) -> None:
    run = small_run("run", "run.iterations=1")
    said = f"is a checkpoint, and only a whole run can go on: {shell_command('resume', run.path)}"
    with pytest.raises(RunDirError, match=f"{re.escape(said)}$"):
        train.resume(run.path / "checkpoints" / "last", [])
    verify((run.path / "checkpoints" / "last").resolve())


def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"is not a run directory \(no config\.yaml\)"):
        train.resume(tmp_path, [])


def start(path: Path, *overrides: str) -> subprocess.Popen[str]:
    words = ["-m", "embodyrl", "run", "experiment/gym_pendulum", *SMALL, "run.iterations=100000", f"run.dir={path}"]
    return programs.Program([*words, *overrides], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_iterations(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    metrics = path / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not get going"
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_can_go_on(tmp_path: Path, number: signal.Signals, code: int) -> None:
    path = tmp_path / "run"
    process = start(path)
    wait_for_iterations(path, 2, process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (out, err)
    assert "stopping after this iteration" in err and f"stopped by {number.name}, saved" in out
    assert not psutil.wait_procs(children, timeout=10)[1], "simulator processes are left"
    done = Run(path).summary["iterations"]
    assert train.resume(path, [f"run.iterations={done + 1}"]) == 0
    assert Run(path).summary["iterations"] == done + 1


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    # One iteration of this run takes minutes, so that nothing but the second signal can end it soon.
    process = start(path, "rollout.num_chunks=100000", "run.eval_every=0")
    deadline = time.monotonic() + 60
    while not (path / "metrics.jsonl").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    time.sleep(2.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert not psutil.wait_procs(children, timeout=10)[1], "simulator processes are left"


def test_a_killed_simulator_ends_the_run_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = start(path)
    wait_for_iterations(path, 2, process)
    started = psutil.Process(process.pid).children(recursive=True)
    victims = [child for child in started if not child.children()]  # not the one that they are forked from
    os.kill(victims[0].pid, signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "Traceback" not in err and str(victims[0].pid) in err and "SIGKILL" in err, err
    assert not psutil.wait_procs(victims, timeout=10)[1]


def test_a_run_in_use_cannot_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = start(path)
    try:
        wait_for_iterations(path, 3, process)
        with pytest.raises(RunDirError, match="in use by another process"):
            train.resume(path, [])
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_what_is_no_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist: give a run directory"):
        train.evaluate(tmp_path / "nowhere", [])
    with pytest.raises(CheckpointError, match=r"is not a checkpoint \(no manifest\.json\)"):
        train.evaluate(tmp_path, [])
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no checkpoint \(no checkpoints/last\)"):
        train.evaluate(tmp_path, [])
