"""Compare the CPU time of a PPO update of the MLP policy with Stable-Baselines3's at equal work.

    python benchmarks/ppo_update.py [--rounds 9] [--minibatches 4] [--epochs 8] [--hidden 128,128]

Both learn from a batch as the default job has it (8 envs, 128 chunks, observations of 39 numbers, actions of 4), with
the same networks, epochs, minibatches, clipping and optimiser, on one thread; neither stops early. Counted is
everything from the batch to the weights: flattening and shuffling, normalising advantages, the optimiser steps,
metrics. Simulators, rollouts and advantage estimation are left out on both sides. Rounds are interleaved, and the CPU
time of this process is compared, so that other load on the machine affects both alike.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from turns import take_turns

from embodyrl.algorithms.advantages import normalize
from embodyrl.config import load_config
from embodyrl.config.schema import Config
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.methods.learner import build_learner
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.methods.on_policy.stages import chunks_to_learn_from
from embodyrl.models import build_policy
from embodyrl.rollout.batch import TrajectoryBatch

RESULTS = Path(__file__).resolve().parent / "results"
SIZE_OF_STATE, SIZE_OF_ACTION = 39, 4
TASK_DESCRIPTION = "reach the goal"


def config_of(arguments: argparse.Namespace) -> Config:
    """The default job's settings, with other ones of the update."""
    overrides = [
        f"model.hidden_sizes=[{arguments.hidden}]",
        f"algorithm.epochs={arguments.epochs}",
        f"algorithm.minibatches={arguments.minibatches}",
        "algorithm.target_kl=null",
        "engine.device=cpu",
    ]
    return load_config(None, overrides).config


def our_update(config: Config) -> Callable[[], None]:
    """One update of ours."""
    k, b = config.rollout.num_chunks, config.env.num_envs
    arm = ActionField(name="arm", meaning="force", unit="N", low=(-1.0,) * SIZE_OF_ACTION, high=(1.0,) * SIZE_OF_ACTION)
    spec = SimulatorSpec(
        tasks={"reach": TASK_DESCRIPTION},
        actions=(arm,),
        proprio_dim=SIZE_OF_STATE,
        max_episode_steps=k,
        control_frequency=10.0,
    )
    learner: Any = build_learner(
        build_policy(config.model, spec, chunk_size=1, seed=1),
        config.algorithm,
        simulator=spec,
        config=config.engine,
        iterations=10**6,
        seed=1,
    )
    draw = torch.Generator().manual_seed(0)
    numbers = {name: torch.zeros(k, b, dtype=torch.int64) for name in ("task_index", "episode", "group", "version")}
    columns: dict[str, Any] = numbers | {
        "terminated": torch.zeros(k, b, dtype=torch.bool),
        "truncated": torch.zeros(k, b, dtype=torch.bool),
        "steps": torch.ones(k, b, dtype=torch.int64),
        "valid": torch.ones(k, b, dtype=torch.bool),
        "actions": torch.zeros(k, b, 1, SIZE_OF_ACTION),
        "proprio": torch.randn(k, b, SIZE_OF_STATE, generator=draw),
        "logprobs": torch.full((k, b, SIZE_OF_ACTION), -1.0),
        "values": torch.zeros(k, b),
        "next_values": torch.zeros(k, b),
        "rewards": torch.ones(k, b, 1),
        "success": torch.zeros(k, b, 1, dtype=torch.bool),
        "trace": {"sample": torch.randn(k, b, SIZE_OF_ACTION, generator=draw)},
    }
    advantages, returns = (torch.randn(k, b, generator=draw) for _ in range(2))

    def update() -> None:
        batch = TrajectoryBatch(columns, [TASK_DESCRIPTION])
        batch["advantages"], batch["returns"] = normalize(advantages, batch["valid"]), returns
        learner.update(chunks_to_learn_from(batch, learner.algorithm, k), [TASK_DESCRIPTION])

    return update


def peer_update(config: Config) -> Callable[[], None]:
    """One update of Stable-Baselines3's PPO."""
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger

    class Nothing(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (SIZE_OF_STATE,), np.float32)
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (SIZE_OF_ACTION,), np.float32)

    k, b, algorithm = config.rollout.num_chunks, config.env.num_envs, config.algorithm
    assert isinstance(algorithm, OnPolicyConfig)
    hidden = list(config.model.hidden_sizes)  # type: ignore[attr-defined]
    model = PPO(
        "MlpPolicy",
        Nothing(),
        learning_rate=config.engine.optimizer.lr,
        n_steps=k * b,
        batch_size=k * b // algorithm.minibatches,
        n_epochs=algorithm.epochs,
        clip_range=algorithm.loss.clip_low,  # type: ignore[attr-defined]
        normalize_advantage=algorithm.normalize_advantages,
        ent_coef=algorithm.entropy_coef,
        vf_coef=algorithm.value_coef,
        max_grad_norm=config.engine.optimizer.max_grad_norm,
        policy_kwargs={"net_arch": {"pi": hidden, "vf": hidden}, "activation_fn": torch.nn.Tanh},
        device="cpu",
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    draw = np.random.default_rng(0)
    shapes = {"observations": (SIZE_OF_STATE,), "actions": (SIZE_OF_ACTION,)}
    filling: dict[str, Any] = {
        name: draw.normal(size=(k * b, 1, *shapes.get(name, ()))).astype(np.float32)
        for name in ("observations", "actions", "advantages", "returns", "values", "log_probs")
    }

    def update() -> None:
        buffer = model.rollout_buffer
        buffer.reset()
        vars(buffer).update({name: column.copy() for name, column in filling.items()})
        buffer.full, buffer.pos = True, buffer.buffer_size
        model.train()

    return update


def compare(config: Config, rounds: int) -> dict[str, Any]:
    """Take turns, and sum up."""
    seconds = take_turns({"embodyrl": our_update(config), "sb3": peer_update(config)}, rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = sorted(peer / own for own, peer in zip(seconds["embodyrl"], seconds["sb3"], strict=True))
    return {
        "cpu_s_median": {name: round(value, 4) for name, value in medians.items()},
        "ratio": round(medians["sb3"] / medians["embodyrl"], 3),
        "ratio_quartiles": [round(ratios[len(ratios) // 4], 3), round(ratios[-1 - len(ratios) // 4], 3)],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--hidden", default="128,128")
    parser.add_argument("--output", type=Path, default=RESULTS / "ppo_update.json")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = compare(config_of(chosen), chosen.rounds)
    settings = {"epochs": chosen.epochs, "minibatches": chosen.minibatches, "hidden": chosen.hidden}
    result = found | settings | {"rounds": chosen.rounds, "torch": torch.__version__, "machine": platform.processor()}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
