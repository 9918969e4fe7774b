"""Programs that tests start are processes like any other, though they are forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import programs
import psutil
import pytest

SHOW = "import json, os, sys; print(json.dumps([sys.argv, sys.path[0], os.getcwd(), os.getppid(), os.getpgid(0)]))"


@pytest.mark.parametrize(
    ("code", "ending"),
    [("", 0), ("import sys; sys.exit(7)", 7), ("raise ValueError(3)", 1), ("import os; os._exit(9)", 9)],
)
def test_its_exit_code_is_that_of_the_interpreter(code: str, ending: int) -> None:
    done = programs.run(["-c", code])
    assert done.returncode == ending and ("ValueError: 3" in done.stderr) == (ending == 1)


def test_it_sees_what_a_fresh_interpreter_would(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SHOW)
    for words in (["-c", SHOW, "a", "b"], ["program.py", "a"], ["-m", "program", "a"]):
        expected = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert programs.run(words, cwd=tmp_path, check=True).stdout == expected.stdout


def test_its_environment_is_the_one_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    show = "import os; print(sorted(os.environ), os.environ.get('OURS'))"
    assert programs.run(["-c", show], env={"SINGLE_RANK": "x"}).stdout == "['SINGLE_RANK'] None\n"
    assert programs.run(["-c", show]).stdout.endswith(" 1\n")


def test_it_is_a_child_of_ours_in_a_group_of_its_own_if_wanted_and_signals_reach_it() -> None:
    with programs.Program(["-c", "import time; time.sleep(60)"], start_new_session=True) as process:
        assert psutil.Process(process.pid).ppid() == os.getpid() and os.getsid(process.pid) == process.pid
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
    with programs.Program(["-c", "import time; time.sleep(60)"]) as process:
        assert os.getpgid(process.pid) == os.getpgid(0)
        process.kill()
        assert process.wait(20) == -signal.SIGKILL


def test_ctrl_c_is_an_exception_in_it() -> None:
    code = "import time\ntry: print('there', flush=True), time.sleep(60)\nexcept KeyboardInterrupt: print('caught')"
    with programs.Program(["-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=240)[0] == "caught\n" and process.returncode == 0


def test_its_orphans_are_not_ours() -> None:
    code = "import os\nif os.fork():\n    os._exit(0)\nimport time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    with programs.Program(["-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = psutil.Process(int(process.stdout.readline()))
        process.wait(20)
        while orphan.ppid() == process.pid:
            time.sleep(0.01)
        assert orphan.ppid() != os.getpid()
        orphan.kill()


def test_one_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run(["-c", "import time; time.sleep(60)"], timeout=0.2)
    assert not [each for each in programs.children_of(psutil.Process()) if each.status() == psutil.STATUS_ZOMBIE]
