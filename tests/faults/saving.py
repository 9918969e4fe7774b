"""Programs for `test_saving`: they save checkpoints and are killed, or run out of disk. Each prints its findings as
JSON.

They are programs of their own because they fork: `python saving.py every_line FOLDER`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from embodyrl.runner import checkpoint
from embodyrl.runner.checkpoint import Retention, find, writing

KEEP = Retention(last=2, best="eval/success_once")
WATCHED = {checkpoint.__file__}


def publish(run_dir: Path, iteration: int, content: str) -> None:
    with writing(run_dir, iteration, metrics={"eval/success_once": 0.1 * iteration}, retention=KEEP) as publication:
        (publication.folder / "weights").write_text(content)


def in_child(work: Callable[[], None]) -> int:
    """Do something in a forked process; returns what `os.waitpid` says about its end."""
    if (pid := os.fork()) == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(3)
    return os.waitpid(pid, 0)[1]


def killed_at(line: int, work: Callable[[], None]) -> None:
    """Do something, and be killed before line number `line` of those that save is executed."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in WATCHED:
            return None
        count += event == "line"
        if event == "line" and count == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work()


def every_line(folder: Path) -> dict[str, Any]:
    """Kill a process that saves before each line that it executes; what is found then, for a new iteration and for one
    that is saved again."""
    findings: dict[str, Any] = {}
    for name, iteration in (("next", 4), ("again", 3)):
        prepared, work = folder / f"{name}-before", folder / name
        prepared.mkdir(parents=True)
        for number in (1, 2, 3):
            publish(prepared, number, f"old {number}")
        found = []
        for line in range(1, 1000):
            shutil.copytree(prepared, work, symlinks=True)
            status = in_child(partial(killed_at, line, partial(publish, work, iteration, "new")))
            whole = find(work)
            found.append([(whole.place / "weights").read_text(), whole.warning])
            publish(work, 5, "after")
            left = sorted(path.name for path in (work / "checkpoints").iterdir())
            assert find(work).place.name == "000005" and not any(each.startswith(".") for each in left), left
            shutil.rmtree(work)
            if status == 0:
                break
            assert os.WIFSIGNALED(status), status
        findings[name] = found
    return findings


def make_snapshot(folder: Path) -> Any:
    """About a megabyte of state, which depends on one number; see `numbered`."""
    import torch

    sys.path.append(str(Path(__file__).parents[1] / "engine"))
    from engines import make_policy

    from embodyrl.config import load_config
    from embodyrl.runner.state import Snapshot, TrainerState

    torch.set_num_threads(1)
    return Snapshot(
        iteration=0,
        metrics={},
        policy=make_policy(hidden_sizes=[256, 256]),
        loaded=load_config("experiment/gym_pendulum", [f"run.dir={folder}"]),
        trainer=TrainerState(counters={}, engine={"moments": torch.zeros(100_000)}, simulators=[b"x" * 1000] * 8),
    )


def numbered(snapshot: Any, number: int) -> Any:
    """The snapshot of an iteration, in which everything says which one it is."""
    import torch

    with torch.no_grad():
        for parameter in snapshot.policy.parameters():
            parameter.fill_(number)
        snapshot.trainer.engine["moments"].fill_(number)
    snapshot.trainer.counters["number"] = number
    return type(snapshot)(**vars(snapshot) | {"iteration": number})


def number_of(place: Path) -> int:
    """The iteration that a checkpoint is of; all its parts must agree."""
    from safetensors.torch import load_file

    from embodyrl.runner.state import TrainerState

    state = TrainerState.load(place / "trainer")
    weights = load_file(place / "policy" / "model.safetensors")
    numbers = {float(value) for name in ("actor.0.bias", "critic.0.weight") for value in weights[name].unique()}
    numbers |= {float(value) for value in state.engine["moments"].unique()}
    assert numbers == {state.counters["number"]}, numbers
    return int(state.counters["number"])


@contextmanager
def saving(folder: Path, snapshot: Any, first: int, in_background: bool) -> Iterator[tuple[int, int]]:
    """A process that saves one iteration after the other and says which ones are published: its id, and where to read
    what it says."""
    from embodyrl.runner.state import Saver

    reading, writing_end = os.pipe()
    if (pid := os.fork()) == 0:
        saver = Saver(folder, Retention(last=2), in_background=in_background)
        for number in range(first, first + 1000):
            for saved in saver.save(numbered(snapshot, number)):
                os.write(writing_end, saved.place.name.encode() + b"\n")
        os._exit(3)
    os.close(writing_end)
    try:
        yield pid, reading
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)


def any_moment(folder: Path) -> dict[str, Any]:
    """Kill a process that saves real checkpoints at moments spread over two of them; nothing is lost that it said was
    published."""
    folder.mkdir()
    snapshot = make_snapshot(folder)
    newest, torn, moments = 0, 0, int(sys.argv[3])
    for moment in range(moments):
        with saving(folder, snapshot, newest + 1, in_background=bool(moment % 2)) as (pid, reading):
            os.read(reading, 7)  # the first one is published
            start = time.perf_counter()
            said = os.read(reading, 100)
            duration = time.perf_counter() - start
            time.sleep(2 * duration * moment / moments)
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            said += os.read(reading, 10_000)
        acknowledged = int(said.split()[-1])
        torn += bool(list((folder / "checkpoints").glob(".*.tmp")))
        found = find(folder)
        assert found.warning is None, found.warning
        newest = number_of(found.place)
        assert newest >= acknowledged, (newest, acknowledged)
    return {"kills": moments, "torn": torn, "newest": newest}


def full_disk(folder: Path) -> dict[str, Any]:
    """Run on a disk of 1 MiB that is full at the second checkpoint, make room, and go on; then fill it to the last byte
    and go on."""
    sys.path.append(str(Path(__file__).parents[1]))
    import programs

    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    words = ["env.num_envs=2", "env.max_episode_steps=10", "rollout.num_chunks=8", "algorithm.minibatches=2"]
    words += ["model.hidden_sizes=[128]", "run.eval_every=0", "eval.episodes=2", "tracking.sinks=[jsonl]"]
    run = folder / "run"

    def embodyrl(*arguments: str) -> dict[str, Any]:
        done = programs.run(["-m", "embodyrl", *arguments])
        place = find(run).place
        left = sorted(path.name for path in (run / "checkpoints").iterdir())
        log = (run / "run.log").read_text()
        return {"code": done.returncode, "stderr": done.stderr, "last": place.name, "left": left, "log": log}

    ballast = folder / "ballast"
    ballast.write_bytes(b"x" * 400_000)
    common = ["run", "experiment/gym_pendulum", *words, "run.iterations=8", "run.save_every=1"]
    findings = {"full": embodyrl(*common, f"run.dir={run}", *sys.argv[3:])}
    ballast.unlink()
    findings["room"] = embodyrl("resume", str(run), "run.keep_last=1")
    ballast.write_bytes(b"x" * shutil.disk_usage(folder).free)
    findings["no_byte"] = embodyrl("resume", str(run), "run.iterations=9")
    programs.close()
    return findings


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
