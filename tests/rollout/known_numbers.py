"""A collector on a simulator and a policy whose every number is known, through real processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))

from counter_simulator import TASKS

from embodyrl.config.replay import InterveneConfig
from embodyrl.config.schema import (
    EngineConfig,
    EnvConfig,
    Episodes,
    Observe,
    OnWorkerDeath,
    RolloutConfig,
    Schedule,
)
from embodyrl.data.experts import Demonstrator
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.manager import EnvManager, Simulators
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Policy
from embodyrl.rollout.collector import Collector
from embodyrl.rollout.episodes import EpisodeSource
from embodyrl.rollout.interventions import Interventions, shown_to_policy

LIMIT = 5
"""Time limit; start states with more steps than this are truncated."""


def value(observations: Tensor) -> Tensor:
    """The critic: 1000 + 10 * start state + step."""
    return 1000.0 + 10.0 * observations[..., 0] + observations[..., 1]


class KnownPolicy(Policy):
    def __init__(self, chunk_size: int) -> None:
        nn.Module.__init__(self)
        self.chunk_size = chunk_size
        self.weight = nn.Parameter(torch.zeros(()))
        self.batches: list[int] = []
        """How many slots each call decided for."""

    def act(self, inputs: Inputs, mode: str, generator: torch.Generator | None) -> ActOutput:
        observed = inputs["proprio"]
        self.batches.append(len(observed))
        return ActOutput(
            actions=torch.zeros(len(observed), self.chunk_size, 2),
            logprobs=-observed,
            values=value(observed),
            trace={"sample": observed * 2},
        )

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        raise NotImplementedError


@contextmanager
def make_collector(
    *,
    num_envs: int = 3,
    workers: int = 1,
    chunk_size: int = 1,
    whole: bool = False,
    seed: int = 1,
    simulator: str = "counter",
    cameras: tuple[str, ...] = (),
    frames: int = 1,
    schedule: str = "lockstep",
    observe: str = "chunk_end",
    on_worker_death: str = "fail",
    policy: Callable[[SimulatorSpec, int], Policy] | None = None,
    simulators: Callable[..., Simulators] = EnvManager,
    expert: Demonstrator | None = None,
    intervene: InterveneConfig | None = None,
    **options: int | str,
) -> Iterator[Collector]:
    """A collector; `schedule`, `observe` and `options` are those of the rollout. `policy` builds another policy for a
    simulator and a size of chunks. `simulators` starts them. An `expert` acts beside the policy by `intervene`."""
    env = EnvConfig(
        name=simulator,
        tasks=list(TASKS),
        num_envs=num_envs,
        workers=workers,
        cameras=list(cameras),
        frames=frames,
        image_size=[16, 16],
        max_episode_steps=LIMIT,
        start_states=50,
        on_worker_death=OnWorkerDeath(on_worker_death),
    )
    rollout = RolloutConfig(
        **{"num_chunks": 4, **options},
        chunk_size=chunk_size,
        episodes=Episodes.whole if whole else Episodes.continuous,
        schedule=Schedule(schedule),
        observe=Observe(observe),
    )
    with simulators(
        env,
        chunk_size=chunk_size,
        every_step=rollout.observe is Observe.every_step,
        plugins=["counter_simulator"],
        plugin_path=str(Path(__file__).parent),
    ) as started:
        manager = started if expert is None else shown_to_policy(started, expert)
        engine = HybridEngine(
            KnownPolicy(chunk_size) if policy is None else policy(manager.spec, chunk_size),
            config=EngineConfig(),
            iterations=1,
            seed=seed,
        )
        source = EpisodeSource(env.sources, group_size=rollout.group_size, seed=seed)
        hooks = []
        if expert is not None and intervene is not None:
            own = {"spec": manager.spec, "episode": source.episode, "num_envs": num_envs, "first_slot": 0}
            hooks = [Interventions(expert, intervene, seed=seed, **own)]
        yield Collector(manager, engine, source=source, config=rollout, critic=expert is None, hooks=hooks)
