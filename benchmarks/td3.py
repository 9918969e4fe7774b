"""Compare TD3 with Stable-Baselines3's on Pendulum: returns at equal steps, with the same networks and rates.

    python benchmarks/td3.py [--steps 10000] [--seeds 3] [--out benchmarks/results/td3.json]

One env each, one update per step, learning after 1,000 random steps. Each policy plays 20 episodes of its most likely
actions.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

STEPS_OF_EPISODE, START, RATE, WIDTH, BATCH, EPISODES = 200, 1000, 1.0e-3, 64, 128, 20


def ours(steps: int, seed: int) -> tuple[float, float]:
    """Return the mean return of our policy, and the seconds that it took."""
    from embodyrl import train
    from embodyrl.config import load_config

    chunks = 50
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_config(
            "experiment/gym_pendulum_sac",
            [
                *("algorithm=td3", "env.num_envs=1", "env.workers=1", f"env.max_episode_steps={STEPS_OF_EPISODE}"),
                *(f"seed={seed}", f"rollout.num_chunks={chunks}", f"run.iterations={steps // chunks}"),
                *("run.eval_every=0", f"eval.episodes={EPISODES}", "run.save_every=0", f"run.dir={folder}/run"),
                *(f"model.hidden_sizes=[{WIDTH},{WIDTH}]", "model.normalize_observations=false"),
                *("algorithm.reward_scale=1.0", "algorithm.gamma=0.99", f"engine.optimizer.lr={RATE}"),
                *("engine.optimizer.eps=1.0e-8", "engine.optimizer.max_grad_norm=1.0e9"),
                f"algorithm.off_policy.critics.hidden_sizes=[{WIDTH},{WIDTH}]",
                f"algorithm.off_policy.replay.start_after={START}",
                f"algorithm.off_policy.batch_size={BATCH}",
                "algorithm.off_policy.updates_per_step=1.0",
                *("tracking.sinks=[jsonl]", "tracking.report=false"),
            ],
        )
        started = time.perf_counter()
        run = train(loaded, progress=False)
        return float(run.summary["eval/return"]), time.perf_counter() - started


def theirs(steps: int, seed: int) -> tuple[float, float]:
    """Return the mean return of Stable-Baselines3's policy, and the seconds that it took."""
    import gymnasium
    import torch
    from stable_baselines3 import TD3
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(1)
    env = gymnasium.make("Pendulum-v1")
    noise = NormalActionNoise(np.zeros(1), np.full(1, 0.1))
    options: dict[str, Any] = {"learning_rate": RATE, "batch_size": BATCH, "learning_starts": START}
    model = TD3(
        "MlpPolicy",
        env,
        action_noise=noise,
        policy_kwargs={"net_arch": [WIDTH, WIDTH]},
        train_freq=1,
        gradient_steps=1,
        seed=seed,
        device="cpu",
        **options,
    )
    started = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - started
    test = gymnasium.make("Pendulum-v1")
    test.reset(seed=10_000 + seed)
    mean, _ = evaluate_policy(model, test, n_eval_episodes=EPISODES, warn=False)
    return float(np.asarray(mean)), seconds


def main() -> None:
    """Run both in turn for each seed, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    options = parser.parse_args()
    rows = []
    for seed in range(1, options.seeds + 1):
        for name, run in (("embodyrl", ours), ("Stable-Baselines3", theirs)):
            found, seconds = run(options.steps, seed)
            rows.append({"library": name, "seed": seed, "return": round(found, 1), "seconds": round(seconds, 1)})
            print(f"{name:<18} seed {seed}   return {found:8.1f}   {seconds:6.1f} s", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"steps": options.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
