"""What run directories say: where there are some, which files are read, and who holds a lock."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tracking"))  # where `reports` is

from reports import make_run

from embodyrl.runner.rundir import RunDir
from embodyrl.runs import published, runs_below
from embodyrl.runs.record import RecordError, RunRecord, Status, SummaryError, find_runs, lock_holder, read_run


def test_runs_are_found_by_name_outside_of_hidden_folders_and_of_other_runs(tmp_path: Path) -> None:
    for name in ("b", "a/deep", "a/deep/checkpoints/000001", ".configs/c", "x/y/z"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    (tmp_path / "link").symlink_to(tmp_path / "b")

    def names(depth: int, **options: bool) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in runs_below(tmp_path, depth, **options)]

    assert names(2) == ["a/deep", "b", "link"] and names(3, follow_links=False) == ["a/deep", "b", "x/y/z"]
    assert find_runs(tmp_path / "b") == [tmp_path / "b"]
    with pytest.raises(RecordError, match=r"holds no config\.yaml, nor does a folder below it"):
        find_runs(tmp_path / "x" / "nothing")


def test_checkpoints_come_in_the_order_of_their_iterations(tmp_path: Path) -> None:
    for name in ("000010", "000002", "000002-2", "1000000", "notes", ".000003.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "last").symlink_to("000010")
    assert [place.name for _, place in published(tmp_path)] == ["000002", "000002-2", "000010", "1000000"]
    assert published(tmp_path / "checkpoints") == []


def test_a_record_has_what_the_files_have(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert (run.seed, run.iterations, run.last_iteration, run.env_steps) == (1, 3, 3, 300.0)
    assert [(each.iteration, each.env_steps, each.success) for each in run.evaluations] == [
        (0, 0.0, 0.0),
        (3, 300.0, 0.75),
    ]
    assert run.final is not None and len(run.final.episodes) == 36 and run.evaluations[0].episodes == []
    assert run.state == ("done", "Done after 3 iterations.") and run.status is Status.died, "its log says no end"
    (tmp_path / "run" / "run.log").write_text(
        "2026-01-31 12:00:00  next: embodyrl eval\n2026-01-31 12:00:00      \x1b[2J"
    )
    ended = RunRecord(tmp_path / "run")
    assert ended.status is Status.done and "\x1b" not in ended.log[1]


def test_a_damaged_summary_is_an_error_where_it_is_wanted_and_else_none(tmp_path: Path) -> None:
    make_run(tmp_path)
    whole = json.loads((tmp_path / "summary.json").read_text())
    for damage in ({"wall_s": "3"}, {"evaluations": {"last": whole["evaluations"]["3"]}}, {"evaluations": {"1": {}}}):
        (tmp_path / "summary.json").write_text(json.dumps(whole | damage))
        assert RunRecord(tmp_path).summary is None and len(RunRecord(tmp_path).evaluations) == 2
        with pytest.raises(SummaryError, match="is damaged: have it written anew with embodyrl resume"):
            read_run(tmp_path)


def test_the_kernel_names_the_process_that_holds_a_lock(tmp_path: Path) -> None:
    assert lock_holder(tmp_path / ".lock") is None
    held = RunDir(tmp_path)
    try:
        assert lock_holder(tmp_path / ".lock") == RunRecord(tmp_path).process == os.getpid()
        assert RunRecord(tmp_path).status is Status.running
    finally:
        held.close()
    assert lock_holder(tmp_path / ".lock") is None and RunRecord(tmp_path).status is Status.not_started
