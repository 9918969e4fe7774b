"""Rows 10 and 11 of the fault matrix: signals as terminals, GNU timeout, clusters and service managers send them."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, Signals
from typing import Any

import programs
import psutil
import pytest
from slow import rest_slow

from embodyrl.runner import stopping
from embodyrl.runner.stopping import Stopper

pytestmark = [pytest.mark.faults]

EMBODYRL = ("-m", "embodyrl")
SMALL = [
    "env.num_envs=4",
    "env.workers=2",
    "env.max_episode_steps=40",
    "rollout.num_chunks=200",
    "algorithm.epochs=1",
    "algorithm.minibatches=2",
    "model.hidden_sizes=[8]",
    "eval.episodes=4",
    "run.eval_every=0",
    "run.save_every=0",
    "run.iterations=100000",
    "tracking.report=false",
]
RUN = (*EMBODYRL, "run", "experiment/gym_pendulum", *SMALL)
A_SECOND, SECONDS = "rollout.num_chunks=2000", "rollout.num_chunks=3000"
"""How long one iteration takes."""
TIMEOUT = shutil.which("timeout")
needs_timeout = pytest.mark.skipif(TIMEOUT is None, reason="GNU timeout is not installed")
NOHUP = "nohup"
"""In front of a program: have it started with SIGHUP ignored, which is all that nohup does away from terminals."""


@dataclass
class Started:
    """A program in a session of its own, as a shell would start it."""

    process: subprocess.Popen[str]
    path: Path
    """Its run directory."""

    def wait_for(self, condition: Callable[[], bool], seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it does not get going"
            time.sleep(0.02)

    def wait_for_iterations(self, count: int) -> Started:
        metrics = self.path / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= count)
        return self

    def signal_group(self, number: Signals) -> None:
        os.killpg(self.process.pid, number)

    def signal_everyone(self, number: Signals) -> None:
        """Every process that belongs to it, as a batch system or a service manager does."""
        for each in [*programs.children_of(psutil.Process(self.process.pid), recursive=True), self.process]:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(each.pid, number)

    @contextmanager
    def simulators_asleep(self) -> Iterator[None]:
        """Keep the iteration that is going on from ending."""
        children = programs.children_of(psutil.Process(self.process.pid), recursive=True)
        for each in children:
            each.suspend()
        yield
        for each in children:
            each.resume()

    def ending(self, seconds: float = 240.0) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, once it has ended and every process with it."""
        children = programs.children_of(psutil.Process(self.process.pid), recursive=True)
        out, err = self.process.communicate(timeout=seconds)
        assert not psutil.wait_procs(children, timeout=60)[1], "processes are left"
        assert "Traceback" not in err
        return self.process.returncode, out, err

    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())

    def assert_saved(self, number: Signals) -> None:
        """That what was done last is in the last checkpoint, and the summary tells why it stopped."""
        manifest = json.loads((self.path / "checkpoints" / "last" / "manifest.json").read_text())
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        assert manifest["iteration"] == json.loads(lines[-1])["iteration"] > 0
        assert self.summary()["stopped_by"] == number.name


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    running: list[subprocess.Popen[str]] = []

    def begin(*command: str, **options: Any) -> Started:
        path = tmp_path / "run"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        words = [word.replace("RUN_DIR", str(path)) for word in command]
        process: subprocess.Popen[str]
        if words[0] == TIMEOUT:
            process = subprocess.Popen(words, **{**settings, **options}, env=environment)
        else:
            ignored = [SIGHUP] if words[0] == NOHUP else []
            settings |= {"ignored": ignored, **options}
            process = programs.Program(words[len(ignored) :], **settings, env=environment)
        running.append(process)
        return Started(process, path)

    yield begin
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def run(start: Callable[..., Started], *words: str, prefix: tuple[str, ...] = (), **options: Any) -> Started:
    return start(*prefix, *RUN, *words, "run.dir=RUN_DIR", **options).wait_for_iterations(1)


@needs_timeout
@pytest.mark.slow  # interpreters: what it starts has no other parent
@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
def test_gnu_timeout_signals_twice_and_the_run_saves(start: Callable[..., Started], number: Signals) -> None:
    """Its alarm is what goes off when time is up; it then signals the program, and its process group."""
    prefix = (str(TIMEOUT), "--preserve-status", "--signal", number.name, "600", sys.executable)
    started = run(start, A_SECOND, prefix=prefix)
    started.process.send_signal(signal.SIGALRM)
    code, out, err = started.ending()
    assert code == 128 + number, err
    assert f"stopped by {number.name}, saved" in out and err.count("stopping after this iteration") == 1
    started.assert_saved(number)


@pytest.mark.parametrize("ranks", rest_slow([1, 2]))
def test_a_signal_to_every_process_again_and_again(start: Callable[..., Started], ranks: int) -> None:
    started = run(start, SECONDS, f"engine.parallel.world_size={ranks}")
    for _ in range(4):
        started.signal_everyone(SIGTERM)
        time.sleep(0.7)
    code, _, err = started.ending()
    assert code == 143, err
    started.assert_saved(SIGTERM)


def test_another_signal_to_every_process_of_two_ranks(start: Callable[..., Started]) -> None:
    started = run(start, "engine.parallel.world_size=2")
    started.signal_everyone(SIGUSR1)
    code, _, err = started.ending()
    assert code == 128 + SIGUSR1, err
    started.assert_saved(SIGUSR1)


def test_signals_while_simulators_start_anew(start: Callable[..., Started]) -> None:
    """With `env.offload` processes begin in every iteration, and one that begins must not die of it, either."""
    started = run(start, "env.offload=true", "env.start_method=spawn", "rollout.num_chunks=20")
    for _ in range(30):
        started.signal_everyone(SIGTERM)
        time.sleep(0.01)
    code, _, err = started.ending()
    assert code == 143, err
    started.assert_saved(SIGTERM)


def test_only_a_second_ctrl_c_that_is_meant_leaves_at_once(start: Callable[..., Started]) -> None:
    started = run(start, "rollout.num_chunks=1000000", "run.eval_every=1")  # nothing else could end it soon
    time.sleep(1.0)
    for number in (SIGINT, SIGINT, SIGTERM):
        started.signal_group(number)
    time.sleep(2.5)
    for number in (SIGTERM, SIGUSR1, SIGHUP):
        started.signal_group(number)
        time.sleep(0.1)
    assert started.process.poll() is None, "it finishes its iteration"
    started.signal_group(SIGINT)
    code, _, err = started.ending(seconds=10.0)
    assert code == 130, err
    assert not (started.path / "checkpoints").exists()


def test_a_second_sigterm_much_later_changes_nothing(start: Callable[..., Started]) -> None:
    started = run(start)
    with started.simulators_asleep():  # so that the iteration lasts, on any machine
        started.signal_group(SIGTERM)
        time.sleep(2.3)
        started.signal_group(SIGTERM)
    code, _, err = started.ending()
    assert code == 143 and "still finishing this iteration" in err
    started.assert_saved(SIGTERM)


def test_a_signal_that_arrives_while_another_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Signals] = []

    def send_another() -> None:
        if not sent:
            sent.append(Signals.SIGTERM)
            signal.raise_signal(Signals.SIGTERM)

    monkeypatch.setattr(stopping, "_leave_dead_screens", send_another)
    with Stopper() as stopper:
        signal.raise_signal(Signals.SIGINT)
        assert stopper.agree()
    assert sent and stopper.stopped_by == "SIGINT"


def test_nohup_is_deaf_to_a_hangup(start: Callable[..., Started]) -> None:
    started = run(start, prefix=(NOHUP,))
    started.signal_everyone(SIGHUP)
    started.wait_for_iterations(len((started.path / "metrics.jsonl").read_text().splitlines()) + 2)
    started.signal_group(SIGTERM)
    assert started.ending()[0] == 143
    started.assert_saved(SIGTERM)


def test_a_closed_terminal_is_no_reason_to_lose_anything(tmp_path: Path, start: Callable[..., Started]) -> None:
    """The run is its session's leader, and the terminal that it writes to goes away."""
    ours, theirs = pty.openpty()
    code = "import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    code += "runpy.run_module('embodyrl', run_name='__main__', alter_sys=True)"
    words = ("-c", code, *RUN[2:], "run.dir=RUN_DIR")
    started = start(*words, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    metrics = started.path / "metrics.jsonl"

    def watching() -> bool:
        with_contents(ours)
        return metrics.exists() and len(metrics.read_text().splitlines()) >= 2

    started.wait_for(watching)
    children = programs.children_of(psutil.Process(started.process.pid), recursive=True)
    os.close(ours)
    assert started.process.wait(60) == 129
    assert not psutil.wait_procs(children, timeout=60)[1], "processes are left"
    started.assert_saved(SIGHUP)


def with_contents(descriptor: int) -> None:
    """Read what a terminal has to show, so that it does not fill up."""
    try:
        os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return


@contextmanager
def a_reader() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """What reads a pipe to its end, and the pipe's other end."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as reader:
        assert reader.stdin is not None
        yield reader, reader.stdin.fileno()
        reader.kill()


def test_ctrl_c_that_ends_the_reader_of_a_pipe_as_well(start: Callable[..., Started]) -> None:
    """The reader dies after the run has heard of the signal, which it then cannot know, and before it prints on."""
    with a_reader() as (reader, pipe):
        started = run(start, "tracking.report=true", "run.eval_every=1", "eval.episodes=250", stdout=pipe)
        time.sleep(1.0)  # now it evaluates, and prints the result before it looks for signals
        with started.simulators_asleep():
            started.process.send_signal(SIGINT)
            time.sleep(0.5)
            reader.kill()
            reader.wait()
        code, _, err = started.ending()
    assert code == 130 and "stopping after this iteration" in err, err
    assert (started.path / "report.html").exists()
    started.assert_saved(SIGINT)


def test_a_reader_that_is_gone_before_the_first_iteration_is_a_hangup(start: Callable[..., Started]) -> None:
    with a_reader() as (reader, pipe):
        reader.kill()
        reader.wait()
        started = start(*RUN, "run.dir=RUN_DIR", stdout=pipe)
        code, _, err = started.ending()
    assert (code, err) == (129, "\nnobody reads stdout any more\nstopped by SIGHUP\n")
    assert "stopped by SIGHUP" in (started.path / "run.log").read_text() and not (started.path / "checkpoints").exists()


def test_a_reader_that_goes_away_alone_is_a_hangup(start: Callable[..., Started]) -> None:
    with a_reader() as (reader, pipe):
        started = run(start, stdout=pipe)
        reader.kill()
        code, _, err = started.ending()
    assert code == 129 and "nobody reads stdout any more: stopping after this iteration" in err, err
    started.assert_saved(SIGHUP)


def test_nohup_goes_on_without_a_reader(start: Callable[..., Started]) -> None:
    with a_reader() as (reader, pipe):
        started = run(start, prefix=(NOHUP,), stdout=pipe)
        reader.kill()
        time.sleep(2.5)  # some lines have been due by now
        started.wait_for_iterations(len((started.path / "metrics.jsonl").read_text().splitlines()) + 2)
        started.signal_group(SIGTERM)
        code, _, err = started.ending()
    assert code == 143, err
    started.assert_saved(SIGTERM)


def test_a_reader_that_was_never_there_is_an_error_as_of_any_program() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = programs.run([*EMBODYRL, "list", "models"], stdout=write)
    finally:
        os.close(write)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr


CLOSING = """
import os, signal
from embodyrl.runner.stopping import Interrupted, Stopper, interruptible
try:
    with interruptible():
        with Stopper():
            os.kill(os.getpid(), signal.{first})
        {between}
        os.kill(os.getpid(), signal.{second})
        print("closed")
except Interrupted as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("first", "second", "between", "printed"),
    [
        ("SIGHUP", "SIGHUP", "", "closed"),
        ("SIGINT", "SIGINT", "", "closed"),
        ("SIGUSR1", "SIGTERM", "import time; time.sleep(2.2)", "closed"),
        ("SIGUSR1", "SIGINT", "import time; time.sleep(2.2)", ""),
    ],
)
def test_a_wish_that_is_repeated_while_a_program_closes(first: str, second: str, between: str, printed: str) -> None:
    code = CLOSING.format(first=first, second=second, between=between)
    done = programs.run(["-c", code])
    assert done.stdout.strip() == printed, done.stderr
    assert done.returncode == (0 if printed else 128 + SIGINT)


ENDING = """
import os, signal, sys
from embodyrl.placement.signals import ignore_from_now_on, leave_to_parent
signal.signal({number}, signal.SIG_DFL)  # whatever the tests' own process ignores
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, {number})
sys.late = Late()
leave_to_parent()
{end}
"""


def test_an_interpreter_that_shuts_down_is_not_ended_by_a_signal() -> None:
    """Interpreters, not programs, which leave out what happens then; they import nothing that takes long."""
    for number in (SIGTERM, SIGHUP, SIGUSR1):
        for end, code in (("", -number), ("ignore_from_now_on()", 0)):
            program = ENDING.format(number=int(number), end=end)
            assert subprocess.run([sys.executable, "-c", program], timeout=240).returncode == code, (number, end)


LOST = """
import os, signal, time, weakref
from embodyrl.runner.stopping import Interrupted, interruptible
class Thing: pass
def stop(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
try:
    with interruptible():
        try:
            {lose}
            time.sleep(30)
        finally:
            try:
                raise OSError
            except OSError:
                time.sleep(1.2)
            time.sleep(1.2)
            print("closed")
except Interrupted as error:
    print(error)
"""


@pytest.mark.parametrize(
    "lose",
    [
        "stop()",
        "thing = Thing(); watch = weakref.ref(thing, stop); del thing",
        "Thing.__del__ = stop; Thing()",
        "exec('try: stop()\\nexcept: pass')",
    ],
)
def test_a_signal_whose_exception_gets_lost_is_not(lose: str) -> None:
    code = LOST.format(lose=lose)
    done = programs.run(["-c", code], timeout=240)
    assert done.stdout == "closed\nstopped by SIGTERM\n" and done.stderr == ""


@pytest.mark.parametrize(("number", "ranks"), rest_slow([(SIGTERM, 1), (SIGUSR1, 1), (SIGHUP, 2)]))
def test_before_there_is_anything_to_save(start: Callable[..., Started], number: Signals, ranks: int) -> None:
    # So many simulators that it is still starting them then, on any machine.
    started = start(*RUN, f"engine.parallel.world_size={ranks}", "env.num_envs=2048", "run.dir=RUN_DIR")
    started.wait_for((started.path / "run.log").exists)
    time.sleep(0.05)
    for _ in range(2):
        started.signal_group(number)
    code, _, err = started.ending()
    assert code == 128 + number
    assert f"stopped by {number.name}" in err
    assert f"stopped by {number.name}" in (started.path / "run.log").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done."""
    path = tmp_path_factory.mktemp("done") / "run"
    programs.run([*RUN, "run.iterations=1", "rollout.num_chunks=20", f"run.dir={path}"], check=True)
    return path


@pytest.mark.parametrize("number", rest_slow([SIGINT, SIGTERM]))
def test_eval_leaves_nothing_behind(
    tmp_path: Path, trained: Path, start: Callable[..., Started], number: Signals
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = ("eval", str(trained), "eval.episodes=100000", "--video", str(tmp_path / "video.mp4"))
    started = start(*EMBODYRL, *words, env={"TMPDIR": str(temporary)})
    started.wait_for(lambda: len(programs.children_of(psutil.Process(started.process.pid), recursive=True)) >= 3)
    time.sleep(1.0)
    for _ in range(2):
        started.signal_group(number)
    code, _, err = started.ending()
    assert code == 128 + number, err
    assert len(err.splitlines()) <= 1
    assert list(temporary.glob("tmp*")) == [] and list(tmp_path.iterdir()) == [temporary]


@pytest.mark.parametrize("number", rest_slow([SIGTERM, SIGHUP]))
def test_plan_ends_the_processes_that_it_started(
    tmp_path: Path, start: Callable[..., Started], number: Signals
) -> None:
    words = ("plan", "experiment/gym_pendulum", "--start")
    started = start(*EMBODYRL, *words, env={"TMPDIR": str(tmp_path)})
    started.wait_for(lambda: bool(programs.children_of(psutil.Process(started.process.pid), recursive=True)))
    started.signal_group(number)
    code, _, err = started.ending()
    assert code == 128 + number, err
    assert list(tmp_path.glob("tmp*")) == []


@pytest.mark.parametrize("number", rest_slow([SIGTERM, SIGHUP]))
def test_collect_keeps_what_it_has(
    tmp_path: Path, trained: Path, start: Callable[..., Started], number: Signals
) -> None:
    out = tmp_path / "data"
    words = ("--policy", str(trained), "--episodes", "1000", "--keep", "all", "--out", str(out))
    small = ("env.num_envs=4", "env.workers=2", "env.max_episode_steps=40", "model.hidden_sizes=[8]")
    started = start(*EMBODYRL, "collect", "experiment/gym_pendulum", *small, *words)
    started.wait_for(lambda: any(tmp_path.glob(".data.*.partial/data/*/*")))
    time.sleep(1.0)
    for _ in range(3):
        started.signal_everyone(number)
    code, text, err = started.ending()
    assert code == 128 + number, err
    assert f"written to {out}" in text and (out / "meta" / "info.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
