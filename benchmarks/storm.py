"""Kill runs at random moments, resume them, and compare them with uninterrupted runs.

Small runs (Pendulum with an MLP; Pendulum in images with a tiny pi0; with offloading of simulators and optimiser, saves
in the background, two ranks) are killed, signalled, deprived of a simulator or a rank, and resumed, until `--kills`
faults were injected. After every fault: the program and all of its processes end in time, its exit code matches the
fault, there is no traceback, the newest checkpoint is complete, no published checkpoint is lost, and a run that was
asked to stop has saved its last iteration. Each run that completes has the metrics (except times), weights, optimiser
and random streams of the uninterrupted run, bit for bit.

Faults, moments and processes are drawn from `--seed`; the exact position of a fault depends on the speed of the
machine.

    python benchmarks/storm.py [--kills 200] [--seed 1] [--out benchmarks/results/storm.json] [--work DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1, Signals
from typing import Any

import psutil

from embodyrl.runner.checkpoint import CheckpointError, Manifest, find
from embodyrl.version import __version__

PATIENCE_S = 300.0
"""A program without output for this long counts as hanging [s]; on an idle machine it prints every few seconds."""
VICTIM_S = 20.0
"""Time to search for a process that is short-lived [s]."""
NOT_COMPARED = ("config.yaml", "origin.json", "trainer/counters.json")
"""Files of a checkpoint that hold the run's folder and its times."""
STOPPED = {number: 128 + number for number in (SIGINT, SIGTERM, SIGHUP, SIGUSR1)}

PENDULUM = """\
defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]
run: {iterations: 8, eval_every: 3, save_every: 2, keep_last: 2}
env: {num_envs: 4, workers: 2, max_episode_steps: 40}
eval: {episodes: 4}
model: {hidden_sizes: [16]}
rollout: {num_chunks: 60}
algorithm: {epochs: 2, minibatches: 2}
engine: {optimizer: {schedule: linear}}
tracking: {sinks: [jsonl]}
"""
TINY_PI0 = """\
defaults: [env: gym/pendulum, model: pi0, algorithm: ppo, _self_]
run: {iterations: 5, eval_every: 3, save_every: 2, keep_last: 2}
env: {num_envs: 4, workers: 2, max_episode_steps: 24, cameras: [render], image_size: [28, 28]}
eval: {episodes: 4}
model: {state: none, denoising_steps: 2, noise_method: flow_sde, noise_level: 0.5}
rollout: {num_chunks: 4, chunk_size: 4}
algorithm: {epochs: 1, minibatches: 2}
engine: {optimizer: {schedule: linear}}
tracking: {sinks: [jsonl]}
"""
"""Episodes straddle rollouts and checkpoints, and the learning rate falls."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run into which faults are injected."""

    name: str
    config: str
    overrides: Sequence[str] = ()
    ranks: int = 1

    def words(self, path: Path, config: Path) -> list[str]:
        """The command that starts it."""
        return ["run", str(config), *self.overrides, f"engine.parallel.world_size={self.ranks}", f"run.dir={path}"]


CASES = (
    Case(name="pendulum", config=PENDULUM),
    Case(name="pendulum, all offloaded, background saves", config=PENDULUM,
         overrides=("env.offload=true", "engine.offload=all", "run.save_async=true", "run.save_every=1")),
    Case(name="pendulum, two ranks", config=PENDULUM, ranks=2),
    Case(name="pendulum, two ranks, simulators offloaded, background saves", config=PENDULUM, ranks=2,
         overrides=("env.offload=true", "run.save_async=true", "run.save_every=1")),
    Case(name="tiny pi0", config=TINY_PI0, overrides=("run.save_async=true",)),
    Case(name="tiny pi0, all offloaded", config=TINY_PI0, overrides=("env.offload=true", "engine.offload=all")),
)  # fmt: skip


@dataclass(frozen=True)
class Blow:
    """Something that happens to a run.

    Attributes:
        signals: what is sent, and the seconds to wait before each.
        target: program, group (as a terminal or GNU timeout: the program, then its process group), everyone (every
            process of the run at once), simulator, zygote (the process that simulators are forked from) or rank.
        saves: the signal that it is stopped by after saving; None: it dies.
    """

    name: str
    signals: Sequence[tuple[float, Signals]]
    target: str = "program"
    saves: Signals | None = None


BLOWS = (
    Blow("SIGKILL", [(0.0, SIGKILL)]),
    Blow("SIGKILL to all", [(0.0, SIGKILL)], "everyone"),
    Blow("SIGTERM", [(0.0, SIGTERM)], saves=SIGTERM),
    Blow("SIGTERM as GNU timeout", [(0.0, SIGTERM)], "group", saves=SIGTERM),
    Blow("SIGTERM to all, four times", [(0.0, SIGTERM), (0.1, SIGTERM), (0.5, SIGTERM), (2.0, SIGTERM)], "everyone",
         SIGTERM),
    Blow("SIGINT twice at once", [(0.0, SIGINT), (0.2, SIGINT)], "group", SIGINT),
    Blow("SIGINT twice, slowly", [(0.0, SIGINT), (2.1, SIGINT)]),
    Blow("SIGHUP as a terminal", [(0.0, SIGHUP)], "group", SIGHUP),
    Blow("SIGUSR1 to all, then SIGTERM", [(0.0, SIGUSR1), (0.3, SIGTERM)], "everyone", SIGUSR1),
    Blow("SIGTERM, then SIGKILL", [(0.0, SIGTERM), (0.4, SIGKILL)], "everyone"),
    Blow("SIGKILL to a simulator", [(0.0, SIGKILL)], "simulator"),
    Blow("SIGKILL to the zygote", [(0.0, SIGKILL)], "zygote"),
    Blow("SIGKILL to a rank", [(0.0, SIGKILL)], "rank"),
    Blow("SIGTERM to a rank", [(0.0, SIGTERM)], "rank", SIGTERM),
)  # fmt: skip


@dataclass(kw_only=True)
class Life:
    """A run from its start to its end, over all of its processes."""

    case: Case
    path: Path
    config: Path
    published: int = -1
    """Iteration of the newest checkpoint that was seen."""
    hits: int = 0

    def begin(self) -> Started:
        """Start it, or continue it."""
        resumable = (self.path / "checkpoints" / "last").exists()
        if not resumable and self.path.exists():
            shutil.rmtree(self.path)  # as its message says: it has saved nothing
        words = ["resume", str(self.path)] if resumable else self.case.words(self.path, self.config)
        log = self.path.with_suffix(".log").open("a+")
        log.seek(0, os.SEEK_END)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "embodyrl", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        return Started(process=process, log=log, before=log.tell(), metrics=self.metrics_file())

    def metrics_file(self) -> int | None:
        """Return the inode of metrics.jsonl; a resumed run replaces the file, without the rows that it repeats."""
        path = self.path / "metrics.jsonl"
        return path.stat().st_ino if path.exists() else None

    def done_since(self, started: Started) -> int:
        """Return the last iteration of a process, by metrics.jsonl; 0 if it completed none."""
        if self.metrics_file() in (None, started.metrics):
            return 0
        lines = (self.path / "metrics.jsonl").read_text().split("\n")[:-1]
        done = max((int(json.loads(line)["iteration"]) for line in lines), default=0)
        return done if done > self.published else 0

    def faults(self) -> list[str]:
        """Return what is wrong with its checkpoints."""
        if not (self.path / "checkpoints" / "last").is_symlink():
            return [] if self.published < 0 else [f"checkpoint {self.published} is lost"]
        try:
            found = find(self.path)
        except CheckpointError as error:
            return [str(error)]
        newest = Manifest.read(found.place).iteration
        lost = [f"checkpoint {self.published} is lost, {newest} is the newest"] if newest < self.published else []
        self.published = max(newest, self.published)
        return [*([found.warning] if found.warning else []), *lost]


@dataclass(kw_only=True)
class Started:
    """A process of a run."""

    process: subprocess.Popen[bytes]
    log: Any
    before: int
    """Length of the log when it began."""
    metrics: int | None
    """Inode of metrics.jsonl before it began."""
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def everyone(self) -> list[psutil.Process]:
        """All of its processes; what is found once is remembered, because orphans have no parent to be found by."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self.seen |= {child.pid: child for child in children}
        return children

    def strike(self, blow: Blow, rng: random.Random) -> bool:
        """Inject a fault; return False if its target process does not exist."""
        until, pick = time.monotonic() + VICTIM_S, rng.random()
        while not self._victims(blow.target, pick):
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.05)
        for delay, number in blow.signals:
            time.sleep(delay)
            victims = self._victims(blow.target, pick)
            for pid in victims:
                if pid == self.process.pid and self.process.poll() is not None:
                    continue
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            if blow.target == "group" and self.process.poll() is None:
                os.killpg(self.process.pid, number)
        return True

    def _victims(self, target: str, pick: float) -> list[int]:
        """Process ids; of several that may be meant the one at the share `pick` of them."""
        everyone = sorted(self.everyone(), key=lambda each: each.pid)
        if target in ("program", "group"):
            return [self.process.pid]
        if target == "everyone":
            return [*(each.pid for each in everyone), self.process.pid]
        found = [each.pid for each in everyone if role_of(each) == target]
        return [found[int(pick * len(found))]] if found else []

    def await_end(self, path: Path) -> bool:
        """Return whether it and all of its processes end in time; what does not is killed.

        Args:
            path: its run directory.
        """
        written, since = 0.0, time.monotonic()
        while self.process.poll() is None and time.monotonic() < since + PATIENCE_S:
            time.sleep(0.05)
            times = [file.stat().st_mtime for name in ("run.log", "metrics.jsonl") if (file := path / name).exists()]
            if max(times, default=0.0) > written:
                written, since = max(times), time.monotonic()
        in_time = self.process.poll() is not None
        if not in_time:
            os.killpg(self.process.pid, SIGKILL)
            self.process.wait()
        _, left = psutil.wait_procs(list(self.seen.values()), timeout=10.0)
        for each in left:
            each.kill()
        return in_time and not left

    def said(self) -> str:
        """Return the output of both streams."""
        self.log.seek(self.before)
        return str(self.log.read())


def role_of(process: psutil.Process) -> str:
    """Return the role of a process in a run."""
    try:
        words, children = process.cmdline(), process.children()
    except psutil.NoSuchProcess:
        return "gone"
    if any(re.fullmatch(r"rank \d+", word) for word in words):
        return "rank"
    if "zygote" in words and children:
        return "zygote"
    return "simulator" if "zygote" in words or any(word.startswith("env-") for word in words) else "other"


class Storm:
    """All faults and their results.

    Args:
        work: folder for the runs.
        seed: of blows, moments and victims.
    """

    def __init__(self, work: Path, seed: int, cases: Sequence[Case]) -> None:
        self._work = work
        self._rng = random.Random(seed)
        self._running: Started | None = None
        self._cases = cases
        self.blows = {case.name: Counter[str]() for case in cases}
        self.codes = {blow.name: Counter[int]() for blow in BLOWS}
        self.ended = Counter[str]()
        """Lives that came to their end as the untouched run did."""
        self.most_hits = 0
        self.faults: list[str] = []
        self.kinds = Counter[str]()
        self.lives: dict[str, Life] = {}
        self.untouched: dict[str, Outcome] = {}
        self.seconds: dict[str, float] = {}
        """Seconds of an uninterrupted run."""

    @property
    def count(self) -> int:
        """Number of injected faults."""
        return sum(counter.total() for counter in self.blows.values())

    def rage(self, kills: int) -> None:
        """Inject this many faults, then let every run complete."""
        for case in self._cases:
            self._run_untouched(case)
        while self.count < kills:
            self._hit(self._cases[self.count % len(self._cases)])
        for case in self._cases:
            while (life := self.lives.get(case.name)) is not None and life.hits:
                self._go_on(life)

    def end_running(self) -> None:
        """Kill the process that is under way, if any."""
        if self._running is not None and self._running.process.poll() is None:
            os.killpg(self._running.process.pid, SIGKILL)
            self._running.process.wait()

    def _begin(self, life: Life) -> Started:
        self._running = life.begin()
        return self._running

    def _run_untouched(self, case: Case) -> None:
        life, start = self._new_life(case, "untouched"), time.monotonic()
        started = self._begin(life)
        code = started.process.wait()
        self.seconds[case.name] = time.monotonic() - start
        if code:
            raise SystemExit(f"{case.name}: the untouched run ends with {code}\n{started.said()}")
        self.untouched[case.name] = Outcome.of(life.path)
        print(f"untouched: {case.name}, {self.seconds[case.name]:.0f} s", flush=True)

    def _new_life(self, case: Case, name: str) -> Life:
        folder = self._work / f"case-{self._cases.index(case)}"
        folder.mkdir(exist_ok=True)
        config = folder / "config.yaml"
        config.write_text(case.config)
        return Life(case=case, path=folder / name, config=config)

    def _hit(self, case: Case) -> None:
        """Start or resume the case's run, hit it once, and see what it does."""
        if case.name not in self.lives:
            self.lives[case.name] = self._new_life(case, f"life-{self.count}")
        life, rng = self.lives[case.name], self._rng
        blow = rng.choice([each for each in BLOWS if case.ranks > 1 or each.target != "rank"])
        waits_for_row, moment = rng.random() < 0.7, rng.random()
        started = self._begin(life)
        self._wait(started, life, waits_for_row, moment)
        fell = started.process.poll() is None and started.strike(blow, rng)
        in_time = started.await_end(life.path)
        code, said = started.process.returncode, started.said()
        if fell:
            life.hits += 1
            self.blows[case.name][blow.name] += 1
            self.codes[blow.name][code] += 1
        self._judge(life, blow if fell else None, code, said, in_time, life.done_since(started))
        print(f"{self.count:4}  {case.name:<62} {blow.name if fell else '-':<28} {code:4}  {len(self.faults)} faults",
              flush=True)  # fmt: skip

    def _wait(self, started: Started, life: Life, for_row: bool, moment: float) -> None:
        """Until the moment of the blow: a share of an untouched run's time after the start, or of an iteration's after
        the first new row of metrics."""
        iterations = 1 + max(row["iteration"] for row in self.untouched[life.case.name].rows)
        deadline = time.monotonic() + PATIENCE_S
        while for_row and started.process.poll() is None and time.monotonic() < deadline:
            if life.done_since(started):
                break
            time.sleep(0.02)
        started.everyone()
        until = time.monotonic() + moment * self.seconds[life.case.name] / (iterations if for_row else 1)
        while started.process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)

    def _go_on(self, life: Life) -> None:
        started = self._begin(life)
        in_time = started.await_end(life.path)
        self._judge(life, None, started.process.returncode, started.said(), in_time, life.done_since(started))

    def _judge(self, life: Life, blow: Blow | None, code: int, said: str, in_time: bool, done: int) -> None:
        """Note what should not be; close a life that came to its end, or went wrong."""
        faults = [] if in_time else ["hang: it did not end in time, or left processes"]
        faults += ["traceback"] if "Traceback" in said else []
        faults += [f"lost: {text}" for text in life.faults()]
        if code not in expected(blow):
            faults.append(f"exit code {code}")
        stopped = blow is not None and blow.saves is not None and code == STOPPED[blow.saves]
        if stopped and max(life.published, 0) < done:  # one that was stopped before its first iteration saves nothing
            faults.append(f"lost: {done} iterations were done, {life.published} are saved")
        if code == 0 and (differences := self.untouched[life.case.name].differences(life.path)):
            faults.append(f"numbers: {differences}")
        for fault in faults:
            self.kinds[fault.split(":")[0].split(" ")[0]] += 1
            what = "nothing" if blow is None else blow.name
            self.faults.append(f"{life.case.name}, {what} (code {code}): {fault}")
            print(f"  FAULT {self.faults[-1]}\n{said[-3000:]}", flush=True)
        if code == 0 and not faults:
            self.ended[life.case.name] += 1
            self.most_hits = max(self.most_hits, life.hits)
        if code == 0 or faults:
            del self.lives[life.case.name]
            if not faults:
                shutil.rmtree(life.path)

    def result(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "blows": self.count,
            "hangs": self.kinds["hang"],
            "lost_checkpoints": self.kinds["lost"],
            "tracebacks": self.kinds["traceback"],
            "odd_exit_codes": self.kinds["exit"],
            "other_numbers": self.kinds["numbers"],
            "faults": self.faults,
            "runs_that_ended_as_the_untouched_one": dict(self.ended),
            "most_blows_of_one_run": self.most_hits,
            "by_case": {name: dict(counter) for name, counter in self.blows.items()},
            "exit_codes": {
                name: {str(code): count for code, count in counter.items()} for name, counter in self.codes.items()
            },
            "untouched_s": {name: round(seconds, 1) for name, seconds in self.seconds.items()},
        }


def expected(blow: Blow | None) -> set[int]:
    """Return the exit codes that a fault may cause; 0: it came too late."""
    if blow is None:
        return {0}
    codes = {0} if blow.saves is None else {0, STOPPED[blow.saves]}
    if blow.target in ("simulator", "zygote", "rank") and blow.saves is None:
        return codes | {1}
    for _, number in blow.signals:  # while the program starts, it is the first signal that ends it, in whatever way
        codes |= {-number, 128 + number} if number != SIGKILL else {-number}
    return codes


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of a run."""

    rows: list[dict[str, Any]]
    """Metrics but those of time and memory; an evaluation that was made up for is part of its iteration."""
    files: dict[str, str]
    """SHA-256 of the last checkpoint's files: weights, optimiser, random streams, simulators' states."""

    @classmethod
    def of(cls, path: Path) -> Outcome:
        """Read it from a run directory."""
        merged: dict[int, dict[str, Any]] = {}
        for line in (path / "metrics.jsonl").read_text().splitlines():
            row = {key: value for key, value in json.loads(line).items() if not key.startswith(("time/", "memory/"))}
            merged[row["iteration"]] = merged.get(row["iteration"], {}) | row
        files = Manifest.read((path / "checkpoints" / "last").resolve()).files
        return cls(
            rows=[merged[iteration] for iteration in sorted(merged)],
            files={name: str(facts["sha256"]) for name, facts in files.items() if name not in NOT_COMPARED},
        )

    def differences(self, path: Path) -> str:
        """Return the differences from another run."""
        other = Outcome.of(path)
        rows = [str(row["iteration"]) for row in self.rows if row not in other.rows]
        files = sorted(name for name in self.files.keys() | other.files.keys()
                       if self.files.get(name) != other.files.get(name))  # fmt: skip
        what = [f"metrics of iterations {', '.join(rows)}"] if rows else []
        return "; ".join([*what, *files])


def table(storm: Storm) -> str:
    """Blows by kind, and the exit codes that followed."""
    lines = [f"{'blow':<30}{'count':>6}  exit codes"]
    for blow in BLOWS:
        codes = storm.codes[blow.name]
        shown = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
        lines.append(f"{blow.name:<30}{codes.total():>6}  {shown}")
    found = storm.result()
    ended = sum(storm.ended.values())
    lines.append(f"{found['blows']} blows, {ended} runs ended as the untouched ones did, {found['hangs']} hangs, "
                 f"{found['lost_checkpoints']} lost checkpoints, {len(storm.faults)} faults")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))), help="numbers of the cases")
    parser.add_argument("--work", type=Path, help="for the runs, not on a disk in memory; removed if nothing is wrong")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="storm-")) if options.work is None else options.work
    work.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    storm = Storm(work, options.seed, [CASES[number] for number in options.cases])
    try:
        storm.rage(options.kills)
    except KeyboardInterrupt:
        print(f"interrupted: {options.kills} blows were to fall, and not every run came to its end", flush=True)
    finally:
        storm.end_running()
    print(table(storm), flush=True)
    if options.out is not None:
        result = {
            "seed": options.seed,
            **storm.result(),
            "seconds": round(time.monotonic() - start),
            "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
            "embodyrl": __version__,
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    if storm.faults:
        raise SystemExit(f"what went wrong is in {work}")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
