"""Measure the cost of transferring observations from simulator processes to the policy.

Simulators without any cost of their own return two 224 x 224 images and a state vector per step, and the caller ends up
with its own copy of them. Contenders take turns; medians are printed. CPU time is that of all
processes together and depends less on what else the machine is doing than wall time does.

Compared are contenders that hold as many environments in as many processes, one each:

- EnvManager; the caller copies the images into an array of its own.
- Gymnasium's AsyncVectorEnv over shared memory, which returns copies.
- Stable-Baselines3's SubprocVecEnv, which pickles observations through pipes.
- Queues of tensors, as `queue_manager.py` describes them.

Also measured: EnvManager with several environments per process, and with images that are read without a copy.

    python benchmarks/transport.py [--rounds 7] [--seconds 0.5] [--json benchmarks/results/transport.json]
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
import torch
from stable_baselines3.common.vec_env import SubprocVecEnv

sys.path.append(str(Path(__file__).parent))

from queue_manager import QueueManager
from zero_cost_simulator import ACTION, IMAGES, ZeroCostConfig, ZeroCostEnv

from embodyrl.envs.manager import EnvManager
from embodyrl.envs.types import EpisodeSpec

SIZES = (2, 8)
"""Numbers of processes that are compared."""
OURS = "EnvManager"


class Contender(NamedTuple):
    """One way of running the simulators."""

    step: Callable[[], object]
    """Step all of them once."""
    close: Callable[[], object]
    processes: list[psutil.Process]
    """Everything whose CPU time counts."""
    num_envs: int


class Sample(NamedTuple):
    """One measurement, per environment step."""

    cpu_us: float
    wall_us: float


def env_manager(num_envs: int, workers: int, *, copy: bool = True) -> Contender:
    """EnvManager with this many processes. Without `copy` the caller reads the images where they are."""
    config = ZeroCostConfig(num_envs=num_envs, workers=workers)
    here = str(Path(__file__).parent)
    manager = EnvManager(config, chunk_size=1, plugins=["zero_cost_simulator"], plugin_path=here)
    slots = list(range(num_envs))
    manager.reset(slots, [EpisodeSpec(task="nothing", start_state=0, seed=0)] * num_envs)
    actions = np.zeros((num_envs, 1, ACTION), np.float32)
    mine = np.zeros((num_envs, *IMAGES.shape), np.uint8)

    def step() -> None:
        images = manager.step(slots, actions).observation.images
        if copy and images is not None:
            np.copyto(mine, images)

    started = [psutil.Process(each.pid) for each in manager.workers]
    return Contender(step, manager.close, [psutil.Process(), *started], num_envs)


def async_vector_env(num_envs: int) -> Contender:
    """Gymnasium's processes, one per environment, with shared memory."""
    before = set(psutil.Process().children())
    envs = gymnasium.vector.AsyncVectorEnv([ZeroCostEnv] * num_envs, shared_memory=True, copy=True)
    envs.reset()
    actions = np.zeros((num_envs, ACTION), np.float32)
    started = [child for child in psutil.Process().children() if child not in before]
    return Contender(lambda: envs.step(actions), envs.close, [psutil.Process(), *started], num_envs)


def subproc_vec_env(num_envs: int) -> Contender:
    """Stable-Baselines3's processes, one per environment."""
    envs = SubprocVecEnv([ZeroCostEnv] * num_envs)
    envs.reset()
    actions = np.zeros((num_envs, ACTION), np.float32)
    started = [psutil.Process(process.pid) for process in envs.processes]
    return Contender(lambda: envs.step(actions), envs.close, [psutil.Process(), *started], num_envs)


def tensor_queues(num_envs: int) -> Contender:
    """Queues of tensors."""
    manager = QueueManager(ZeroCostEnv, num_envs, num_envs)
    manager.reset()
    actions = torch.zeros(num_envs, ACTION)
    started = [psutil.Process(process.pid) for process in manager.processes]
    return Contender(lambda: manager.step(actions), manager.close, [psutil.Process(), *started], num_envs)


def start_all() -> dict[tuple[str, int], Contender]:
    """Every contender, by its name and its number of processes."""
    found: dict[tuple[str, int], Contender] = {}
    for size in SIZES:
        found[OURS, size] = env_manager(size, size)
        found["gymnasium AsyncVectorEnv", size] = async_vector_env(size)
        found["Stable-Baselines3 SubprocVecEnv", size] = subproc_vec_env(size)
        found["queues of tensors", size] = tensor_queues(size)
        found[f"{OURS}, images looked at in place", size] = env_manager(size, size, copy=False)
    most = max(SIZES)
    for size in (1, 2):
        found[f"{OURS}, {most} environments in fewer processes", size] = env_manager(most, size)
    return found


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time they have used so far [s]."""
    times = [process.cpu_times() for process in processes]
    return sum(used.user + used.system for used in times)


def measure(contender: Contender, seconds: float) -> Sample:
    """Step for about `seconds` [s]."""
    steps, start, used = 0, time.perf_counter(), cpu_seconds(contender.processes)
    while time.perf_counter() - start < seconds:
        contender.step()
        steps += contender.num_envs
    wall = time.perf_counter() - start
    return Sample(1e6 * (cpu_seconds(contender.processes) - used) / steps, 1e6 * wall / steps)


def main() -> None:
    """Take turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns per contender")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians here, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = psutil.getloadavg()[0]
    medians = compare(options.rounds, options.seconds)
    print(
        f"load average at the start: {load:.1f}; ratios are to {OURS} with as many processes, one environment in each"
    )
    print(f"{'':52}{'processes':>10}{'CPU us/step':>13}{'ratio':>8}{'wall us/step':>14}{'ratio':>8}")
    for (name, size), sample in medians.items():
        base = medians.get((OURS, size))
        ratios = ["", ""]
        if base is not None and "fewer" not in name:  # those hold other numbers of environments
            ratios = [f"{sample.cpu_us / base.cpu_us:.2f}", f"{sample.wall_us / base.wall_us:.2f}"]
        print(f"{name:52}{size:>10}{sample.cpu_us:13.1f}{ratios[0]:>8}{sample.wall_us:14.1f}{ratios[1]:>8}")
    if options.json is not None:
        rows = [
            {"contender": name, "processes": size} | {key: round(value, 1) for key, value in sample._asdict().items()}
            for (name, size), sample in medians.items()
        ]
        conditions = {
            "rounds": options.rounds,
            "seconds": options.seconds,
            "cpus": psutil.cpu_count(),
            "load": round(load, 1),
        }
        options.json.write_text(json.dumps({**conditions, "per_env_step": rows}, indent=2) + "\n")


def compare(rounds: int, seconds: float) -> dict[tuple[str, int], Sample]:
    """Medians by contender and number of processes."""
    contenders = start_all()
    samples: dict[tuple[str, int], list[Sample]] = {name: [] for name in contenders}
    try:
        for number in range(rounds):
            for name in contenders if number % 2 == 0 else reversed(contenders):
                samples[name].append(measure(contenders[name], seconds))
    finally:
        for contender in contenders.values():
            contender.close()
    return {
        name: Sample(median(s.cpu_us for s in taken), median(s.wall_us for s in taken))
        for name, taken in samples.items()
    }


if __name__ == "__main__":
    main()
