"""`embodyrl watch` on a real run: while it goes on, when it is killed, when it has gone on and ended."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import programs
import pytest
from rich.console import Console

from embodyrl.cli.watch import WatchError, curve, draw, draw_all, find_runs, watch
from embodyrl.errors import has_controls, without_controls
from embodyrl.runner.rundir import RunDir
from embodyrl.runs.record import RunRecord, Status, lock_holder

CONFIG = """
defaults: [env: gym/cartpole, model: mlp, algorithm: ppo, _self_]
run: {name: watched, iterations: 100000, eval_every: 2, save_every: 4}
env: {num_envs: 2, workers: 1}
rollout: {num_chunks: 16}
eval: {episodes: 2}
algorithm: {epochs: 1, minibatches: 1}
tracking: {sinks: [jsonl], report: false}
"""


def text_of(view: RunRecord, width: int = 80) -> str:
    paper = Console(file=io.StringIO(), width=width, color_system=None)
    paper.print(draw(view, width), soft_wrap=True)
    return paper.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def until(run: RunRecord, what: str, deadline_s: float = 240.0) -> RunRecord:
    """Look until the view says something; fails after the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if run.path.joinpath("config.yaml").exists() and re.search(what, text_of(view := run.again())):
            return view
        time.sleep(0.1)
    raise AssertionError(f"never saw {what!r}: {text_of(run.again())}")


def test_a_run_is_watched_while_it_goes_on_is_killed_and_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = tmp_path / "my.yaml", tmp_path / "runs" / "one"
    config.write_text(CONFIG)
    watched = RunRecord(folder)
    words = ["-m", "embodyrl", "run", config, f"run.dir={folder}"]
    process = programs.Program(words, stdout=subprocess.DEVNULL)
    try:
        view = until(watched, r"iteration +([5-9]|[1-9][\d,]+) of 100,000 .* left")
        assert view.status is Status.running and view.process == process.pid
        shown = text_of(view)
        assert "held out" in shown and re.search(r"memory +[\d.]+ GiB in \d+ processes", shown)
        assert re.search(r"evaluation +success [\d.]+ \[[\d.]+, [\d.]+\]", shown)
        assert max(map(len, shown.replace(str(folder), "").splitlines())) <= 80
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    shown = text_of(until(watched, "died: no process here works on it"))
    assert f"  next        embodyrl resume {shlex.quote(str(folder))}\n" in shown

    reached = watched.again().last_iteration
    assert programs.run(["-m", "embodyrl", "resume", folder, f"run.iterations={reached + 2}"]).returncode == 0
    ended = watched.again()
    assert ended.status is Status.done and ended.last_iteration == ended.iterations
    assert [row["iteration"] for row in ended.rows] == sorted({row["iteration"] for row in ended.rows})

    assert watch(tmp_path, once=True) == 0
    assert re.search(r"runs/one +done +\d+/\d+  success", capsys.readouterr().out)


def run_folder(folder: Path, log: str) -> RunRecord:
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {name: made, iterations: 5}\n")
    (folder / ".lock").touch()
    if log:
        (folder / "run.log").write_text("".join(f"2026-01-31 12:00:00  {line}\n" for line in log.split("\n")))
    return RunRecord(folder)


def test_what_has_not_started_has_failed_or_hangs_says_so(tmp_path: Path) -> None:
    waiting = run_folder(tmp_path / "waiting", "")
    assert waiting.status is Status.not_started and "not started: no results" in text_of(waiting)
    failed = run_folder(tmp_path / "failed", "starting\nwarning: odd\nfailed: env worker 0 died (SIGKILL)")
    assert failed.status is Status.failed and "because     env worker 0 died (SIGKILL)" in text_of(failed)
    assert "12:00:00   warning: odd" in text_of(failed)
    assert "resume" not in text_of(failed), "nothing was saved"

    (tmp_path / "hangs").mkdir()
    held = RunDir(tmp_path / "hangs")
    try:
        assert lock_holder(held.path / ".lock") == os.getpid()
        (held.path / "config.yaml").write_text("run: {name: hangs, iterations: 5}\n")
        (held.path / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "time/iteration": 1.0}) + '\n{"iterat')
        os.utime(held.path / "metrics.jsonl", (time.time() - 600.0,) * 2)
        hangs = RunRecord(held.path)
        assert hangs.last_iteration == 1 and "nothing was written for 10:00" in text_of(hangs)
    finally:
        held.close()
    assert lock_holder(held.path / ".lock") is None
    every = [RunRecord(path) for path in find_runs(tmp_path)]
    paper = Console(file=io.StringIO(), width=60, color_system=None)
    paper.print(draw_all(every, tmp_path, 60))
    lines = paper.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("  ")[0] for line in lines] == ["failed", "hangs", "waiting"]


def test_a_strangers_run_gives_the_terminal_no_orders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
    for run in (tmp_path / "one", tmp_path / f"two{order}"):
        run.mkdir()
        config = {"run": {"name": f"pendulum{order}", "iterations": 5}}
        (run / "config.yaml").write_text(json.dumps(config))
        (run / ".lock").touch()
        now = "2026-01-31 12:00:00"
        (run / "run.log").write_text(f"{now}  warning: task {order}\n{now}  failed: {order}\n")
    watch(tmp_path / "one", once=True)
    watch(tmp_path, once=True)
    shown = capsys.readouterr().out + text_of(RunRecord(tmp_path / "one"))
    assert not [character for character in set(shown) if has_controls(character)]
    escaped = without_controls(order)
    assert all(f"{what}{escaped}" in shown for what in ("pendulum", "two", "because     ", "task "))


def test_curves_are_as_long_as_there_is_room_and_flat_ones_are_low() -> None:
    assert curve([0.0, 1.0], 30) == "▁█  0.00 -> 1.00"
    assert curve([float(number) for number in range(100)], 10).partition("  ")[0] == "▁▂▃▃▄▅▆▆▇█"
    assert curve([2.0] * 3, 30).startswith("▁▁▁")


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WatchError, match="no such folder"):
        find_runs(tmp_path / "nothing")
    with pytest.raises(WatchError, match="holds no run"):
        find_runs(tmp_path)
