"""Compare how many episodes per second are evaluated, beside vla-eval's and LeRobot's loops, with images.

    python benchmarks/evaluation_loops.py --vla-eval FOLDER --lerobot FOLDER [--rounds 3] [--steps 32]
    python benchmarks/evaluation_loops.py --simulator metaworld --lerobot FOLDER [--rounds 3] [--steps 32]

Each folder is one where the package lies, with what it imports (`pip install --target FOLDER --no-deps ...`): their
requirements exclude each other. All contenders play as many episodes of the same task, each of the same number of
control steps, in two processes, with images rendered by OSMesa, and a policy that costs nothing. In LIBERO there are
two cameras of 256 x 256, and ten control steps before, in which objects settle; in MetaWorld, which vla-eval does not
have, one camera of 480 x 480, the only size that LeRobot renders. Peers observe after every action:

- `vla-eval`: its `LIBEROBenchmark` and `SyncEpisodeRunner`, one process for half of the episodes each; the model's
  answer is there at once.
- `lerobot`: its `LiberoEnv` or `MetaworldEnv` in Gymnasium's AsyncVectorEnv, and the loop of its `rollout`: all envs
  are stepped until the last one ends, and observations become float images for the policy.
- `embodyrl, chunks of 8`: the policy sees the end of each chunk, as policies that execute whole chunks do.
- `embodyrl, chunks of 1`: every action is decided on a new image. Here the protocol forbids to leave any out.

Contenders are fresh processes that take turns (forwards, backwards, ...); start-up is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SUITE, TASK, PROCESSES, SETTLE = "libero_spatial", "reach-v3", 2, 10
SIDES = {"libero": 256, "metaworld": 480}
"""Of images, by simulator [pixels]."""
SIDE = SIDES["libero"]
ENV = {
    "libero": ("env=libero/spatial", f"env.tasks=[{SUITE}/0]"),
    "metaworld": ("env=metaworld/reach", f"env.tasks=[{TASK}]", "env.cameras=[corner2]"),
}
"""Our settings, by simulator."""
REST = {"libero": [0.0] * 6 + [-1.0], "metaworld": [0.0] * 4}
"""What the policy does."""
PACKAGES = {"libero": {"vla-eval": "vla_eval", "lerobot": "lerobot"}, "metaworld": {"lerobot": "lerobot"}}
"""Peers and their packages, by simulator."""
OURS = {"embodyrl, chunks of 8": 8, "embodyrl, chunks of 1": 1}


def point_libero_at_its_assets() -> None:
    """Let LIBERO's own package find its files, as ours does."""
    from embodyrl.config import load_config
    from embodyrl.envs.libero.assets import find
    from embodyrl.envs.libero.tasks import package

    config: Any = load_config(None, ["env=libero/spatial", "model=mlp"]).config
    meshes, root = find(config.env), package()
    folder = tempfile.mkdtemp(prefix="embodyrl-libero-")
    places = {"benchmark_root": ".", "bddl_files": "bddl_files", "init_states": "init_files", "datasets": "datasets"}
    text = "".join(f"{name}: {root / place}\n" for name, place in places.items())
    (Path(folder) / "config.yaml").write_text(text + f"assets: {meshes}\n")
    os.environ["LIBERO_CONFIG_PATH"] = folder
    libero: Any = importlib.import_module("libero.libero")
    libero._assets_path_cache = str(meshes)  # else LIBERO downloads them


# ---- ours


def ours(simulator: str, episodes: int, steps: int, chunk: int) -> float:
    """Evaluate with embodyrl; returns seconds."""
    from embodyrl.config import load_config
    from embodyrl.engine.hybrid import HybridEngine
    from embodyrl.envs.manager import start_env_manager
    from embodyrl.models import build_policy
    from embodyrl.runner.evaluation import evaluate, held_out_episodes

    side = SIDES[simulator]
    config = load_config(
        None,
        [
            *(*ENV[simulator], "model=mlp", f"rollout.chunk_size={chunk}", f"env.max_episode_steps={steps}"),
            *(f"env.num_envs={PROCESSES}", f"env.workers={PROCESSES}", f"env.image_size=[{side},{side}]"),
            *(f"eval.episodes={episodes}", "rollout.num_chunks=4", "algorithm.minibatches=1"),
        ],
    ).config
    with start_env_manager(config.env, chunk_size=chunk) as manager:
        policy = build_policy(config.model, manager.spec, chunk_size=chunk, seed=1)
        engine = HybridEngine(policy, config=config.engine, iterations=1, seed=1)
        played = held_out_episodes(config)
        evaluate(manager, engine, played[:PROCESSES])  # environments are built with their first episodes
        start = time.perf_counter()
        found = evaluate(manager, engine, played)
        seconds = time.perf_counter() - start
    assert found.metrics()["eval/episode_length"] == steps, found.metrics()
    return seconds


# ---- vla-eval


class AtOnce:
    """A connection to a model that answers at once."""

    async def start_episode(self, payload: dict[str, Any]) -> None:
        """Take note."""

    async def act(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Do nothing with an open gripper."""
        import numpy as np

        assert observation["images"]["wrist"].shape == (SIDE, SIDE, 3)
        return {"actions": np.array(REST["libero"], np.float32)}

    async def end_episode(self, result: dict[str, Any]) -> None:
        """Take note."""


def share_of_vla_eval(number: int, episodes: int, steps: int, ready: Any, done: Any) -> None:
    """Play one process' share."""
    point_libero_at_its_assets()
    peer: Any = importlib.import_module("vla_eval.benchmarks.libero.benchmark")
    runners: Any = importlib.import_module("vla_eval.runners.sync_runner")
    recorder = importlib.import_module("vla_eval.recording").NullEpisodeRecorder()
    benchmark = peer.LIBEROBenchmark(SUITE, num_steps_wait=SETTLE, send_wrist_image=True, send_state=True)
    task, runner = benchmark.get_tasks()[0], runners.SyncEpisodeRunner()

    def play(index: int) -> int:
        episode = runner.run_episode(
            benchmark, {**task, "episode_idx": index}, AtOnce(), max_steps=steps, recorder=recorder
        )
        found: Any = asyncio.run(episode)
        return int(found["steps"])

    play(0)
    ready.wait()
    assert [play(number + PROCESSES * each) for each in range(episodes)] == [steps] * episodes
    done.wait()


def vla_eval(simulator: str, episodes: int, steps: int) -> float:
    """Evaluate with vla-eval's loop; returns seconds."""
    assert simulator == "libero"
    spawn = multiprocessing.get_context("spawn")
    ready, done = spawn.Barrier(PROCESSES + 1), spawn.Barrier(PROCESSES + 1)
    workers = [
        spawn.Process(target=share_of_vla_eval, args=(number, episodes // PROCESSES, steps, ready, done))
        for number in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    ready.wait(600)
    start = time.perf_counter()
    done.wait(1800)
    seconds = time.perf_counter() - start
    for worker in workers:
        worker.join()
    return seconds


# ---- LeRobot


def make_lerobot_env(simulator: str, index: int, steps: int) -> Any:
    """LeRobot's environment. Its package of processors, of which it takes the name of a type, is not imported."""
    processor: Any = types.ModuleType("lerobot.processor")
    processor.RobotObservation = processor.RobotAction = dict
    sys.modules["lerobot.processor"] = processor
    if simulator == "metaworld":
        return importlib.import_module("lerobot.envs.metaworld").MetaworldEnv(TASK, obs_type="pixels_agent_pos")
    point_libero_at_its_assets()
    libero: Any = importlib.import_module("lerobot.envs.libero")
    suite = libero._get_suite(SUITE)
    return libero.LiberoEnv(
        task_suite=suite,
        task_id=0,
        task_suite_name=SUITE,
        episode_length=steps,
        obs_type="pixels_agent_pos",
        observation_width=SIDE,
        observation_height=SIDE,
        episode_index=index,
        n_envs=PROCESSES,
        num_steps_wait=SETTLE,
    )


def lerobot(simulator: str, episodes: int, steps: int) -> float:
    """Evaluate with LeRobot's environments and loop; returns seconds."""
    import functools

    import gymnasium
    import numpy as np
    import torch

    side = SIDES[simulator]
    makers = [functools.partial(make_lerobot_env, simulator, index, steps) for index in range(PROCESSES)]
    envs = gymnasium.vector.AsyncVectorEnv(makers, context="spawn")

    def rollout() -> None:
        seen, _ = envs.reset(seed=[0] * PROCESSES)
        done = np.zeros(PROCESSES, bool)
        for step in range(steps):
            pixels = seen["pixels"]
            images = [
                torch.from_numpy(each).permute(0, 3, 1, 2).contiguous().float() / 255
                for each in (pixels.values() if isinstance(pixels, dict) else [pixels])
            ]
            assert images[0].shape == (PROCESSES, 3, side, side)
            action = np.tile(np.array(REST[simulator], np.float32), (PROCESSES, 1))
            seen, _, terminated, truncated, _ = envs.step(action)
            done |= terminated | truncated | (step + 1 == steps)

    rollout()
    start = time.perf_counter()
    for _ in range(episodes // PROCESSES):
        rollout()
    seconds = time.perf_counter() - start
    envs.close()
    return seconds


# ---- the report


def measure(simulator: str, name: str, episodes: int, steps: int, folders: dict[str, Path]) -> float:
    """Seconds of one contender in a process of its own."""
    paths = [str(folder) for folder in (folders.get(name), Path(__file__).parent) if folder is not None]
    environment = {
        **os.environ,
        "MUJOCO_GL": "osmesa",
        "PYOPENGL_PLATFORM": "osmesa",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    sizes = ["--episodes", str(episodes), "--steps", str(steps)]
    command = [sys.executable, __file__, "--one", name, "--simulator", simulator, *sizes]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: ended with status {done.returncode}\n{done.stdout[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, or be one contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulator", choices=PACKAGES, default="libero")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=32, help="control steps of an episode, a multiple of 8")
    parser.add_argument("--vla-eval", type=Path)
    parser.add_argument("--lerobot", type=Path)
    parser.add_argument("--one", choices=(*PACKAGES["libero"], *OURS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/evaluation_loops_SIMULATOR.json")
    chosen = parser.parse_args(arguments)
    simulator = chosen.simulator
    if chosen.one:
        peer = {"vla-eval": vla_eval, "lerobot": lerobot}.get(chosen.one)
        sizes = (simulator, chosen.episodes, chosen.steps)
        print(peer(*sizes) if peer else ours(*sizes, OURS[chosen.one]))
        return
    folders: dict[str, Path] = {}
    for name, package in PACKAGES[simulator].items():
        folders[name] = getattr(chosen, name.replace("-", "_"))
        if folders[name] is None or not (folders[name] / package).is_dir():
            parser.error(f"--{name} must name a folder that holds the package {package}, got {folders[name]}")
    if chosen.episodes % PROCESSES or chosen.steps % 8:
        parser.error(f"--episodes must be a multiple of {PROCESSES}, --steps one of 8")
    contenders = (*folders, *OURS)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(chosen.rounds):
        for name in contenders if number % 2 == 0 else reversed(contenders):
            seconds[name].append(measure(simulator, name, chosen.episodes, chosen.steps, folders))
            print(f"round {number + 1}  {name:24s} {chosen.episodes / seconds[name][-1]:7.3f} episodes/s", flush=True)
    rates = {name: chosen.episodes / statistics.median(each) for name, each in seconds.items()}
    result = {
        "episodes_per_s": {name: round(rate, 4) for name, rate in rates.items()},
        "against": {own: {peer: round(rates[own] / rates[peer], 2) for peer in folders} for own in OURS},
        "seconds": {name: [round(each, 2) for each in values] for name, values in seconds.items()},
        "episodes": chosen.episodes,
        "steps": chosen.steps,
        "processes": PROCESSES,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
    }
    out = chosen.out or RESULTS / f"evaluation_loops_{simulator}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["against"], indent=1))


if __name__ == "__main__":
    main()
