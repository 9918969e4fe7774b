"""Compare the CPU time of an update of soft actor-critic with Stable-Baselines3's, drawing its minibatch included.

    python benchmarks/sac_update.py [--rounds 9] [--updates 100] [--out benchmarks/results/sac_update.json]

Same sizes (MetaWorld's: 39 numbers seen, 4 in an action), networks, minibatches, rates and one torch thread, on replays
full of the same random decisions: critics, their slow copies, policy and temperature. Rounds are interleaved in one
process (forwards, backwards, ...), so that other load on the machine affects all alike. Stable-Baselines3 normalises no
layers; ours is measured with and without that, and in the sizes that the shipped experiments have.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from embodyrl.config.schema import EngineConfig, OptimizerConfig
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.methods.learner import build_learner
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.methods.sac.config import OffPolicyConfig, SACConfig
from embodyrl.methods.sac.learner import SoftActorCritic
from embodyrl.models.mlp.options import Activation, Distribution, MLPConfig
from embodyrl.models.mlp.policy import MLPPolicy
from embodyrl.rollout.replay import Replay
from embodyrl.rollout.replay_fields import MIB, replay_fields

STATE, ACTION, DECISIONS = 39, 4, 20_000
GAMMA, TAU, RATE = 0.99, 0.005, 3e-4

Update = Callable[[int], Any]
"""Makes a number of updates."""


def random_decisions() -> dict[str, np.ndarray]:
    """Columns of decisions that everybody learns from."""
    draw = np.random.default_rng(1)
    return {
        "proprio": draw.normal(size=(DECISIONS, STATE)).astype(np.float32),
        "next": draw.normal(size=(DECISIONS, STATE)).astype(np.float32),
        "actions": draw.uniform(-1, 1, (DECISIONS, ACTION)).astype(np.float32),
        "rewards": draw.normal(size=DECISIONS).astype(np.float32),
    }


def ours(decisions: dict[str, np.ndarray], *, width: int, batch: int, layer_norm: bool) -> Update:
    """Return our update."""
    spec = SimulatorSpec(
        tasks={"reach": "reach"},
        actions=(ActionField(name="arm", meaning="normalized", unit="1", low=(-1.0,) * ACTION, high=(1.0,) * ACTION),),
        proprio_dim=STATE,
        max_episode_steps=100,
        control_frequency=1.0,
    )
    torch.manual_seed(1)
    policy = MLPPolicy(
        MLPConfig(name="mlp", head=Distribution.squashed, hidden_sizes=[width, width], activation=Activation.relu),
        spec,
        1,
    )
    critics = CriticsConfig(hidden_sizes=[width, width], layer_norm=layer_norm, tau=TAU)
    learner = build_learner(
        policy,
        config=EngineConfig(optimizer=OptimizerConfig(lr=RATE, eps=1e-8, max_grad_norm=1e9)),
        algorithm=SACConfig(name="sac", gamma=GAMMA, off_policy=OffPolicyConfig(critics=critics, batch_size=batch)),
        simulator=spec,
        iterations=1,
        seed=1,
    )
    replay = Replay(
        DECISIONS,
        slots=1,
        own=range(1),
        fields=replay_fields(proprio_dim=STATE, action_dim=ACTION, chunk_size=1),
        start_after=1,
        seed=1,
        memory=1000 * MIB,
        folder=Path(tempfile.gettempdir()),
    )
    replay._columns["proprio"][0] = decisions["proprio"]
    replay._columns["actions"][0] = decisions["actions"][:, None]
    replay._columns["rewards"][0] = decisions["rewards"][:, None]
    replay._columns["steps"][0] = 1
    replay._live = np.arange(DECISIONS)
    assert isinstance(learner, SoftActorCritic)
    learner.statistics.add(torch.from_numpy(decisions["proprio"]), learner.policy)
    return lambda count: learner.learn(replay.minibatches(count, batch))


class Sizes(gymnasium.Env):
    """An environment of MetaWorld's sizes, which is never stepped."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (STATE,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTION,), np.float32)

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """See `gymnasium.Env`."""
        return np.zeros(STATE, np.float32), {}


def theirs(decisions: dict[str, np.ndarray], *, width: int, batch: int) -> Update:
    """Return the update of Stable-Baselines3."""
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import configure

    model = SAC(
        "MlpPolicy",
        Sizes(),
        learning_rate=RATE,
        batch_size=batch,
        buffer_size=DECISIONS,
        tau=TAU,
        gamma=GAMMA,
        policy_kwargs={"net_arch": [width, width]},
        device="cpu",
        seed=1,
    )
    model.set_logger(configure(None, []))
    buffer: Any = model.replay_buffer
    buffer.observations[:, 0], buffer.next_observations[:, 0] = decisions["proprio"], decisions["next"]
    buffer.actions[:, 0], buffer.rewards[:, 0] = decisions["actions"], decisions["rewards"]
    buffer.full, buffer.pos = True, 0
    return lambda count: model.train(gradient_steps=count, batch_size=batch)


def main() -> None:
    """Measure all contenders, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=100, help="of each contender in each round")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    decisions = random_decisions()
    contenders: dict[str, Update] = {
        "Stable-Baselines3, 2 x 256, batch 256": theirs(decisions, width=256, batch=256),
        "embodyrl, 2 x 256, batch 256": ours(decisions, width=256, batch=256, layer_norm=False),
        "embodyrl, 2 x 256, batch 256, LayerNorm": ours(decisions, width=256, batch=256, layer_norm=True),
        "Stable-Baselines3, 2 x 128, batch 128": theirs(decisions, width=128, batch=128),
        "embodyrl, 2 x 128, batch 128, LayerNorm": ours(decisions, width=128, batch=128, layer_norm=True),
    }
    for update in contenders.values():
        update(10)
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(arguments.rounds):
        names = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for name in names:
            start = time.process_time()
            contenders[name](arguments.updates)
            seconds[name].append((time.process_time() - start) / arguments.updates)
    rows = {name: {"cpu_ms": round(1e3 * statistics.median(found), 3)} for name, found in seconds.items()}
    for name, row in rows.items():
        print(f"{row['cpu_ms']:8.2f} ms  {name}")
    base = "Stable-Baselines3, 2 x 256, batch 256"
    ratios = [one / other for one, other in zip(seconds["embodyrl, 2 x 256, batch 256"], seconds[base], strict=True)]
    print(f"embodyrl / Stable-Baselines3, same work: {statistics.median(ratios):.2f} (median of rounds)")
    if arguments.out:
        import stable_baselines3

        result = {
            "updates": arguments.updates,
            "rounds": arguments.rounds,
            "median": rows,
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "versions": {"torch": torch.__version__, "stable_baselines3": stable_baselines3.__version__},
            "python": platform.python_version(),
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
