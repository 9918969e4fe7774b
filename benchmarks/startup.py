"""Measure how long a run takes to its first env step, beside the imports that nobody can do without.

    python benchmarks/startup.py [--rounds 3] [--out benchmarks/results/startup.json]

For each simulator with a small network, and for MetaWorld with vision-language-action models of random weights, in
fresh processes that take turns: `import torch` followed by the import of what simulator and policy need, in one
process; and `embodyrl run` of a small config, from the command to the end of its first iteration, less the seconds of
that iteration. The run imports torch and the policy while its simulators start, on other cores. Beside them the time of
commands that start no simulator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS, ROOT = Path(__file__).resolve().parent / "results", Path(__file__).resolve().parents[1]
SIMULATORS = {
    "gym/pendulum": "gymnasium.envs.classic_control",
    "metaworld/reach": "metaworld, mujoco",
    "mujoco/hopper": "gymnasium.envs.mujoco, mujoco",
    "dm_control/reacher_easy": "dm_control.suite",
    "robotics/fetch_reach": "gymnasium_robotics",
    "pusht/state": "pymunk, gymnasium",
    "robosuite/lift": "robosuite",
}
"""Environment, and what it imports."""
CONFIG = """defaults:
  - env: {env}
  - model: mlp
  - algorithm: ppo
  - _self_
env: {{num_envs: 2}}
rollout: {{num_chunks: 4}}
run: {{iterations: 2, eval_every: 0, save_every: 0}}
eval: {{episodes: 2}}
"""
POLICIES = {
    "tiny_pi0_grpo": "metaworld, mujoco, embodyrl.models.libraries",
    "tiny_oft_grpo": "metaworld, mujoco, embodyrl.models.libraries",
    "tiny_gr00t_grpo": "metaworld, mujoco, embodyrl.models.libraries",
    "tiny_smolvla_grpo": "metaworld, mujoco",
}
"""Experiment, and what it imports."""
SMALL = {
    "algorithm": "grpo",
    "algorithm.minibatches": 1,
    "algorithm.epochs": 1,
    "model.checkpoint": "null",
    "rollout.num_chunks": 8,
    "rollout.group_size": 2,
    "rollout.episodes_per_slot": 1,
    "env.num_envs": 4,
    "run.iterations": 2,
    "run.eval_every": 0,
    "run.save_every": 0,
    "eval.episodes": 2,
}
"""Settings with which an experiment is over soon."""
COMMANDS = ("--help", "validate")


def seconds_of(words: list[str], tree: Path = ROOT) -> float:
    """Seconds that Python takes for a command, in a source tree."""
    start = time.perf_counter()
    env = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run([sys.executable, *words], env=env, cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def until_first_step(name: str) -> float:
    """Seconds from the command to the first env step, in an environment or of an experiment."""
    with tempfile.TemporaryDirectory(prefix="embodyrl-startup-") as folder:
        config, run_dir = Path(folder) / "config.yaml", Path(folder) / "run"
        config.write_text(CONFIG.format(env=name))
        words = [str(config)] if name in SIMULATORS else [name, *(f"{key}={value}" for key, value in SMALL.items())]
        # Random weights are not kept out of learning.
        words += ["model.frozen=nothing"] if "smolvla" in name else []
        start = time.perf_counter()
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "embodyrl", "run", *words, f"run.dir={run_dir}"], stdout=log, stderr=log
            )
        metrics = run_dir / "metrics.jsonl"
        while not (metrics.is_file() and b"\n" in metrics.read_bytes()):
            if process.poll() is not None:
                sys.exit(f"{name}: ended with status {process.returncode}\n{(Path(folder) / 'log').read_text()}")
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        process.wait()
        return seconds - float(json.loads(metrics.read_text().splitlines()[0])["time/iteration"])


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "startup.json")
    arguments = parser.parse_args()
    rows = {}
    for name, packages in {**SIMULATORS, **POLICIES}.items():
        found: dict[str, list[float]] = {"imports": [], "run": []}
        for _ in range(arguments.rounds):
            found["imports"].append(seconds_of(["-c", f"import torch, {packages}"]))
            found["run"].append(until_first_step(name))
        medians = {what: round(statistics.median(each), 2) for what, each in found.items()}
        rows[name] = {**medians, "ratio": round(medians["run"] / medians["imports"], 2)}
        print(f"{name:26s} imports {medians['imports']:5.2f} s  first env step {medians['run']:5.2f} s", flush=True)
    torch = statistics.median(seconds_of(["-c", "import torch"]) for _ in range(arguments.rounds))
    commands = {
        command: statistics.median(seconds_of(["-m", "embodyrl", command]) for _ in range(arguments.rounds))
        for command in COMMANDS
    }
    print("  ".join(f"{name} {value:.2f} s" for name, value in {"import torch": torch, **commands}.items()))
    result = {
        "first_env_step_s": rows,
        "import_torch_s": round(torch, 2),
        "commands_s": {name: round(value, 2) for name, value in commands.items()},
        "rounds": arguments.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
