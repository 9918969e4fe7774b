"""Measure start-up time and private memory of simulator processes: fresh interpreters, and forks.

Usage: python benchmarks/worker_start.py [--simulators metaworld maniskill libero] [--workers 2] [--repeats 3]

For every simulator and way of starting: seconds until all processes have shown a first observation, CPU seconds spent
by them (and by the process they are forked from), memory that each worker has to itself (USS), and what all of them
take together (the sum of PSS, which shares shared pages out). Runs are interleaved; the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from embodyrl.config.schema import EnvConfig, StartMethod
from embodyrl.envs.manager import EnvManager
from embodyrl.envs.options import GymnasiumConfig, LiberoConfig, ManiSkillConfig, MetaWorldConfig
from embodyrl.envs.types import EpisodeSpec

MIB = 2**20
METHODS = (StartMethod.spawn, StartMethod.fork)
FIGURES = ("boot_s", "cpu_s", "worker_uss_mib", "all_pss_mib")


def simulators(assets: str | None) -> dict[str, Callable[[int, StartMethod], EnvConfig]]:
    """Config of each simulator, from the number of processes and the way of starting."""
    return {
        "gymnasium": lambda workers, method: GymnasiumConfig(
            name="gymnasium", tasks=["Pendulum-v1"], num_envs=workers, workers=workers, start_method=method
        ),
        "metaworld": lambda workers, method: MetaWorldConfig(
            name="metaworld", tasks=["reach-v3"], num_envs=workers, workers=workers, start_method=method
        ),
        "metaworld-rgb": lambda workers, method: MetaWorldConfig(
            name="metaworld",
            tasks=["reach-v3"],
            num_envs=workers,
            workers=workers,
            start_method=method,
            cameras=["corner2"],
        ),
        "maniskill": lambda workers, method: ManiSkillConfig(
            name="maniskill", tasks=["PushCube-v1"], num_envs=workers, workers=workers, start_method=method
        ),
        "libero": lambda workers, method: LiberoConfig(
            name="libero",
            tasks=["libero_spatial/0"],
            num_envs=workers,
            workers=workers,
            start_method=method,
            assets=assets,
        ),
    }


def measure(config: EnvConfig) -> dict[str, float]:
    """Start the processes once, up to their first observations."""
    started = time.monotonic()
    with EnvManager(config, chunk_size=1) as manager:
        task = next(iter(manager.spec.tasks))
        slots = range(config.num_envs)
        manager.reset(slots, [EpisodeSpec(task=task, start_state=slot, seed=slot) for slot in slots])
        boot = time.monotonic() - started
        everybody = psutil.Process().children(recursive=True)
        workers = {worker.pid for worker in manager.workers}
        memory = {process.pid: process.memory_full_info() for process in everybody}
        times = [process.cpu_times() for process in everybody]
        return {
            "boot_s": boot,
            "cpu_s": sum(t.user + t.system for t in times),
            "worker_uss_mib": statistics.mean(memory[pid].uss for pid in workers) / MIB,
            "all_pss_mib": sum(info.pss for info in memory.values()) / MIB,
        }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulators", nargs="+", default=["gymnasium", "metaworld", "metaworld-rgb", "maniskill"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--assets", help="LIBERO's folder of meshes and textures")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    chosen = {name: simulators(options.assets)[name] for name in options.simulators}
    runs: dict[tuple[str, StartMethod], list[dict[str, float]]] = {}
    for _ in range(options.repeats):
        for name, config in chosen.items():
            for method in METHODS:
                runs.setdefault((name, method), []).append(measure(config(options.workers, method)))
    table = {
        f"{name} {method}": {figure: statistics.median(run[figure] for run in of) for figure in FIGURES}
        for (name, method), of in runs.items()
    }
    print(f"{options.workers} processes, median of {options.repeats}")
    print(f"{'':24}" + "".join(f"{figure:>16}" for figure in FIGURES))
    for label, row in table.items():
        print(f"{label:24}" + "".join(f"{row[figure]:16.2f}" for figure in FIGURES))
    if options.json:
        options.json.write_text(json.dumps({"workers": options.workers, "medians": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
