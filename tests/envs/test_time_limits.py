"""Which time limit episodes have: the one that is set, else that of the tasks' package, else none."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.wrappers import TimeLimit

from embodyrl.config.infos import MOST_EPISODE_STEPS, USUAL_EPISODE_STEPS
from embodyrl.config.schema import EnvConfig
from embodyrl.envs.gymnasium.simulator import Gymnasium
from embodyrl.envs.options import GymnasiumConfig, LiberoConfig, ManiSkillConfig, MetaWorldConfig
from embodyrl.envs.types import EpisodeSpec
from embodyrl.registry import SIMULATORS

SHORT, LONG, ENDLESS = "EmbodyrlShort-v0", "EmbodyrlLong-v0", "EmbodyrlEndless-v0"
for name, limit in ((SHORT, 3), (LONG, 5), (ENDLESS, None)):
    gymnasium.register(name, entry_point=PendulumEnv, max_episode_steps=limit)
BUILT_IN = "EmbodyrlBuiltIn-v0"
gymnasium.register(BUILT_IN, entry_point=lambda **kwargs: TimeLimit(PendulumEnv(**kwargs), 4))


def gym(*tasks: str, **options: Any) -> GymnasiumConfig:
    return GymnasiumConfig(name="gymnasium", tasks=list(tasks), **options)


def test_a_time_limit_is_that_of_the_package_unless_one_is_set() -> None:
    want: list[tuple[EnvConfig, int]] = [
        (gym("MountainCarContinuous-v0"), 999),
        (gym("Acrobot-v1"), 500),
        (gym(SHORT, LONG), 5),
        (gym(SHORT, ENDLESS), MOST_EPISODE_STEPS),
        (gym("Acrobot-v1", max_episode_steps=7), 7),
        (gym("Acrobot-v1", max_episode_steps=None), MOST_EPISODE_STEPS),
        (MetaWorldConfig(name="metaworld", tasks=["reach-v3"]), 500),
        (MetaWorldConfig(name="metaworld", tasks=["reach-v3"], action_repeat=3, settle_steps=20), 160),
        (LiberoConfig(name="libero", tasks=["libero_goal/0"]), 300),
        (EnvConfig(name="of_a_plug_in", tasks=["push"]), USUAL_EPISODE_STEPS),
    ]
    if not SIMULATORS.entry("mujoco").missing():
        want.append((GymnasiumConfig(name="mujoco", tasks=["Reacher-v5"]), 50))
    if not SIMULATORS.entry("maniskill").missing():
        want.append((ManiSkillConfig(name="maniskill", tasks=["PickCube-v1", "PushT-v1"]), 100))
    found = [config.time_limit for config, _ in want]
    assert found == [limit for _, limit in want]


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, [3, 5, 600]), ({"max_episode_steps": 4}, [4, 4, 4]), ({"max_episode_steps": None}, [600] * 3)],
)
def test_episodes_of_each_task_end_at_its_own_limit(options: dict[str, Any], steps: list[int]) -> None:
    ours = Gymnasium(gym(SHORT, LONG, ENDLESS, **options), 3)
    ours.reset([0, 1, 2], [EpisodeSpec(task=task, start_state=1, seed=2) for task in (SHORT, LONG, ENDLESS)])
    result = ours.step_chunk([0, 1, 2], np.zeros((3, 600, 1), np.float32))
    assert result.steps.tolist() == steps and result.truncated.tolist() == [length < 600 for length in steps]
    state = ours.get_state([2])  # with all actions of the episode, of which there may be any number
    assert ours.set_state([0], state) == []


def test_a_limit_that_an_environment_has_built_in_is_its_own_unless_one_is_set() -> None:
    def steps(**options: Any) -> int:
        ours = Gymnasium(gym(BUILT_IN, **options), 1)
        ours.reset([0], [EpisodeSpec(task=BUILT_IN, start_state=1, seed=2)])
        return int(ours.step_chunk([0], np.zeros((1, 9, 1), np.float32)).steps[0])

    assert (steps(), steps(max_episode_steps=8), steps(max_episode_steps=None)) == (4, 8, 9)
