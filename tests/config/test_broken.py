"""Every file in broken/ gives exactly the message beside it.

`python tests/config/test_broken.py` writes the messages anew, for instance after a component was added to a registry
whose names they list; read the difference before you keep it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from embodyrl.config import ConfigError, load_config

BROKEN = Path(__file__).parent / "broken"
CASES = sorted(path.stem for path in BROKEN.glob("*.yaml"))


def faults_of(name: str) -> str:
    """The message for a broken file, loaded from its own folder, without the folder's path."""
    with pytest.raises(ConfigError) as caught:
        load_config(f"{name}.yaml")
    return str(caught.value).replace(f"{BROKEN}{os.sep}", "").replace(str(BROKEN), "<folder>") + "\n"


@pytest.mark.parametrize("name", CASES)
def test_message_is_the_expected_one(name, monkeypatch):
    monkeypatch.chdir(BROKEN)
    assert faults_of(name) == (BROKEN / f"{name}.expected").read_text()


def test_there_are_enough_cases_and_no_stray_expectations():
    assert len(CASES) >= 20
    assert sorted(path.stem for path in BROKEN.glob("*.expected")) == CASES


def test_six_faults_come_at_once_in_the_order_of_the_file(monkeypatch):
    monkeypatch.chdir(BROKEN)
    with pytest.raises(ConfigError) as caught:
        load_config("six_faults.yaml")
    lines = [fault.location.line for fault in caught.value.faults]
    assert lines == sorted(lines) == [3, 5, 6, 9, 11, 12]
    assert str(caught.value).splitlines()[-1] == "6 faults; nothing was started."


def test_the_program_prints_them_to_stderr_and_exits_with_2():
    command = [sys.executable, "-m", "embodyrl", "run", "six_faults.yaml"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, cwd=BROKEN, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr == (BROKEN / "six_faults.expected").read_text()
    assert done.stdout == ""


if __name__ == "__main__":
    os.chdir(BROKEN)
    if len(sys.argv) > 1:
        Path(f"{sys.argv[1]}.expected").write_text(faults_of(sys.argv[1]))
    else:  # a process each, since what one file's plug-in registers would be listed in the messages of the next
        for case in CASES:
            subprocess.run([sys.executable, __file__, case], check=True)
