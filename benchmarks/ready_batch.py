"""Compare schedules of a rollout when control steps differ in length.

16 simulators in processes of their own, whose control steps sleep 5 ms on average (lognormal, sigma 0.6), and a policy
that sleeps 5 + 2.2 n ms to act for n of them (40 ms for all), 8 actions at a time. Real EnvManager, real Collector;
every schedule gets the same lengths. They take turns; medians are printed.

- step barrier: all envs execute one control step, then the next, eight times per chunk, as stacks that step a vector of
  environments do.
- lockstep, pipeline, ready_batch: the settings of `rollout.schedule`, one command per chunk.

    python benchmarks/ready_batch.py [--rounds 5] [--chunks 24] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch
from torch import nn

sys.path.append(str(Path(__file__).parent))

from sleeping_simulator import SleepingConfig

from embodyrl.config.schema import EngineConfig, RolloutConfig, Schedule
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs.manager import EnvManager
from embodyrl.envs.types import EpisodeSpec
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Policy
from embodyrl.rollout.collector import Collector
from embodyrl.rollout.episodes import EpisodeSource

NUM_ENVS, CHUNK, ACTION = 16, 8, 7
HERE = str(Path(__file__).parent)
Run = Callable[[], float]
"""Collects once; returns control steps per second."""


def decide(count: int) -> None:
    """Sleep as long as a policy computes for this many slots."""
    time.sleep((5.0 + 2.2 * count) / 1e3)


class SleepingPolicy(Policy):
    """A policy that sleeps and returns zeros."""

    def __init__(self) -> None:
        """Have one weight, as an optimiser needs."""
        nn.Module.__init__(self)
        self.chunk_size = CHUNK
        self.weight = nn.Parameter(torch.zeros(()))

    def act(self, inputs: Inputs, mode: str, generator: torch.Generator | None = None) -> ActOutput:
        """Zeros, after a while."""
        count = len(inputs["proprio"])
        decide(count)
        return ActOutput(
            actions=torch.zeros(count, CHUNK, ACTION), logprobs=torch.zeros(count, 1), values=None, trace={}
        )

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """Not used; nothing is learned here."""
        raise NotImplementedError


def simulators(stack: ExitStack, chunk_size: int) -> tuple[SleepingConfig, EnvManager]:
    """One slot per process."""
    config = SleepingConfig(num_envs=NUM_ENVS, workers=NUM_ENVS, max_episode_steps=10**6)
    manager = EnvManager(config, chunk_size=chunk_size, plugins=["sleeping_simulator"], plugin_path=HERE)
    return config, stack.enter_context(manager)


def step_barrier(stack: ExitStack, chunks: int) -> Run:
    """All slots wait for each other after every control step."""
    _, manager = simulators(stack, 1)
    slots = list(range(NUM_ENVS))
    manager.reset(slots, [EpisodeSpec(task="sleep", start_state=0, seed=slot) for slot in slots])
    action = np.zeros((NUM_ENVS, 1, ACTION), np.float32)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(chunks):
            decide(NUM_ENVS)
            for _ in range(CHUNK):
                manager.step(slots, action)
        return chunks * NUM_ENVS * CHUNK / (time.perf_counter() - start)

    return run


def collector(stack: ExitStack, chunks: int, schedule: Schedule, ready_slots: int | str = "auto") -> Run:
    """The product's own loop."""
    config, manager = simulators(stack, CHUNK)
    engine = HybridEngine(
        SleepingPolicy(),
        config=EngineConfig(),
        iterations=1,
        seed=1,
    )
    rollout = RolloutConfig(num_chunks=chunks, chunk_size=CHUNK, schedule=schedule, ready_slots=ready_slots)
    source = EpisodeSource(config.sources, group_size=1, seed=1)
    collecting = Collector(manager, engine, source=source, config=rollout, critic=False)

    def run() -> float:
        start = time.perf_counter()
        steps = collecting.collect().env_steps
        return steps / (time.perf_counter() - start)

    return run


def contenders(stack: ExitStack, chunks: int) -> dict[str, Run]:
    """All of them, by name."""
    found = {"step barrier": step_barrier(stack, chunks)}
    for schedule in (Schedule.lockstep, Schedule.pipeline):
        found[str(schedule)] = collector(stack, chunks, schedule)
    for ready_slots in (2, 4, 8):
        found[f"ready_batch, {ready_slots} slots"] = collector(stack, chunks, Schedule.ready_batch, ready_slots)
    return found


def main() -> None:
    """Take turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns per schedule")
    parser.add_argument("--chunks", type=int, default=24, help="chunks per env and turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians here, too")
    options = parser.parse_args()
    load = psutil.getloadavg()[0]
    with ExitStack() as stack:
        runs = contenders(stack, options.chunks)
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, run in runs.items():
                speeds[name].append(run())
    medians = {name: median(found) for name, found in speeds.items()}
    print(f"{'':24}{'control steps/s':>17}{'to step barrier':>17}{'to lockstep':>13}")
    for name, speed in medians.items():
        print(f"{name:24}{speed:17.0f}{speed / medians['step barrier']:17.2f}{speed / medians['lockstep']:13.2f}")
    if options.json is not None:
        conditions = {"rounds": options.rounds, "chunks": options.chunks, "load": round(load, 1)}
        table = {name: {"steps_per_s": round(speed, 1)} for name, speed in medians.items()}
        options.json.write_text(json.dumps({**conditions, "schedules": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
