"""What becomes of the workers when the program itself ends, in whatever way."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.faults]
TOY = Path(__file__).parents[1] / "envs" / "manager"
PROGRAM = """
import sys, threading, psutil
sys.path[:0] = [{toy!r}, {root!r}]
from toy_simulator import Do, ToyConfig, actions, episode
from embodyrl.config.schema import StartMethod
from embodyrl.envs.manager import EnvManager

def start():
    global manager
    config = ToyConfig(num_envs=2, workers=2, start_method=StartMethod("{method}"))
    manager = EnvManager(config, chunk_size=1, plugins=["toy_simulator"])
    manager.reset([0, 1], [episode(1)] * 2)
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)

{body}
"""
START = "start()\n"


@pytest.fixture(params=["spawn", "fork"])
def run(request):
    """Starts a program (without a main guard) whose first line of output is the ids of all processes that it has
    started: two workers, which begin in either way, and the one that they are forked from."""

    def start(body):
        source = PROGRAM.format(toy=str(TOY), root=str(TOY.parents[2]), body=body, method=request.param)
        program = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
        started = [psutil.Process(int(pid)) for pid in program.stdout.readline().split()]
        assert len(started) in (0, 3 if request.param == "fork" else 2)
        return program, started

    return start


def all_gone(workers):
    return not psutil.wait_procs(workers, timeout=60)[1]


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_parent_leaves_no_orphan(run, busy):
    hang = "manager.send([0], actions(1, slot0=Do.HANG))\n" if busy else ""
    program, workers = run(START + hang + "print('now', flush=True)\nimport time; time.sleep(1000)")
    assert program.stdout.readline() == "now\n"
    program.kill()
    program.wait()
    assert workers
    assert all_gone(workers)


def test_a_program_that_forgets_to_close_ends_by_itself(run):
    program, workers = run(START)
    assert program.wait(20) == 0
    assert all_gone(workers)


def test_a_program_that_fails_ends_by_itself(run):
    program, workers = run(START + "import os; sys.stderr = open(os.devnull, 'w'); 1 / 0")
    assert program.wait(20) == 1
    assert all_gone(workers)


def test_a_terminated_program_leaves_no_orphan(run):
    program, workers = run(START + "import time; time.sleep(1000)")
    program.send_signal(signal.SIGTERM)
    assert program.wait(20) == -signal.SIGTERM
    assert all_gone(workers)


def test_workers_outlive_the_thread_that_started_them(run):
    body = """
thread = threading.Thread(target=start); thread.start(); thread.join()
import time; time.sleep(0.5)
print(manager.step([0, 1], actions(2)).steps.tolist(), flush=True)
manager.close()
"""
    program, workers = run(body)
    assert program.stdout.readline() == "[1, 1]\n"
    assert program.wait(20) == 0
    assert all_gone(workers)


def test_a_simulator_in_the_main_script_is_a_users_mistake(run):
    body = """
class Mine:
    pass

from embodyrl.errors import UserError
from embodyrl.registry import SIMULATORS
SIMULATORS.register("mine", target=Mine, summary="in the wrong place")
try:
    EnvManager(ToyConfig(name="mine"), chunk_size=1)
except UserError as error:
    print("\\n", error)
"""
    program, _ = run(body)
    assert "Mine of simulator 'mine' is defined in the main script" in program.stdout.read()
    assert program.wait(20) == 0


def test_a_fork_of_the_program_does_not_end_its_workers(run):
    body = (
        START
        + """
import os
child = os.fork()
if child == 0:
    sys.exit(0)  # runs the exit handlers of the copy
os.waitpid(child, 0)
print(manager.step([0, 1], actions(2)).steps.tolist(), flush=True)
manager.close()
"""
    )
    program, workers = run(body)
    assert program.stdout.readline() == "[1, 1]\n"
    assert program.wait(20) == 0
    assert all_gone(workers)
