"""Every scene of LIBERO: an episode again, and from a state in the middle, is the same to the last bit."""

from __future__ import annotations

import re

import numpy as np
import pytest
from libero_files import needs_assets
from slow import rest_slow

from embodyrl.envs.libero import pro, tasks
from embodyrl.envs.options import LiberoConfig, Proprio
from embodyrl.envs.types import EpisodeSpec
from embodyrl.registry import SIMULATORS

if SIMULATORS.entry("libero").missing():
    pytest.skip("LIBERO not installed", allow_module_level=True)

from embodyrl.envs.libero.simulator import Libero


def scenes() -> list[str]:
    """The first task in each scene: LIBERO-90's are named in its files, other suites have one each."""
    first: dict[str, str] = {}
    for suite, names in tasks.suites().items():
        if not pro.has(suite):
            for number, name in enumerate(names):
                scene = re.match(r"[A-Z_]+SCENE\d+", name)
                first.setdefault(scene[0] if scene else suite, f"{suite}/{number}")
    return list(first.values())


@needs_assets
@pytest.mark.parametrize("task", rest_slow(scenes()))
def test_an_episode_is_the_same_again_and_from_its_middle(task: str) -> None:
    options = LiberoConfig(name="libero", tasks=[task], proprio=Proprio.full, settle_steps=1, max_episode_steps=20)
    simulator = Libero(options, 1)
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 6, 7)).astype(np.float32)
    episode = EpisodeSpec(task=task, start_state=7, seed=0)
    try:
        simulator.reset([0], [episode])
        simulator.step_chunk([0], actions[:, :3])
        middle = simulator.get_state([0])
        end = simulator.step_chunk([0], actions[:, 3:]).observation.proprio
        assert not simulator.set_state([0], middle)
        assert np.array_equal(simulator.step_chunk([0], actions[:, 3:]).observation.proprio, end)
        simulator.reset([0], [episode])
        assert np.array_equal(simulator.step_chunk([0], actions).observation.proprio, end)
    finally:
        simulator.close()


def test_there_are_23_scenes() -> None:
    assert len(scenes()) == 23
