from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # where `standin` is

from standin import build  # noqa: E402

Table = dict[str, dict[str, Any]]


@pytest.fixture
def standin() -> None:
    """Skip where there can be no stand-in."""
    if (reason := build.missing()) is not None:
        pytest.skip(reason)


@pytest.fixture
def play(standin: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Table]:
    """Rows of `table.py`, computed in a process of its own (the stand-in changes torch for good), once for all
    processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base

    def played(*cases: str) -> Table:
        file = shared / f"{'+'.join(cases).replace('/', '-')}.json"
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.is_file():
                command = [sys.executable, str(HERE / "table.py"), "--json", str(file), *cases]
                done = subprocess.run(command, capture_output=True, text=True, timeout=280)
                assert file.is_file(), done.stdout + done.stderr
        found: Table = json.loads(file.read_text())
        return found

    return played
