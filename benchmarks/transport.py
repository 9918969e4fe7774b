"""What it costs to carry observations from simulator processes to the policy.

Eight simulators without any cost of their own return two 224 x 224 pictures and a state vector per step, and the caller
ends up with a copy of all of them that is its own. Contenders take turns; medians are printed. CPU time is that of all
processes together and depends less on what else the machine is doing than wall time does.

- EnvManager with several numbers of processes; the caller copies the pictures into an array of its own.
- Gymnasium's AsyncVectorEnv over shared memory, which returns copies.
- Stable-Baselines3's SubprocVecEnv, which pickles observations through pipes.
- Queues of tensors, as `queue_manager.py` describes them.

    python benchmarks/transport.py [--rounds 7] [--seconds 0.5] [--json FILE]
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

NUM_ENVS = 8
BASE = "EnvManager, 2 processes"
"""What ratios are given to: `env.workers: auto` on a machine with two cores."""


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


def env_manager(workers: int, *, copy: bool = True) -> Contender:
    """EnvManager with this many processes. Without `copy` the caller looks at the pictures where they are."""
    config = ZeroCostConfig(num_envs=NUM_ENVS, workers=workers)
    here = str(Path(__file__).parent)
    manager = EnvManager(config, chunk_size=1, plugins=["zero_cost_simulator"], plugin_path=here)
    slots = list(range(NUM_ENVS))
    manager.reset(slots, [EpisodeSpec(task="nothing", start_state=0, seed=0)] * NUM_ENVS)
    actions = np.zeros((NUM_ENVS, 1, ACTION), np.float32)
    mine = np.zeros((NUM_ENVS, *IMAGES.shape), np.uint8)

    def step() -> None:
        images = manager.step(slots, actions).observation.images
        if copy and images is not None:
            np.copyto(mine, images)

    return Contender(step, manager.close, [psutil.Process(), *(psutil.Process(each.pid) for each in manager.workers)])


def async_vector_env() -> Contender:
    """Gymnasium's processes, one per environment, with shared memory."""
    before = set(psutil.Process().children())
    envs = gymnasium.vector.AsyncVectorEnv([ZeroCostEnv] * NUM_ENVS, shared_memory=True, copy=True)
    envs.reset()
    actions = np.zeros((NUM_ENVS, ACTION), np.float32)
    started = [child for child in psutil.Process().children() if child not in before]
    return Contender(lambda: envs.step(actions), envs.close, [psutil.Process(), *started])


def subproc_vec_env() -> Contender:
    """Stable-Baselines3's processes, one per environment."""
    envs = SubprocVecEnv([ZeroCostEnv] * NUM_ENVS)
    envs.reset()
    actions = np.zeros((NUM_ENVS, ACTION), np.float32)
    started = [psutil.Process(process.pid) for process in envs.processes]
    return Contender(lambda: envs.step(actions), envs.close, [psutil.Process(), *started])


def tensor_queues(processes: int) -> Contender:
    """Queues of tensors."""
    manager = QueueManager(ZeroCostEnv, NUM_ENVS, processes)
    manager.reset()
    actions = torch.zeros(NUM_ENVS, ACTION)
    started = [psutil.Process(process.pid) for process in manager.processes]
    return Contender(lambda: manager.step(actions), manager.close, [psutil.Process(), *started])


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians here, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = psutil.getloadavg()[0]
    medians = compare(options.rounds, options.seconds)
    base = medians[BASE]
    print(f"{'':52}{'CPU us/step':>12}{'ratio':>8}{'wall us/step':>14}{'ratio':>8}")
    for name, sample in medians.items():
        ratios = sample.cpu_us / base.cpu_us, sample.wall_us / base.wall_us
        print(f"{name:52}{sample.cpu_us:12.1f}{ratios[0]:8.2f}{sample.wall_us:14.1f}{ratios[1]:8.2f}")
    if options.json is not None:
        table = {name: {key: round(value, 1) for key, value in s._asdict().items()} for name, s in medians.items()}
        conditions = {
            "rounds": options.rounds,
            "seconds": options.seconds,
            "cpus": psutil.cpu_count(),
            "load": round(load, 1),
        }
        options.json.write_text(json.dumps({**conditions, "per_env_step": table}, indent=2) + "\n")


def compare(rounds: int, seconds: float) -> dict[str, Sample]:
    """Medians by contender."""
    contenders = {
        BASE: env_manager(2),
        "EnvManager, 8 processes": env_manager(8),
        "EnvManager, 1 process": env_manager(1),
        "EnvManager, 2 processes, pictures looked at in place": env_manager(2, copy=False),
        "gymnasium AsyncVectorEnv, 8 processes": async_vector_env(),
        "SB3 SubprocVecEnv, 8 processes": subproc_vec_env(),
        "queues of tensors, 2 processes": tensor_queues(2),
        "queues of tensors, 8 processes": tensor_queues(8),
    }
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    try:
        for _ in range(rounds):
            for name, contender in contenders.items():
                samples[name].append(measure(contender, seconds))
    finally:
        for contender in contenders.values():
            contender.close()
    return {
        name: Sample(median(s.cpu_us for s in taken), median(s.wall_us for s in taken))
        for name, taken in samples.items()
    }


if __name__ == "__main__":
    main()
