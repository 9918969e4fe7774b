"""Runs so small that they take less than a second; what they came to, and how they are stopped where it hurts."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from programs import Program, children_of
from safetensors.torch import load_file

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.runner.checkpoint import Manifest

SMALL = [
    "env.num_envs=4",
    "env.workers=2",
    "env.max_episode_steps=40",
    "rollout.num_chunks=24",
    "algorithm.epochs=2",
    "algorithm.minibatches=2",
    "model.hidden_sizes=[16]",
    "eval.episodes=5",
    "run.eval_every=2",
    "run.save_every=3",
    "run.iterations=6",
    "tracking.sinks=[jsonl]",
    "tracking.report=false",
    "engine.optimizer.schedule=constant",
]
"""Pendulum, made so small that a run takes seconds; episodes (40 steps) straddle rollouts (24). The
learning rate is constant, because one that falls over run.iterations depends on where a run is meant to end."""

WEIGHTS = "policy/model.safetensors"
NOT_COMPARED = ("config.yaml", "origin.json", "trainer/counters.json")
"""Files of a checkpoint that hold the run's folder and its times."""

THREE_OF_FOUR = """
from embodyrl.registry import FILTERS


def three_of_four(played):
    played = played.any(1)
    played[-1] = False
    return played


FILTERS.register("three_of_four", target=three_of_four, group=True, summary="all groups but the last")
"""
"""A plug-in: a filter that leaves a group out, so that an iteration collects twice and groups wait."""


class Run:
    """A finished run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.summary: dict[str, Any] = json.loads((path / "summary.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl, without times."""
        rows = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]

    def merged(self) -> dict[int, dict[str, Any]]:
        """Metrics by iteration; an evaluation that was made up for has a line of its own."""
        merged: dict[int, dict[str, Any]] = {}
        for row in self.metrics():
            merged[row["iteration"]] = merged.get(row["iteration"], {}) | row
        return merged

    def log(self) -> str:
        """What the run said."""
        return (self.path / "run.log").read_text()

    def checkpoint(self, iteration: int) -> Path:
        """The folder of one that was saved."""
        return self.path / "checkpoints" / f"{iteration:06d}"

    def contents(self, iteration: int) -> dict[str, str]:
        """SHA-256 of every file of a checkpoint that has to be the same where runs are; but those of a replay, which
        a resume cuts otherwise: see `replay`."""
        files = Manifest.read(self.checkpoint(iteration)).files
        return {
            name: str(facts["sha256"])
            for name, facts in files.items()
            if name not in NOT_COMPARED and "/replay/" not in name
        }

    def digest(self, iteration: int, name: str = WEIGHTS) -> str:
        """Hash of a file in a checkpoint."""
        return str(Manifest.read(self.checkpoint(iteration)).files[name]["sha256"])

    def replay(self, place: str = "last") -> dict[str, torch.Tensor]:
        """The moments in a checkpoint, in their order; none without a replay."""
        folder = self.path / "checkpoints" / place / "trainer" / "replay"
        parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def weights(self) -> dict[str, torch.Tensor]:
        """All tensors of the last policy."""
        files = sorted((self.path / "checkpoints" / "last" / "policy").glob("*.safetensors"))
        return {f"{file.stem}.{name}": tensor for file in files for name, tensor in load_file(file).items()}


class Runs:
    """Runs of one config in this process. Each is made once, also where several processes test at a time, and then only
    read; whoever writes takes a `copy_of` it, or one of their own: `fresh`.

    Args:
        folder: where to.
        config: name or file.
        settings: of all of them.
    """

    def __init__(self, folder: Path, config: Path | str, settings: Sequence[str] = ()) -> None:
        self.folder, self.config, self.settings = folder, str(config), list(settings)
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, *overrides: str) -> Run:
        """Return the run with these settings: runs("key=value", ...)."""
        path = self.folder / f"run-{hashlib.sha256(repr(overrides).encode()).hexdigest()[:8]}"
        with once(path) as is_made:
            return Run(path) if is_made else self.fresh(path, *overrides)

    def fresh(self, path: Path, *overrides: str) -> Run:
        """Train."""
        settings = [*self.settings, f"run.dir={path}", *overrides]
        assert train.run(load_config(self.config, settings, trust=True)) == 0
        return Run(path)

    def words(self, path: Path, *overrides: str) -> list[str]:
        """The same as a program."""
        return ["-m", "embodyrl", "run", self.config, *self.settings, f"run.dir={path}", *overrides]


@contextmanager
def once(path: Path) -> Iterator[bool]:
    """Make something if this yields False; others wait meanwhile, and are told True once it was made without error."""
    done = path.with_name(f"{path.name}.done")
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield done.exists()
        done.touch()


def copy_of(run: Run, path: Path, iteration: int | None = None) -> Path:
    """Copy a run, to be written to. With `iteration`: as if it had been killed after it had saved that checkpoint, with
    lines of later iterations in its metrics."""
    shutil.copytree(run.path, path, symlinks=True)
    if iteration is not None:
        (path / "summary.json").unlink()
        checkpoints = path / "checkpoints"
        for each in checkpoints.iterdir():
            if each.is_symlink() or int(each.name) > iteration:
                each.unlink() if each.is_symlink() else shutil.rmtree(each)
        (checkpoints / "last").symlink_to(f"{iteration:06d}")
    return path


def resumed(path: Path, *overrides: str) -> Run:
    """Go on with a run in this process."""
    assert train.resume(path, list(overrides), trust=True) == 0
    return Run(path)


def assert_same_run(one: Run, other: Run, iteration: int) -> None:
    """That two runs came to the same: all metrics but times, weights, optimiser, random streams, simulators' states,
    and what the replay holds."""
    assert other.merged() == one.merged()
    expected = one.contents(iteration)
    assert other.contents(iteration) == expected
    assert any(name.startswith("policy/") for name in expected)
    found, wanted = other.replay(f"{iteration:06d}"), one.replay(f"{iteration:06d}")
    assert found.keys() == wanted.keys()
    for name, moments in wanted.items():
        assert torch.equal(found[name], moments), f"replay: {name}"


def assert_alike(one: Run, other: Run, tolerance: float = 1e-4) -> None:
    """That two runs learned the same but for rounding: weights, and all metrics but of what ranks send each other."""
    wanted, found = one.weights(), other.weights()
    assert found.keys() == wanted.keys() and wanted
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, atol=tolerance, rtol=tolerance, msg=lambda text, n=name: n + text
        )
    for row, expected in zip(other.metrics(), one.metrics(), strict=True):
        own = {name: value for name, value in row.items() if not name.startswith("traffic/")}
        assert own == pytest.approx(expected, rel=10 * tolerance, abs=tolerance)


def evaluation_in(said: str) -> str:
    """The result of an evaluation in what a command said, but for its time; lines about progress may stand before."""
    [line] = [line for line in said.splitlines() if line.startswith("evaluation  ")]
    return line.partition("  (")[0]


PAUSED = "PAUSED"
PAUSING = f"""
import sys, time
from embodyrl.cli.main import main
from embodyrl.pipelines.pipeline import Pipeline

pause, run = int(sys.argv.pop(1)), Pipeline.run


def pausing(self, iteration):
    run(self, iteration)
    if iteration.number == pause:
        print({PAUSED!r}, flush=True)
        time.sleep(600)


Pipeline.run = pausing
main()
"""


def kill_in(iteration: int, path: Path, words: list[str]) -> None:
    """Run `-m embodyrl run ...` as a program of its own and kill it with SIGKILL amid an iteration, when it has learned
    and has said nothing yet, and has a checkpoint. Nothing of it may be left."""
    assert words[:2] == ["-m", "embodyrl"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with Program(["-c", PAUSING, str(iteration), *words[2:]], **streams) as program:
        assert program.stdout is not None
        said = []
        for line in program.stdout:
            said.append(line)
            if line.strip() == PAUSED:
                break
        else:
            raise AssertionError("".join(said))
        deadline = time.monotonic() + 240
        while not (path / "checkpoints" / "last").exists():  # it may be saved in the background
            assert program.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.01)
        everyone = children_of(psutil.Process(program.pid), recursive=True)
        assert everyone, "it has simulators"
        program.kill()
    assert program.returncode == -signal.SIGKILL
    assert not psutil.wait_procs(everyone, timeout=60)[1]
