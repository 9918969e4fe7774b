"""What it costs to carry observations from simulator processes to the policy.

Eight simulators without any cost of their own return two 224 x 224 pictures and a state vector per step. EnvManager,
with several numbers of processes, and Gymnasium's AsyncVectorEnv over shared memory take turns; medians are printed.
CPU time is that of all processes together and depends less on what else the machine is doing than wall time does.

    python benchmarks/transport.py [--rounds 7] [--seconds 0.5]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import gymnasium
import numpy as np
import psutil

sys.path.append(str(Path(__file__).parent))

from zero_cost_simulator import ACTION, ZeroCostConfig, ZeroCostEnv

from embodyrl.envs.manager import EnvManager
from embodyrl.envs.types import EpisodeSpec

NUM_ENVS = 8


class Contender(NamedTuple):
    """One way of running the simulators."""

    step: Callable[[], object]
    """Step all of them once."""
    close: Callable[[], object]
    processes: list[psutil.Process]
    """Everything whose CPU time counts."""


class Sample(NamedTuple):
    """One measurement, per environment step."""

    cpu_us: float
    wall_us: float


def env_manager(workers: int) -> Contender:
    """EnvManager with this many processes."""
    config = ZeroCostConfig(num_envs=NUM_ENVS, workers=workers)
    here = str(Path(__file__).parent)
    manager = EnvManager(config, chunk_size=1, plugins=["zero_cost_simulator"], plugin_path=here)
    slots = list(range(NUM_ENVS))
    manager.reset(slots, [EpisodeSpec(task="nothing", start_state=0, seed=0)] * NUM_ENVS)
    actions = np.zeros((NUM_ENVS, 1, ACTION), np.float32)
    processes = [psutil.Process(), *(psutil.Process(worker.pid) for worker in manager.workers)]
    return Contender(lambda: manager.step(slots, actions), manager.close, processes)


def async_vector_env() -> Contender:
    """Gymnasium's processes, one per environment, with shared memory."""
    before = set(psutil.Process().children())
    envs = gymnasium.vector.AsyncVectorEnv([ZeroCostEnv] * NUM_ENVS, shared_memory=True, copy=True)
    envs.reset()
    actions = np.zeros((NUM_ENVS, ACTION), np.float32)
    started = [child for child in psutil.Process().children() if child not in before]
    return Contender(lambda: envs.step(actions), envs.close, [psutil.Process(), *started])


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time they have used so far [s]."""
    times = [process.cpu_times() for process in processes]
    return sum(used.user + used.system for used in times)


def measure(contender: Contender, seconds: float) -> Sample:
    """Step for about `seconds` [s]."""
    steps, start, used = 0, time.perf_counter(), cpu_seconds(contender.processes)
    while time.perf_counter() - start < seconds:
        contender.step()
        steps += NUM_ENVS
    wall = time.perf_counter() - start
    return Sample(1e6 * (cpu_seconds(contender.processes) - used) / steps, 1e6 * wall / steps)


def main() -> None:
    """Take turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns per contender")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    contenders = {"AsyncVectorEnv (shared memory, 8 processes)": async_vector_env()}
    contenders |= {f"EnvManager, {workers} processes": env_manager(workers) for workers in (8, 2, 1)}
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    try:
        for _ in range(options.rounds):
            for name, contender in contenders.items():
                samples[name].append(measure(contender, options.seconds))
    finally:
        for contender in contenders.values():
            contender.close()
    medians = {
        name: Sample(median(s.cpu_us for s in taken), median(s.wall_us for s in taken))
        for name, taken in samples.items()
    }
    if options.json:
        print(json.dumps({name: sample._asdict() for name, sample in medians.items()}))
        return
    base = next(iter(medians.values()))
    print(f"{'':46}{'CPU us/step':>12}{'ratio':>7}{'wall us/step':>14}{'ratio':>7}")
    for name, sample in medians.items():
        ratios = base.cpu_us / sample.cpu_us, base.wall_us / sample.wall_us
        print(f"{name:46}{sample.cpu_us:12.1f}{ratios[0]:7.2f}{sample.wall_us:14.1f}{ratios[1]:7.2f}")


if __name__ == "__main__":
    main()
