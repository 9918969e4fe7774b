"""Rows of metrics.jsonl while it grows, when it is written anew, and when it is damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from embodyrl.runs.metrics import MetricsReader, read_json_lines, read_rows, seconds_left


def rows(numbers: Iterable[int]) -> str:
    return "".join(json.dumps({"iteration": number, "env/return": float(number)}) + "\n" for number in numbers)


def test_each_line_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path, read = tmp_path / "metrics.jsonl", []
    reader = MetricsReader(path)
    reader.read()
    assert not reader.rows, "it comes later"
    path.write_text(rows(range(1, 9)))
    for added in ("", '{"iteration": 9}\n{"iteration": 10', "}\n", '{"env/return": 1.0}\n[]\n\n'):
        with path.open("a") as file:
            file.write(added)
        reader.read()
        read.append([row["iteration"] for row in reader.rows][7:])
    assert read == [[8], [8, 9], [8, 9, 10], [8, 9, 10]] and reader.odd_lines == 2
    assert reader.latest == {"iteration": 10, "env/return": 8.0}


def test_a_file_that_a_resume_wrote_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, reader = tmp_path / "metrics.jsonl", MetricsReader(tmp_path / "metrics.jsonl")
    path.write_text(rows(range(1, 9)))
    reader.read()
    shutil.copy(path, other := tmp_path / "other")
    other.write_text(rows(range(1, 4)))
    os.replace(other, path)
    reader.read()
    assert [row["iteration"] for row in reader.rows] == [1, 2, 3]
    path.write_text(rows([7]))  # cut in place
    reader.read()
    assert [row["iteration"] for row in reader.rows] == [7] and reader.latest["env/return"] == 7.0


def test_a_reader_keeps_no_more_rows_than_it_is_asked_to(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 0, "eval/return": 5.0}) + "\n" + rows(range(1, 9)))
    reader = MetricsReader(tmp_path / "metrics.jsonl", most_rows=2)
    reader.read()
    assert [row["iteration"] for row in reader.rows] == [7, 8] and reader.latest["eval/return"] == 5.0


def test_of_a_file_that_is_over_the_last_line_counts_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == ([], 0)
    path.write_text('{"iteration": 1}\n{"iteration": 2, "x": NaN}\n{"iteration": true}\n{"iteration": 3}')
    assert read_rows(path) == ([{"iteration": 1}, {"iteration": 3}], 2)
    path.write_bytes(b'{"iteration": 1}\n\xff\xfe{"iteration"')
    assert read_rows(path) == ([{"iteration": 1}], 1)


def test_damaged_lines_of_json_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "000003.jsonl"
    assert list(read_json_lines(path)) == []
    path.write_bytes(b'{"a": 1}\n' + b"[" * 100_000 + b'\n\xff\n{"a": 2}\n{"a"')
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}]


def test_the_time_that_is_left_is_that_of_the_newest_iterations_with_their_evaluations() -> None:
    assert seconds_left([], 9) is None and seconds_left([{"iteration": 0, "time/eval": 1.0}], 9) is None
    timed = [{"iteration": n, "time/iteration": 100.0 if n < 5 else 2.0} for n in range(1, 25)]
    timed[-1]["time/eval"] = 10.0
    assert seconds_left(timed, 28) == pytest.approx((20 * 2.0 + 10.0) / 20 * 4)
    assert seconds_left(timed, 3) == 0.0
