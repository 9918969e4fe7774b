"""Measure how much observing only the end of a chunk saves: control steps per second with images, real simulators.

    python benchmarks/chunk_observation.py [--env metaworld/reach_rgb] [--rounds 5] [--json FILE] [key=value ...]
    python benchmarks/chunk_observation.py --env libero/spatial --slots 2

The same episodes with the same actions, chunks of 8, in the same number of processes:

- `chunk_end`: one command per chunk, one observation at its end. This is how embodyrl rolls out.
- `every_step`: one command per chunk, every observation kept (`rollout.observe: every_step`).
- `lockstep`: one command and one observation per control step, as peers do; the policy uses every 8th.
- `async_vector_env` (MetaWorld only): the same with Gymnasium's processes, one per slot, around MetaWorld's own
  environment and its own drawing.

Contenders take turns (forwards, backwards, ...), so that other load on the machine affects all alike. Each turn begins
with a reset, which is not measured. CPU time is that of all processes together. The last observations of our three are
compared: they must be equal bit for bit. `render_quality` is full unless overridden: with `env.render_quality=fast`
drawing costs less, so there is less to save. Extra `key=value` arguments are overrides of the config.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import psutil
from numpy.typing import NDArray

from embodyrl.config import ConfigError, load_config
from embodyrl.config.schema import EnvConfig
from embodyrl.envs.manager import EnvManager
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.types import EpisodeSpec, SimulatorSpec

CHUNK = 8
PEER = "lockstep"
TARGETS = {"metaworld": 5.0, "libero": 3.0}
"""Required speed of `chunk_end` relative to `lockstep`."""


class Contender(NamedTuple):
    """One way of running the simulators."""

    reset: Callable[[], object]
    """Start the episodes."""
    play: Callable[[NDArray[np.float32]], object]
    """Execute a chunk `[slots, 8, D]`; return the observation at its end."""
    close: Callable[[], object]
    processes: list[psutil.Process]
    """Return all processes whose CPU time counts."""


class Sample(NamedTuple):
    """One turn."""

    steps_per_s: float
    """Control steps of all slots together per second of wall time."""
    cpu_ms_per_step: float
    """CPU time per control step of one slot [ms]."""


def env_manager(manager: EnvManager) -> Contender:
    """EnvManager, with a chunk cut into as many commands as its chunk size asks for."""
    slots = list(range(manager.num_envs))
    (task,) = manager.spec.tasks
    episodes = [EpisodeSpec(task=task, start_state=slot, seed=slot) for slot in slots]

    def play(actions: NDArray[np.float32]) -> object:
        for part in np.split(actions, CHUNK // manager.chunk_size, axis=1):
            result = manager.step(slots, part)
        return result.observation

    processes = [psutil.Process(), *(psutil.Process(worker.pid) for worker in manager.workers)]
    return Contender(lambda: manager.reset(slots, episodes), play, manager.close, processes)


class MetaWorldsOwn:
    """Builds MetaWorld's environment with its own drawing as Gymnasium users do; picklable."""

    def __init__(self, env: EnvConfig) -> None:
        self._task, self._camera = env.tasks[0], env.cameras[0]
        self._height, self._width = env.image_size

    def __call__(self) -> gymnasium.Env[Any, Any]:
        """The environment."""
        import metaworld  # noqa: F401  (registers its environments)
        from gymnasium.wrappers import AddRenderObservation

        made = gymnasium.make(
            "Meta-World/MT1",
            env_name=self._task,
            render_mode="rgb_array",
            camera_name=self._camera,
            height=self._height,
            width=self._width,
            disable_env_checker=True,
        )
        return AddRenderObservation(made, render_only=False, render_key="image")


def async_vector_env(env: EnvConfig) -> Contender:
    """Gymnasium's processes, one per slot."""
    rendering.choose()
    before = set(psutil.Process().children())
    envs = gymnasium.vector.AsyncVectorEnv([MetaWorldsOwn(env)] * env.num_envs, shared_memory=True, context="spawn")
    started = [child for child in psutil.Process().children() if child not in before]

    def play(actions: NDArray[np.float32]) -> object:
        for step in range(CHUNK):
            observation = envs.step(actions[:, step])[0]
        return observation

    return Contender(lambda: envs.reset(seed=0), play, envs.close, [psutil.Process(), *started])


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time they have used so far [s]."""
    times = [process.cpu_times() for process in processes]
    return sum(used.user + used.system for used in times)


def measure(contender: Contender, actions: NDArray[np.float32]) -> tuple[Sample, Any]:
    """One turn: execute `actions [chunks, slots, 8, D]`; returns what was measured and the last observation."""
    contender.reset()
    used, start = cpu_seconds(contender.processes), time.perf_counter()
    for chunk in actions:
        seen = contender.play(chunk)
    wall = time.perf_counter() - start
    steps = actions.shape[0] * actions.shape[1] * CHUNK
    cpu = cpu_seconds(contender.processes) - used
    return Sample(steps / wall, 1e3 * cpu / steps), seen


def take_turns(contenders: dict[str, Contender], actions: NDArray[np.float32], rounds: int) -> dict[str, list[Sample]]:
    """Samples of every contender, and the check that ours saw the same."""
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for number in range(-1, rounds):  # the first round only warms up
        order = list(contenders)[:: 1 if number % 2 else -1]
        seen = {}
        for name in order:
            sample, seen[name] = measure(contenders[name], actions)
            if number >= 0:
                samples[name].append(sample)
        ours = [(view.images.copy(), view.proprio) for name, view in seen.items() if name != "async_vector_env"]
        for images, proprio in ours[1:]:
            if not (np.array_equal(images, ours[0][0]) and np.array_equal(proprio, ours[0][1])):
                raise RuntimeError("the contenders' last observations differ: this measures nothing")
    return samples


def random_actions(spec: SimulatorSpec, shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Actions `[*shape, D]` within the bounds, always the same."""
    generator = np.random.default_rng(0)
    return generator.uniform(spec.action_low, spec.action_high, (*shape, spec.action_dim)).astype(np.float32)


def read_env(options: argparse.Namespace) -> EnvConfig:
    """The simulator's config: one task, and no episode that ends within a turn."""
    settings = [f"env={options.env}", f"env.num_envs={options.slots}", f"env.workers={options.workers}"]
    try:
        env = load_config(None, [*settings, "algorithm.minibatches=1", *options.overrides]).config.env
    except ConfigError as error:
        sys.exit(str(error))
    if not env.cameras:
        sys.exit(f"{options.env} has no cameras: add env.cameras=[...]")
    return dataclasses.replace(env, tasks=env.tasks[:1], max_episode_steps=CHUNK * options.chunks + 1)


def summary(samples: dict[str, list[Sample]]) -> dict[str, dict[str, float]]:
    """Medians, and how many times as fast and as cheap each is as the peers' way (medians of the rounds' ratios)."""
    table = {}
    for name, taken in samples.items():
        pairs = list(zip(taken, samples[PEER], strict=True))
        table[name] = {
            "steps_per_s": median(sample.steps_per_s for sample in taken),
            "speedup": median(sample.steps_per_s / peer.steps_per_s for sample, peer in pairs),
            "cpu_ms_per_step": median(sample.cpu_ms_per_step for sample in taken),
            "cpu_saving": median(peer.cpu_ms_per_step / sample.cpu_ms_per_step for sample, peer in pairs),
        }
    return table


def print_table(table: dict[str, dict[str, float]], target: float | None) -> None:
    """Print a summary."""
    print(f"{'':18}{'control steps/s':>16}{'speed-up':>10}{'CPU ms/step':>13}{'CPU saving':>12}")
    for name, row in table.items():
        rates = f"{row['steps_per_s']:16.1f}{row['speedup']:10.2f}"
        print(f"{name:18}{rates}{row['cpu_ms_per_step']:13.2f}{row['cpu_saving']:12.2f}")
    if target is not None:
        print(f"target: chunk_end {target:g} times as fast as {PEER}")


def rounded(row: dict[str, float]) -> dict[str, float]:
    """The same with two digits after the point."""
    return {name: round(value, 2) for name, value in row.items()}


def write_json(
    options: argparse.Namespace, env: EnvConfig, table: dict[str, dict[str, float]], samples: dict[str, list[Sample]]
) -> None:
    """Add the measurement to a file that may hold those of other simulators."""
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    known[options.env] = {
        "machine": {"cpus": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)},
        "setting": {
            "slots": options.slots,
            "workers": options.workers,
            "chunk": CHUNK,
            "chunks_per_turn": options.chunks,
            "rounds": options.rounds,
            "task": env.tasks[0],
            "cameras": env.cameras,
            "image_size": env.image_size,
            "overrides": options.overrides,
        },
        "target": TARGETS.get(env.name),
        "medians": {name: rounded(row) for name, row in table.items()},
        "rounds": {name: [rounded(sample._asdict()) for sample in taken] for name, taken in samples.items()},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(known, indent=2) + "\n")


def main() -> None:
    """Take turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="metaworld/reach_rgb", help="group file below configs/env/")
    parser.add_argument("--slots", type=int, default=4, help="simulator slots")
    parser.add_argument("--workers", type=int, default=2, help="simulator processes")
    parser.add_argument("--chunks", type=int, default=4, help="chunks of 8 actions per turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns per contender")
    parser.add_argument("--json", type=Path, help="add what was measured to this file, under the name of --env")
    parser.add_argument("overrides", nargs="*", help="key=value, as of `embodyrl run`")
    options = parser.parse_args()
    os.environ.setdefault("LP_NUM_THREADS", "1")  # Mesa on the CPU: as EnvManager has it, for Gymnasium's processes too
    env = read_env(options)
    managers: dict[str, EnvManager] = {}
    contenders: dict[str, Contender] = {}
    try:
        managers["chunk_end"] = EnvManager(env, chunk_size=CHUNK)
        managers["every_step"] = EnvManager(env, chunk_size=CHUNK, every_step=True)
        managers[PEER] = EnvManager(env, chunk_size=1)
        contenders = {name: env_manager(manager) for name, manager in managers.items()}
        if env.name == "metaworld":
            contenders["async_vector_env"] = async_vector_env(env)
        actions = random_actions(managers[PEER].spec, (options.chunks, options.slots, CHUNK))
        samples = take_turns(contenders, actions, options.rounds)
    finally:
        for manager in managers.values():
            manager.close()
        for contender in contenders.values():
            contender.close()
    table = summary(samples)
    print_table(table, TARGETS.get(env.name))
    if options.json:
        write_json(options, env, table, samples)


if __name__ == "__main__":
    main()
