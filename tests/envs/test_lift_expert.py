"""The scripted expert of robosuite's Lift: it lifts the cube, reads no more than it says, and plays no other task."""

from __future__ import annotations

import numpy as np
import pytest

from embodyrl.data.experts import scripted_expert
from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.options import GymnasiumConfig
from embodyrl.errors import UserError
from embodyrl.registry import EXPERTS, SIMULATORS

OPTIONS = {"dense": False, "end_at_success": True}


def config(task: str = "Lift", **kwargs: object) -> GymnasiumConfig:
    return GymnasiumConfig(name="robosuite", tasks=[task], kwargs={**OPTIONS, **kwargs}, max_episode_steps=100)


needs_robosuite = pytest.mark.skipif(bool(SIMULATORS.entry("robosuite").missing()), reason="robosuite is not installed")


@needs_robosuite
def test_it_lifts_the_cube_however_it_is_turned() -> None:
    from embodyrl.envs.gymnasium.simulator import Gymnasium

    expert, simulator = scripted_expert(config()), Gymnasium(config(), 1)
    slots, solved = np.zeros(1, np.int64), []
    for start in range(1, 7):
        episode = EpisodeSpec(task="Lift", seed=start, start_state=start)
        expert.begin(0, episode)
        observation = simulator.reset([0], [episode])
        for _ in range(50):
            result = simulator.step_chunk([0], expert.act(slots, observation)[:, None])
            observation = result.observation
            if result.terminated[0]:
                break
        solved.append(bool(result.terminated[0]))
    simulator.close()
    assert all(solved), solved


@needs_robosuite
def test_what_is_recorded_is_what_the_config_shows() -> None:
    state = np.arange(19, dtype=np.float32)[None]
    seen = Observation(proprio=state, task_descriptions=["lift"])
    for proprio, first in (("full", 0), ("robot", 10)):
        expert = scripted_expert(config(proprio=proprio))
        assert expert.env.kwargs["proprio"] == "full"
        assert np.array_equal(expert.recorded(seen).proprio, state[:, first:])


def test_it_plays_no_other_task() -> None:
    assert EXPERTS.entry("robosuite").cannot_play(["Lift"]) is None
    with pytest.raises(UserError, match="Stack"):
        scripted_expert(config("Stack"))
