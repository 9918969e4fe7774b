"""Offload: the processes are gone for a while, their memory is free, and everything goes on bit for bit."""

import os
import signal

import numpy as np
import psutil
import pytest
from slow import rest_slow
from toy_simulator import ToyConfig, actions, episode

from embodyrl.config import load_config
from embodyrl.envs.manager import EnvManager
from embodyrl.envs.types import EpisodeSpec
from embodyrl.registry import SIMULATORS

ALL = range(4)


def start(**options):
    config = ToyConfig(**{"num_envs": 4, "workers": 2, "max_episode_steps": 5, **options})
    return EnvManager(config, chunk_size=1, plugins=["toy_simulator"])


def play(manager, offload_after=None):
    """Rewards and observations of nine steps, in which episodes end and the next ones begin."""
    seen = [manager.reset(ALL, [episode(slot, seed=slot) for slot in ALL]).proprio.copy()]
    for step in range(9):
        result = manager.step(ALL, actions(4, number=0.1 * step), [episode(30 + slot, seed=50 + slot) for slot in ALL])
        seen += [result.rewards.copy(), result.observation.proprio.copy()]
        if step == offload_after:
            manager.offload()
    return seen


@pytest.mark.parametrize("step", [0, 3, 4])
def test_what_follows_is_the_same_bit_for_bit(step):
    with start() as plain, start() as offloading:
        for left, right in zip(play(plain), play(offloading, offload_after=step), strict=True):
            np.testing.assert_array_equal(left, right)


def test_processes_are_gone_until_they_are_needed_and_others_take_their_place():
    with start() as manager:
        manager.reset(ALL, [episode(1)] * 4)
        before = [worker.pid for worker in manager.workers]
        freed = manager.offload()
        assert freed > 10 * 2**20
        assert not any(psutil.pid_exists(pid) for pid in before)
        assert manager.observe(ALL).proprio[:, 0].tolist() == [1, 1, 1, 1]  # brings them back
        assert not {worker.pid for worker in manager.workers} & set(before)


def test_offloading_twice_or_before_anything_was_played_or_closing_meanwhile_is_harmless():
    with start() as manager:
        assert manager.offload() > 0
        assert manager.offload() == 0
        manager.onload()
        manager.onload()
        manager.reset([0, 2], [episode(1), episode(2)])
        manager.offload()
        pids = [worker.pid for worker in manager.workers]
        assert manager.offload() == 0 and [worker.pid for worker in manager.workers] == pids  # not started for nothing
        assert manager.step([0, 2], actions(2)).steps.tolist() == [1, 1]
        with pytest.raises(ValueError, match=r"envs \[1, 3\] play no episode"):
            manager.step([1, 3], actions(2))
        manager.offload()


def test_a_process_that_died_unnoticed_frees_nothing():
    with start() as manager:
        os.kill(manager.workers[0].pid, signal.SIGKILL)
        assert manager.offload() > 0


def test_a_chunk_under_way_is_not_torn_apart():
    with start() as manager:
        manager.reset(ALL, [episode(1)] * 4)
        manager.send([0], actions(1))
        with pytest.raises(ValueError, match=r"envs \[0\] are busy"):
            manager.offload()
        manager.receive([0])


@pytest.mark.parametrize("name", rest_slow(["metaworld", "gymnasium", "maniskill"], fast=2))
def test_real_simulators_go_on_bit_for_bit_in_new_processes(name):
    missing = [requirement.module for requirement in SIMULATORS.entry(name).missing()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    shipped = {
        "metaworld": "experiment/metaworld_reach",
        "maniskill": "experiment/maniskill_push_cube",
        "gymnasium": "experiment/gym_pendulum",
    }
    config = load_config(shipped[name], ["env.num_envs=2", "env.workers=1", "algorithm.minibatches=2"]).config
    generator = np.random.default_rng(0)
    with EnvManager(config.env, chunk_size=1) as manager:
        low, high = manager.spec.action_low, manager.spec.action_high
        plan = generator.uniform(low, high, (2, 6, 2, 1, len(low))).astype(np.float32)
        episodes = [EpisodeSpec(task=config.env.tasks[0], start_state=slot, seed=slot) for slot in range(2)]
        runs = []
        for offload in (False, True):
            manager.reset([0, 1], episodes)
            for chunk in plan[0]:
                manager.step([0, 1], chunk)
            if offload:
                manager.offload()
            results = [manager.step([0, 1], chunk) for chunk in plan[1]]
            runs.append([(result.rewards, result.observation.proprio) for result in results])
    for (rewards, proprio), (rewards_after, proprio_after) in zip(*runs, strict=True):
        np.testing.assert_array_equal(rewards, rewards_after)
        np.testing.assert_array_equal(proprio, proprio_after)
