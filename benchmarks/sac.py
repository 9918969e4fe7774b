"""Learn by soft actor-critic with embodyrl and with Stable-Baselines3: success (or return) over env steps and seconds.

    python benchmarks/sac.py [--jobs metaworld_reach_sac gym_pendulum_sac dm_control_swingup_sac] [--seeds 1 2 3]

Both learn with the settings of the shipped experiment: the same simulator, env steps, updates, minibatches, networks,
rates, discount, temperature and random start, one torch thread; Stable-Baselines3 normalises observations by its own
running statistics (VecNormalize), and its critics have no LayerNorm. Both are evaluated after the same env steps,
on held-out start states, with their most likely actions; evaluations are not in the seconds. Seeds take turns. Runs
that are in benchmarks/results/sac.json are kept, others are added as they end; `benchmarks/sac_report.py` makes
docs/results/sac.md of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vs_sb3 import make_our_env

from embodyrl.config.schema import RewardedConfig

if TYPE_CHECKING:
    from embodyrl.config.schema import Config

RESULTS = Path(__file__).resolve().parent / "results" / "sac.json"
JOBS = {"metaworld_reach_sac": (13, 200), "gym_pendulum_sac": (10, 200), "dm_control_swingup_sac": (25, 20)}
"""Iterations between two evaluations, and episodes of each. Start states of the pole on the cart hardly differ."""
Point = dict[str, float]


def our_run(job: str, seed: int) -> list[Point]:
    """Learn with embodyrl; returns an entry for each evaluation."""
    with tempfile.TemporaryDirectory(prefix="embodyrl-sac-") as folder:
        run_dir = Path(folder) / "run"
        every, episodes = JOBS[job]
        settings = [f"seed={seed}", f"run.dir={run_dir}", f"run.eval_every={every}", "tracking.sinks=[jsonl]"]
        command = [sys.executable, "-m", "embodyrl", "run", job, *settings, f"eval.episodes={episodes}"]
        subprocess.run([*command, "run.save_every=0"], check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    points, seconds, updates = [], 0.0, 0.0
    for row in rows:
        seconds += row.get("time/iteration", 0.0)
        updates += row.get("time/stage/improve", 0.0)
        if "eval/return" in row:
            points.append(
                {
                    "env_steps": row.get("env/total_steps", 0.0),
                    "seconds": round(seconds, 1),
                    "success": row["eval/success_once"],
                    "return": round(row["eval/return"], 2),
                    "seconds_of_updates": round(updates, 1),
                }
            )
    return points


def their_run(job: str, seed: int) -> list[Point]:
    """Learn with Stable-Baselines3, in a process of its own; see `our_run`."""
    command = [sys.executable, __file__, "--peer", job, str(seed)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def peer(job: str, seed: int) -> list[Point]:
    """Learn with Stable-Baselines3 in this process."""
    import torch
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    from embodyrl.config import load_config
    from embodyrl.methods.sac.config import SACConfig, usual_target_entropy

    config = load_config(job, [f"seed={seed}"]).config
    algorithm = config.algorithm
    assert isinstance(algorithm, SACConfig)
    settings, envs, chunks = algorithm.off_policy, config.env.num_envs, config.rollout.num_chunks
    torch.set_num_threads(1)
    inner = DummyVecEnv([lambda index=index: make_env(config, index) for index in range(envs)])  # type: ignore[misc]
    venv = VecNormalize(inner, norm_obs=True, norm_reward=False, clip_obs=10.0)
    target: Any = settings.temperature.target_entropy
    dims = int(np.prod(inner.action_space.shape or ()))
    model = SAC(
        "MlpPolicy",
        venv,
        learning_rate=schedule(config),
        buffer_size=settings.replay.capacity,
        learning_starts=settings.replay.start_after,
        batch_size=settings.batch_size,
        tau=settings.critics.tau,
        gamma=algorithm.gamma,
        train_freq=(chunks, "step"),
        gradient_steps=round(settings.updates_per_step * chunks * envs),
        ent_coef=f"auto_{settings.temperature.initial}",
        target_entropy=usual_target_entropy(dims) if target == "auto" else target,
        policy_kwargs={"net_arch": list(config.model.hidden_sizes)},  # type: ignore[attr-defined]
        seed=seed,
        device="cpu",
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    iterations, episodes = JOBS[job]
    points, seconds = [{"env_steps": 0.0, "seconds": 0.0, **evaluate(model, venv, config, episodes)}], 0.0
    every, total = iterations * chunks * envs, config.run.iterations * chunks * envs
    while (done := model.num_timesteps) < total:
        start = time.monotonic()
        model.learn(min(every, total - done), reset_num_timesteps=done == 0)
        seconds += time.monotonic() - start
        found = evaluate(model, venv, config, episodes)
        points.append({"env_steps": model.num_timesteps, "seconds": round(seconds, 1), **found})
    return points


def schedule(config: Config) -> Any:
    """Return our learning rate for Stable-Baselines3, as a function of what is left of the run."""
    rate = config.engine.optimizer
    if rate.schedule.value == "constant":
        return rate.lr
    return lambda left: rate.lr * (rate.lr_floor + (1.0 - rate.lr_floor) * left)


def make_env(config: Config, index: int) -> Any:
    """Make a training environment of a job."""
    if config.env.name == "metaworld":
        return make_our_env(config, index)
    import gymnasium

    env = gymnasium.wrappers.TimeLimit(make_bare(config), config.env.time_limit)
    assert isinstance(config.algorithm, RewardedConfig)
    scale = config.algorithm.reward_scale
    return gymnasium.wrappers.TransformReward(env, lambda reward: float(reward) * scale)


def make_bare(config: Config) -> Any:
    """Make an environment of a job, without a time limit of its own; observations are flat."""
    import gymnasium

    from embodyrl.envs.gymnasium.adapters import control

    [task] = config.env.tasks
    if config.env.name == "dm_control":
        control.load()
        return gymnasium.wrappers.FlattenObservation(control.make(task))
    return gymnasium.make(task, max_episode_steps=-1)


def evaluate(model: Any, venv: Any, config: Config, episodes: int) -> Point:
    """Play held-out episodes with the most likely actions; returns success and mean return."""
    successes, returns = [], []
    for number in range(episodes):
        solved, total, observation, step = episode(config, config.eval.first_start_state + number)
        for _ in range(config.env.time_limit):
            action, _ = model.predict(venv.normalize_obs(observation), deterministic=True)
            observation, reward, success = step(action)
            solved |= success
            total += reward
        successes.append(solved)
        returns.append(total)
    return {"success": float(np.mean(successes)), "return": round(float(np.mean(returns)), 2)}


def episode(config: Config, start_state: int) -> tuple[bool, float, Any, Any]:
    """Begin an episode; returns success and return so far, the first observation, and how to step."""
    if config.env.name == "metaworld":
        from embodyrl.envs import EpisodeSpec
        from embodyrl.envs.metaworld.simulator import MetaWorldSlot
        from embodyrl.envs.mujoco.rendering import Renderers

        task = config.env.tasks[0]
        slot = _SLOTS.setdefault(task, MetaWorldSlot(task, config.env, Renderers(most=1)))  # type: ignore[arg-type]
        slot.reset(EpisodeSpec(task=task, start_state=start_state, seed=start_state))

        def step(action: Any) -> tuple[Any, float, bool]:
            transition = slot.step(action)
            return slot.observe()[1], transition.reward, transition.success

        return False, 0.0, slot.observe()[1], step
    task = config.env.tasks[0]
    env = _SLOTS[task] = _SLOTS.get(task) or make_bare(config)
    observation, _ = env.reset(seed=start_state)

    def step_env(action: Any) -> tuple[Any, float, bool]:
        observation, reward, *_ = env.step(action)
        return observation, float(reward), False

    return False, 0.0, observation, step_env


_SLOTS: dict[str, Any] = {}


def main() -> None:
    """Learn with both, seed after seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=list(JOBS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--peer", nargs=2, metavar=("JOB", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        print(json.dumps(peer(arguments.peer[0], int(arguments.peer[1]))))
        return
    import stable_baselines3
    import torch

    found: dict[str, Any] = {
        "episodes": {job: episodes for job, (_, episodes) in JOBS.items()},
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__, "stable_baselines3": stable_baselines3.__version__},
        "runs": json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else [],
    }
    there = {(run["job"], run["who"], run["seed"]) for run in found["runs"]}
    for job in arguments.jobs:
        for seed in arguments.seeds:
            for who, learn in (("embodyrl", our_run), ("sb3", their_run)):
                if (job, who, seed) in there:
                    continue
                points = learn(job, seed)
                load = round(os.getloadavg()[0], 1)
                found["runs"].append({"job": job, "who": who, "seed": seed, "load_average": load, "points": points})
                RESULTS.write_text(json.dumps(found, indent=1) + "\n")
                line = " ".join(f"{point['success']:.2f}" for point in points)
                print(
                    f"{job} {who} seed {seed}: {line}  return {points[-1]['return']}, {points[-1]['seconds']} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
