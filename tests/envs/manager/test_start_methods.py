"""Real simulators play the same episodes however their processes came into being."""

from __future__ import annotations

import os
from collections.abc import Callable

import libero_files
import numpy as np
import psutil
import pytest
from slow import only_slow

from embodyrl.config.schema import EnvConfig, StartMethod
from embodyrl.envs.manager import EnvManager
from embodyrl.envs.options import GymnasiumConfig, LiberoConfig, ManiSkillConfig, MetaWorldConfig
from embodyrl.envs.types import EpisodeSpec
from embodyrl.registry import SIMULATORS

SIMULATED: dict[str, Callable[..., EnvConfig]] = {
    "gymnasium": lambda **options: GymnasiumConfig(name="gymnasium", tasks=["Pendulum-v1"], **options),
    "metaworld": lambda **options: MetaWorldConfig(name="metaworld", tasks=["push-v3", "reach-v3"], **options),
    "maniskill": lambda **options: ManiSkillConfig(name="maniskill", tasks=["PushCube-v1"], **options),
    "libero": lambda **options: LiberoConfig(name="libero", tasks=["libero_spatial/0"], settle_steps=1, **options),
}


def play(name: str, method: StartMethod) -> tuple[list[np.ndarray], int]:
    """Observations and rewards of two slots over an episode's end; and how many of the processes are grandchildren."""
    config = SIMULATED[name](num_envs=2, workers=2, max_episode_steps=6, start_method=method)
    seen: list[np.ndarray] = []
    with EnvManager(config, chunk_size=4) as manager:
        tasks = list(manager.spec.tasks)
        episodes = [
            EpisodeSpec(task=tasks[number % len(tasks)], start_state=number, seed=7 + number) for number in range(4)
        ]
        seen.append(manager.reset([0, 1], episodes[:2]).proprio)
        dice = np.random.default_rng(3)
        low, high = manager.spec.action_low, manager.spec.action_high
        for _ in range(3):
            result = manager.step([0, 1], dice.uniform(low, high, (2, 4, len(low))), episodes[2:])
            seen += [result.observation.proprio, result.final_observation.proprio, result.rewards]
        forked = [worker for worker in manager.workers if psutil.Process(worker.pid).ppid() != psutil.Process().pid]
    return seen, len(forked)


@pytest.mark.parametrize("name", [only_slow(name) if name == "maniskill" else name for name in SIMULATED])
def test_forked_simulators_play_the_same(name: str) -> None:
    if missing := SIMULATORS.entry(name).missing():
        pytest.skip(f"{name} needs {missing[0].module}: {missing[0].install}")
    if name == "libero" and libero_files.place() is None:
        pytest.skip("LIBERO's assets are not there")
    spawned, none_forked = play(name, StartMethod.spawn)
    forked, all_forked = play(name, StartMethod.auto)  # each declares what may be imported before forking
    assert (none_forked, all_forked) == (0, 2)
    assert all(np.array_equal(one, other) for one, other in zip(spawned, forked, strict=True))


def test_the_shared_segment_is_laid_out_by_the_processes_before_the_first_reset() -> None:
    config = SIMULATED["gymnasium"](num_envs=4, workers=2, cameras=["render"], image_size=[200, 200])
    with EnvManager(config, chunk_size=1) as manager:
        memory = manager._memory
        assert memory is not None
        in_memory = os.fstat(memory.segment.fd).st_blocks * 512  # pages that nobody has touched are not there
        assert in_memory >= memory.layout.num_bytes >= 4 * 200 * 200 * 3
