"""Frames: images of earlier decisions are those of this episode, whatever happens in between."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))

from counter_simulator import COUNT, last_step, shade
from far_away import far
from known_numbers import LIMIT, make_collector

from embodyrl.envs import EpisodeSpec
from embodyrl.envs.manager import EnvManager
from embodyrl.rollout.episodes import evaluation_episodes
from embodyrl.runner.evaluation import borrowed, evaluate

CAMERAS = ("front", "side")


@pytest.mark.parametrize("schedule", ["lockstep", "pipeline", "ready_batch"])
@pytest.mark.parametrize(("simulators", "chunk"), [(EnvManager, 1), (EnvManager, 2), (far, 2)])
def test_frames_are_those_of_the_decisions_before(schedule: str, simulators: object, chunk: int) -> None:
    options = {"num_envs": 4, "workers": 2, "cameras": CAMERAS, "frames": 3, "schedule": schedule, "num_chunks": 6}
    episodes = evaluation_episodes(COUNT.sources, first_start_state=100, count=8, seed=1)
    first = later = 0
    with make_collector(**options, chunk_size=chunk, simulators=simulators) as collector:
        assert collector.manager.spec.num_images == 6
        for _ in range(3):
            batch = collector.collect().batch
            assert batch["images"].shape == (6, 4, 6, 16, 16, 3)
            for images, proprio in zip(batch["images"].flatten(0, 1), batch["proprio"].flatten(0, 1), strict=True):
                start, step = (int(entry) for entry in proprio)
                for age in range(3):
                    wanted = shade(start, max(step - age * chunk, 0))
                    assert (images[2 * age : 2 * age + 2] == wanted).all(), (start, step, age)
                first, later = first + (step == 0), later + (step > chunk)
            # An evaluation takes the simulators away in the middle of episodes, and gives them back.
            with borrowed(collector.manager, collector.clock, collector.in_progress):
                evaluate(collector.manager, collector.engine, episodes)
    assert first > 4 and later > 4, "too easy: no episode began or went on"


def test_the_last_observation_of_an_episode_and_the_first_of_the_next() -> None:
    with make_collector(num_envs=1, cameras=CAMERAS, frames=2, chunk_size=2) as collector:
        manager, slots = collector.manager, np.array([0])
        start = next(number for number in range(50) if last_step(number) == 4)
        episode, following = (
            EpisodeSpec(task="count", start_state=number, seed=1, group=1) for number in (start, start + 1)
        )
        manager.reset(slots, [episode])
        for _ in range(2):
            result = manager.step(slots, np.zeros((1, 2, 2), np.float32), [following])
        assert result.ended.tolist() == [True] and LIMIT > 4
        assert result.final_observation.images[0, :, 0, 0, 0].tolist() == [shade(start, 4)] * 2 + [shade(start, 2)] * 2
        assert result.observation.images[0, :, 0, 0, 0].tolist() == [shade(start + 1, 0)] * 4


def test_states_carry_frames_to_other_slots_and_only_where_they_fit() -> None:
    options = {"num_envs": 2, "cameras": CAMERAS, "chunk_size": 1}
    with make_collector(**options, frames=3) as collector:
        manager, slots = collector.manager, np.arange(2)
        episodes = [EpisodeSpec(task="count", start_state=start, seed=1, group=1) for start in (5, 6)]
        manager.reset(slots, episodes)
        for _ in range(2):
            seen = manager.step(slots, np.zeros((2, 1, 2), np.float32), [None, None]).observation
        shown = seen.images.copy()  # its memory belongs to the simulators
        states = manager.get_state(slots)
        manager.reset(slots, episodes)
        manager.set_state(slots, states[::-1])
        assert (manager.observe(slots).images == shown[::-1]).all()
        assert shown[0, ::2, 0, 0, 0].tolist() == [shade(5, step) for step in (2, 1, 0)]
    refused = pytest.raises(RuntimeError, match=r"has 3 frames, but env\.frames = 2")
    with make_collector(**options, frames=2) as collector, refused:
        collector.manager.set_state(slots, states)
