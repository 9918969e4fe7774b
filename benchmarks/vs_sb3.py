"""Compare end-to-end env steps per second of the default job with Stable-Baselines3's PPO doing the same work.

    python benchmarks/vs_sb3.py [--rounds 5] [--iterations 20] [key=value ...]

Same simulator and task, network, observation normalisation, hyper-parameters (read from our config), torch threads
and early stopping of the update. The peer runs with each of its two ways to hold environments, and over two
environments: MetaWorld's own (`sb3-*`), and our `MetaWorldSlot`, whose steps give the same
numbers for less work (`sb3-*-our-env`): the second comparison leaves out what our simulator backend gains. Against
each environment the better way to hold it counts. Rounds are interleaved (forwards, backwards, ...), so that other
load on the machine affects all alike. Every contender is a fresh process that appends a line to a file after each
iteration; the clock, and the processes' CPU times, are read from outside at the first and the last of these lines, so
start-up, evaluation and saving do not count. Extra `key=value` arguments are overrides of the config, for both sides.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from embodyrl.config.schema import Config, RewardedConfig
from embodyrl.methods.on_policy.config import OnPolicyConfig

if TYPE_CHECKING:
    import gymnasium

OURS = "embodyrl"
PEERS = ("sb3-subproc", "sb3-dummy")
PEERS_ON_OUR_ENV = tuple(f"{name}-our-env" for name in PEERS)
CONTENDERS = (OURS, *PEERS, *PEERS_ON_OUR_ENV)
RESULTS = Path(__file__).resolve().parent / "results"
POLL_S = 0.02
START_UP_S = 300.0
"""Longest wait for the next iteration."""


# ------------------------------------------------------------------------------------------------------- the stopwatch


@dataclass(frozen=True)
class Measurement:
    """One contender in one round."""

    contender: str
    env_steps: int
    seconds: float
    env_steps_per_s: float
    learner_cpu_s: float
    """CPU time of the main process."""
    total_cpu_s: float
    """CPU time of the main process and its simulator processes."""
    epochs: float
    """Mean number of epochs per update; early stopping can make it smaller than `algorithm.epochs`."""


def measure(contender: str, iterations: int, overrides: Sequence[str]) -> Measurement:
    """Run one contender for `iterations` iterations after a first one that is not counted."""
    with tempfile.TemporaryDirectory(prefix="embodyrl-bench-") as folder:
        run_dir = Path(folder) / "run"
        command = command_of(contender, run_dir, iterations, overrides)
        with (Path(folder) / "log").open("w+") as log:
            process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            try:
                first = wait_for_lines(process, run_dir, 1)
                last = wait_for_lines(process, run_dir, 1 + iterations)
            except RuntimeError as error:
                log.seek(0)
                sys.exit(f"{contender}: {error}\n{log.read()[-3000:]}")
            finally:
                stop(process)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()[1 : 1 + iterations]]
    steps = int(sum(row["env/steps"] for row in rows))
    seconds = last.clock - first.clock
    return Measurement(
        contender=contender,
        env_steps=steps,
        seconds=seconds,
        env_steps_per_s=steps / seconds,
        learner_cpu_s=last.learner_cpu_s - first.learner_cpu_s,
        total_cpu_s=last.total_cpu_s - first.total_cpu_s,
        epochs=statistics.fmean(row["train/epochs"] for row in rows),
    )


def command_of(contender: str, run_dir: Path, iterations: int, overrides: Sequence[str]) -> list[str]:
    """The command line of a contender.

    One iteration comes before those that count, and of ours one after, because the last one ends with an evaluation.
    """
    if contender != OURS:
        return [sys.executable, __file__, "--peer", contender, str(run_dir), str(iterations + 1), *overrides]
    settings = [f"run.dir={run_dir}", f"run.iterations={iterations + 2}", "run.eval_every=0", "run.save_every=0"]
    return [sys.executable, "-m", "embodyrl", "run", *settings, "eval.episodes=8", *overrides]


@dataclass(frozen=True)
class Reading:
    """Measured times."""

    clock: float
    learner_cpu_s: float
    total_cpu_s: float


def wait_for_lines(process: psutil.Popen, run_dir: Path, count: int) -> Reading:
    """Wait until metrics.jsonl has `count` lines, then read clock and CPU times."""
    file = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + START_UP_S
    while not (file.exists() and file.read_bytes().count(b"\n") >= count):
        if process.poll() is not None:
            raise RuntimeError(f"ended with status {process.returncode} before line {count} of {file.name}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"wrote no line {count} of {file.name} within {START_UP_S:.0f} s")
        time.sleep(POLL_S)
    clock = time.perf_counter()
    learner = cpu_s(process)
    return Reading(clock, learner, learner + sum(cpu_s(child) for child in process.children(recursive=True)))


def cpu_s(process: psutil.Process) -> float:
    """User and system CPU time of one process [s]."""
    times = process.cpu_times()
    return float(times.user + times.system)


def stop(process: psutil.Popen) -> None:
    """End a contender that has been measured, and its children."""
    if process.poll() is not None:
        return
    children = process.children(recursive=True)
    process.terminate()
    for each in [process, *children]:
        try:
            each.wait(timeout=30)
        except psutil.TimeoutExpired:
            each.kill()


# ------------------------------------------------------------------------------------------------------------ the peer


def make_metaworld_env(config: Config, index: int) -> gymnasium.Env[Any, Any]:
    """MetaWorld's own Gymnasium environment."""
    import gymnasium
    import metaworld  # noqa: F401  (registers its environments)

    env: gymnasium.Env[Any, Any] = gymnasium.make(
        "Meta-World/MT1",
        env_name=config.env.tasks[0],
        seed=config.seed + index,
        disable_env_checker=True,
        max_episode_steps=config.env.time_limit,
    )
    scale = _reward_scale(config)
    return gymnasium.wrappers.TransformReward(env, lambda reward: float(reward) * scale)


def _reward_scale(config: Config) -> float:
    assert isinstance(config.algorithm, RewardedConfig)
    return config.algorithm.reward_scale


def make_our_env(config: Config, index: int) -> gymnasium.Env[Any, Any]:
    """Our simulator's slot as a Gymnasium environment: as little as possible around the same steps."""
    import gymnasium
    import numpy as np

    from embodyrl.envs import EpisodeSpec
    from embodyrl.envs.metaworld.simulator import MetaWorldSlot
    from embodyrl.envs.mujoco.rendering import Renderers
    from embodyrl.envs.options import MetaWorldConfig

    assert isinstance(config.env, MetaWorldConfig)
    options = config.env
    task = config.env.tasks[0]
    limit, start_states, scale = config.env.time_limit, config.env.start_states, _reward_scale(config)

    class SlotEnv(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (39,), np.float32)
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)

        def __init__(self) -> None:
            self._slot = MetaWorldSlot(task, options, Renderers(most=1))
            self._draw = np.random.default_rng([config.seed, index])
            self._steps = 0

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            start_state = int(self._draw.integers(start_states))
            self._slot.reset(EpisodeSpec(task=task, start_state=start_state, seed=start_state))
            self._steps = 0
            return self._slot.observe()[1], {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            transition = self._slot.step(action)
            self._steps += 1
            return self._slot.observe()[1], transition.reward * scale, False, self._steps >= limit, {}

        def close(self) -> None:
            self._slot.close()

    return SlotEnv()


def run_peer(contender: str, run_dir: Path, iterations: int, overrides: Sequence[str]) -> None:
    """Train with Stable-Baselines3 and append a line to metrics.jsonl after every iteration."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    config = our_config(overrides)
    algorithm = config.algorithm
    assert isinstance(algorithm, OnPolicyConfig)
    torch.set_num_threads(1 if config.engine.threads == "auto" else int(config.engine.threads))
    run_dir.mkdir()

    class Reporter(BaseCallback):
        """Writes a line once an iteration, update included, is over: that is when the next rollout starts."""

        def __init__(self, file: Path) -> None:
            super().__init__()
            self._file = file.open("w", buffering=1)
            self._updates = 0

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            self._report()

        def _on_training_end(self) -> None:
            self._report()

        def _report(self) -> None:
            updates = self.model._n_updates  # counts epochs
            if updates > self._updates:
                row = {"env/steps": env_steps, "train/epochs": updates - self._updates}
                self._file.write(json.dumps(row) + "\n")
                self._updates = updates

    env_steps = config.env.num_envs * config.rollout.num_chunks
    make_env = make_our_env if contender in PEERS_ON_OUR_ENV else make_metaworld_env
    makers: list[Callable[[], Any]] = [
        functools.partial(make_env, config, index) for index in range(config.env.num_envs)
    ]
    inner = DummyVecEnv(makers) if "dummy" in contender else SubprocVecEnv(makers)
    venv = VecNormalize(inner, norm_obs=True, norm_reward=False, clip_obs=10.0)
    hidden = list(config.model.hidden_sizes)  # type: ignore[attr-defined]
    rate = config.engine.optimizer
    assert rate.schedule.value == "linear", "Stable-Baselines3 is given the main job's schedule"
    model = PPO(
        "MlpPolicy",
        venv,
        learning_rate=lambda left: rate.lr * (rate.lr_floor + (1.0 - rate.lr_floor) * left),
        n_steps=config.rollout.num_chunks,
        batch_size=env_steps // algorithm.minibatches,
        n_epochs=algorithm.epochs,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.advantage.gae_lambda,  # type: ignore[attr-defined]
        clip_range=algorithm.loss.clip_low,  # type: ignore[attr-defined]
        normalize_advantage=algorithm.normalize_advantages,
        ent_coef=algorithm.entropy_coef,
        vf_coef=algorithm.value_coef,
        max_grad_norm=config.engine.optimizer.max_grad_norm,
        # It stops at 1.5 times its setting, we at ours.
        target_kl=None if algorithm.target_kl is None else algorithm.target_kl / 1.5,
        policy_kwargs={
            "net_arch": {"pi": hidden, "vf": hidden},
            "activation_fn": torch.nn.Tanh,
            "log_std_init": config.model.log_std_init,  # type: ignore[attr-defined]
        },
        seed=config.seed,
        device="cpu",
    )
    model.set_logger(Logger(folder=None, output_formats=[]))  # else it logs to the screen and to a temporary folder
    model.learn(iterations * env_steps, callback=Reporter(run_dir / "metrics.jsonl"))
    venv.close()


def our_config(overrides: Sequence[str]) -> Config:
    """The default job's config."""
    from embodyrl.config import load_config

    return load_config(None, overrides).config


# ----------------------------------------------------------------------------------------------------------- the report


def compare(rounds: int, iterations: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Measure all contenders in turn, print as they come, and sum up."""
    measurements: list[Measurement] = []
    for number in range(rounds):
        for contender in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
            result = measure(contender, iterations, overrides)
            measurements.append(result)
            print(
                f"round {number + 1}  {contender:<19} {result.env_steps_per_s:7.0f} env steps/s   "
                f"{result.env_steps} in {result.seconds:.1f} s   CPU: learner {result.learner_cpu_s:.1f} s, "
                f"all {result.total_cpu_s:.1f} s   {result.epochs:.1f} epochs per update",
                flush=True,
            )
    rates = {
        contender: [each.env_steps_per_s for each in measurements if each.contender == contender]
        for contender in CONTENDERS
    }
    medians = {contender: statistics.median(values) for contender, values in rates.items()}

    def against(peers: Sequence[str]) -> dict[str, Any]:
        best = max(peers, key=lambda name: medians[name])
        per_round = [round(a / b, 3) for a, b in zip(rates[OURS], rates[best], strict=True)]
        return {"peer": best, "ratio": round(medians[OURS] / medians[best], 3), "ratio_per_round": per_round}

    return {
        "median_env_steps_per_s": {name: round(value, 1) for name, value in medians.items()},
        "against_sb3": against(PEERS),
        "against_sb3_on_our_env": against(PEERS_ON_OUR_ENV),
        "rounds": rounds,
        "iterations": iterations,
        "overrides": list(overrides),
        "machine": machine(),
        "measurements": [asdict(each) for each in measurements],
    }


def machine() -> dict[str, Any]:
    """Return where this was measured, and with what."""
    from importlib.metadata import version

    packages = ("embodyrl", "stable_baselines3", "torch", "metaworld", "mujoco")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def main() -> None:
    """Compare, or be the peer."""
    parser = argparse.ArgumentParser(description="Env steps per second beside Stable-Baselines3's PPO.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20, help="counted iterations per round")
    parser.add_argument("--peer", nargs=3, metavar=("NAME", "DIR", "ITERATIONS"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    if arguments.peer:
        name, run_dir, iterations = arguments.peer
        run_peer(name, Path(run_dir), int(iterations), arguments.overrides)
        return
    result = compare(arguments.rounds, arguments.iterations, arguments.overrides)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "vs_sb3.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, value in result["median_env_steps_per_s"].items():
        print(f"median  {name:<19} {value:7.0f} env steps/s")
    for key in ("against_sb3", "against_sb3_on_our_env"):
        comparison = result[key]
        print(f"{comparison['ratio']:.2f} x {comparison['peer']}   (rounds: {comparison['ratio_per_round']})")
    print(f"written to {RESULTS / 'vs_sb3.json'}")


if __name__ == "__main__":
    main()
