"""Some of the answers of `benchmarks/hub_answers.py`, and names that answers make paths of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from embodyrl.hub_answers import is_path

pytest.importorskip("huggingface_hub", reason="needs the extra hub")

DRIVER = Path(__file__).parents[2] / "benchmarks" / "hub_answers.py"


def test_an_odd_answer_of_a_mirror_is_one_sentence_and_writes_nothing_outside_the_cache() -> None:
    """Every seventeenth of the cases, in a program of its own: the library reads its variables when it is imported."""
    words = [sys.executable, str(DRIVER), "--every", "17"]
    place = {**os.environ, "PYTHONPATH": str(DRIVER.parents[1])}
    done = subprocess.run(words, env=place, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[0])["cases"] > 15


def test_paths_within_a_repository() -> None:
    good = ("config.json", "vlm/config.json", "a b.json", "é.json", ".gitattributes")
    bad = (
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a//b",
        "./a",
        "a\\b",
        "a\x00b",
        "a\x1b[2J",
        "x" * 1001,
        3,
        None,
        ["a"],
    )
    assert [name for name in good if not is_path(name)] == [] and [name for name in bad if is_path(name)] == []
