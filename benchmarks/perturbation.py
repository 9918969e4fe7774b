"""Measure what perturbed episodes cost: a step and a reset with and without each kind, in one process.

    python benchmarks/perturbation.py [--env metaworld/reach_rgb] [--level 5] [--steps 10] [--rounds 40] [--json FILE]
                                      [key=value ...]

Plain and perturbed episodes take turns (forwards, backwards, ...), so that other load on the machine affects all alike.
A turn is a reset and `--steps` steps of one action, each with an observation; all turns of a round have the same
actions and the same seed, and each round has a seed of its own: one draw of a camera may see more than another.
`ratio` is the median over rounds of the CPU time of a perturbed step, divided by that of the plain one of the same
round, with its 95 % interval (bootstrap). All kinds that only change what is seen execute the same physics; `layout`
and `robot` begin elsewhere, so their contacts, and with them the time of the physics, may differ.

A step may cost 5 % more (except with noise, which works on every pixel): if the whole interval is above that, the exit
code is 1. Further
arguments are overrides of the config.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from embodyrl.config import load_config
from embodyrl.config.infos import simulator_info
from embodyrl.config.schema import KINDS, Config
from embodyrl.envs.types import EpisodeSpec, Simulator
from embodyrl.registry import SIMULATORS

MOST = 1.05
"""Largest ratio of a perturbed step to a plain one, of all kinds but noise."""
PLAIN = "none"
LAYOUTS = ("layout", "robot")
"""Kinds whose physics differ, so that their ratio is shown and not judged."""


class Turn(NamedTuple):
    """One episode."""

    reset_ms: float
    step_ms: float
    """CPU time."""


def play(simulator: Simulator, episode: EpisodeSpec, steps: int) -> Turn:
    """Reset and step once."""
    spec = simulator.spec
    actions = np.random.default_rng(episode.seed).uniform(
        spec.action_low, spec.action_high, (steps, 1, 1, spec.action_dim)
    )
    begun = time.process_time()
    simulator.reset([0], [episode])
    reset, count = time.process_time(), 0
    for action in actions.astype(np.float32):
        count += 1
        result = simulator.step_chunk([0], action)
        if result.terminated[0] or result.truncated[0]:
            break
    return Turn(1e3 * (reset - begun), 1e3 * (time.process_time() - reset) / count)


def measure(config: Config, level: int, steps: int, rounds: int) -> dict[str, list[Turn]]:
    """Return the turns of each kind, and of plain episodes."""
    env = config.env
    kinds = [PLAIN, *(kind for kind in KINDS if kind in simulator_info(env.name).perturbations(env))]
    simulator: Simulator = SIMULATORS.load(env.name)(env, 1)
    turns: dict[str, list[Turn]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            changed = () if kind == PLAIN else ((kind, level),)
            episode = EpisodeSpec(task=env.tasks[0], start_state=number, seed=number, perturb=changed)
            turns[kind].append(play(simulator, episode, steps))
    for each in turns.values():  # the first loads or compiles what all need
        del each[0]
    simulator.close()
    return turns


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of their median: percentiles of 2,000 bootstrap samples."""
    drawn = np.random.default_rng(0).choice(np.asarray(ratios), (2000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="metaworld/reach_rgb")
    parser.add_argument("--level", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    config = load_config("experiment/metaworld_reach_cnn", [f"env={asked.env}", *asked.overrides]).config
    turns = measure(config, asked.level, asked.steps, asked.rounds)
    size = f"images {config.env.image_size}, render_quality {getattr(config.env, 'render_quality', '-')}"
    print(f"{asked.env}, {size}, level {asked.level}, {asked.rounds} rounds of {asked.steps} steps")
    print(f"{'kind':8} {'step [ms]':>10} {'ratio':>7} {'95 % interval':>16} {'reset [ms]':>11}")
    found, slow = {}, []
    for kind, own in turns.items():
        ratios = [one.step_ms / other.step_ms for one, other in zip(own, turns[PLAIN], strict=True)]
        step, reset, ratio = median(each.step_ms for each in own), median(each.reset_ms for each in own), median(ratios)
        low, high = interval(ratios)
        print(f"{kind:8} {step:10.3f} {ratio:7.3f} {low:7.3f} .. {high:5.3f} {reset:11.1f}")
        found[kind] = {"step_ms": step, "ratio": ratio, "low": low, "high": high, "reset_ms": reset}
        if low > MOST and kind not in (*LAYOUTS, "noise"):
            slow.append(kind)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if slow:
        print(f"more than {MOST - 1:.0%} slower: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
