"""Simulators as Gymnasium and Stable-Baselines3 step them: spaces, order of the episodes, their own wrappers, and what
every wrong use says."""

from __future__ import annotations

import importlib.util
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import ClipAction, NormalizeObservation, RecordEpisodeStatistics

import embodyrl
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.runner.spaces import action_space, observation_space

LIMIT = 5
SHORT = [f"env.max_episode_steps={LIMIT}"]
ENVS = 3


@pytest.fixture(scope="module")
def envs() -> Iterator[embodyrl.GymnasiumEnvs]:
    with embodyrl.make_envs("gym/pendulum", ENVS, api="gymnasium", overrides=SHORT) as made:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[embodyrl.Envs]:
    with embodyrl.make_envs("gym/pendulum", ENVS, overrides=SHORT) as made:
        yield made


def push(proprio: np.ndarray) -> np.ndarray:
    return 2.0 * proprio[:, :1]


def fall(proprio: np.ndarray) -> np.ndarray:
    """Actions of CartPole: the first env falls at once, the others follow their poles, each its own."""
    actions = (proprio[:, 2:3] > 0).astype(np.float32)
    actions[0] = 1.0
    return actions


Act = Callable[[np.ndarray], np.ndarray]


def episodes_of(plain: embodyrl.Envs, seed: int, steps: int, act: Act = push) -> list[list[tuple[np.ndarray, float]]]:
    """What each env shows from reset to the end of every episode, and the reward before, stepped as embodyrl does."""
    seen: list[list[tuple[np.ndarray, float]]] = [[] for _ in range(ENVS)]
    observation = plain.reset(seed=seed).proprio
    assert observation is not None
    for env in range(ENVS):
        seen[env].append((observation[env], 0.0))
    for _ in range(steps):
        result = plain.step(act(observation))
        final, observation = result.final_observation.proprio, result.observation.proprio
        assert final is not None and observation is not None
        for env in range(ENVS):
            seen[env].append((final[env], float(result.rewards[env, 0])))
            if result.ended[env]:
                seen[env].append((observation[env], 0.0))
    return seen


def test_episodes_follow_one_another_as_gymnasium_has_them(envs: embodyrl.GymnasiumEnvs, plain: embodyrl.Envs) -> None:
    """An episode's last observation is shown, and the step after it begins the next one without a reward."""
    assert isinstance(envs, VectorEnv) and envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    expected = episodes_of(plain, 7, 2 * LIMIT)
    observation, info = envs.reset(seed=7)
    assert info == {}
    rows = [(observation, np.zeros(ENVS))]
    ends = []
    for _ in range(2 * LIMIT + 1):
        observation, rewards, terminations, truncations, info = envs.step(push(observation))
        assert observation in envs.observation_space and observation.dtype == np.float32
        assert rewards.dtype == np.float64 and terminations.dtype == truncations.dtype == np.bool_
        assert {key: value.shape for key, value in info.items()} == dict.fromkeys(info, (ENVS,))
        rows.append((observation, rewards))
        ends.append(truncations.all())
    assert np.flatnonzero(ends).tolist() == [LIMIT - 1, 2 * LIMIT]
    for env in range(ENVS):
        for (seen, reward), (wanted, its) in zip(rows, expected[env], strict=False):
            assert np.array_equal(seen[env], wanted) and reward[env] == its


def test_envs_whose_episodes_end_at_different_times_wait_for_nobody() -> None:
    steps = 60
    with embodyrl.make_envs("gym/cartpole", ENVS) as plain:
        expected = episodes_of(plain, 7, steps, fall)
    with embodyrl.make_envs("gym/cartpole", ENVS, api="gymnasium") as envs:
        observation, _ = envs.reset(seed=7)
        rows, ends = [(observation, np.zeros(ENVS))], []
        for _ in range(steps):
            observation, rewards, terminations, *_ = envs.step(fall(observation))
            rows.append((observation, rewards))
            ends.append(terminations)
            assert np.array_equal(envs.observation.proprio, observation)
    assert np.any(ends, 0).all() and len({tuple(each) for each in np.transpose(ends).tolist()}) == ENVS
    for env in range(ENVS):
        for (seen, reward), (wanted, its) in zip(rows, expected[env], strict=False):
            assert np.array_equal(seen[env], wanted) and reward[env] == its


def test_the_seed_decides_the_episodes(envs: embodyrl.GymnasiumEnvs) -> None:
    first, other, again = (envs.reset(seed=seed)[0] for seed in (3, 4, 3))
    following = envs.reset()[0]
    assert np.array_equal(first, again)
    assert len({each.tobytes() for each in (first, other, following)}) == 3
    assert len(np.unique(first, axis=0)) == ENVS, "each env has episodes of its own"


def test_gymnasiums_own_wrappers_take_them(envs: embodyrl.GymnasiumEnvs) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped: Any = RecordEpisodeStatistics(NormalizeObservation(ClipAction(envs)))
        wrapped.reset(seed=3)
        wrapped.action_space.seed(3)
        total = np.zeros(ENVS)
        for _ in range(LIMIT):
            observation, rewards, *_, info = wrapped.step(wrapped.action_space.sample())
            total += rewards
        assert observation.shape == (ENVS, 3) and abs(observation).max() < 10
        assert info["episode"]["l"].tolist() == [LIMIT] * ENVS and np.allclose(info["episode"]["r"], total)
        frames = wrapped.render()
    assert len(frames) == ENVS and frames[0].dtype == np.uint8 and frames[0].shape[2] == 3
    assert envs.metadata["render_fps"] == envs.envs.spec.control_frequency


def test_images_and_task_descriptions_are_a_dict() -> None:
    overrides = ["env.cameras=[render]", "env.image_size=[16,24]", *SHORT]
    with embodyrl.make_envs("gym/pendulum", 2, api="gymnasium", overrides=overrides, chunk_size=2) as envs:
        observation, _ = envs.reset()
        assert isinstance(envs.single_observation_space, Dict) and observation in envs.observation_space
        assert observation["images"].shape == (2, 1, 16, 24, 3) and observation["proprio"].shape == (2, 3)
        assert observation["task_description"] == ("control Pendulum",) * 2
        assert envs.action_space.shape == (2, 2, 1)
        before = observation["images"].copy()
        for _ in range(3):
            following, rewards, *_, info = envs.step(envs.action_space.sample())
        assert rewards.shape == (2,) and info["steps"].tolist() == [1, 1], "the third chunk ends at the time limit"
        assert np.array_equal(before, observation["images"]) and not np.array_equal(before, following["images"])


def spec_of(*actions: ActionField, **more: Any) -> SimulatorSpec:
    given = {"proprio_dim": 2, "max_episode_steps": 9, "control_frequency": 10.0} | more
    return SimulatorSpec(tasks={"a": "lege das rote Stück ab"}, actions=actions, **given)


def field(low: list[float], high: list[float], meaning: str = "discrete") -> ActionField:
    return ActionField(name=meaning, meaning=meaning, unit="1", low=tuple(low), high=tuple(high))


def test_spaces_say_what_a_simulator_takes_and_shows() -> None:
    choice, choices = field([1], [3]), field([0, -1], [4, 1])
    arm = field([-1, -2], [1, 2], "joint_delta")
    assert action_space(spec_of(choice), 1) == Discrete(3, start=1)
    assert action_space(spec_of(choices), 1) == MultiDiscrete([5, 3], start=[0, -1])
    assert action_space(spec_of(choice), 2) == MultiDiscrete([[3], [3]], start=[[1], [1]])
    assert action_space(spec_of(arm), 1) == Box(np.float32([-1, -2]), np.float32([1, 2]))
    assert action_space(spec_of(arm, choice), 3).shape == (3, 3)
    assert observation_space(spec_of(arm)) == Box(-np.inf, np.inf, (2,), np.float32)
    seen = observation_space(spec_of(arm, proprio_dim=0, cameras=("top",), image_size=(4, 6), frames=2))
    assert isinstance(seen, Dict) and set(seen) == {"images", "task_description"}
    assert {"images": np.zeros((2, 4, 6, 3), np.uint8), "task_description": "lege das rote Stück ab"} in seen


def test_discrete_actions_are_stepped_as_their_space_samples_them() -> None:
    with embodyrl.make_envs("gym/cartpole", 2, api="gymnasium") as envs:
        assert envs.single_action_space == Discrete(2) and envs.action_space.shape == (2,)
        envs.reset(seed=1)
        left, *_ = envs.step(np.array([0, 0]))
        envs.reset(seed=1)
        both, *_ = envs.step(np.array([0, 1]))
    assert np.array_equal(left[0], both[0]) and not np.array_equal(left[1], both[1])


WRONG = [
    ("step", (np.zeros((2, 1)),), r"actions have shape \(2, 1\), want .* = \(3, 1, 1\)"),
    ("step", ([[0.0], [np.nan], [0.0]],), r"actions\[1, 0, 0\] is nan: want finite numbers"),
    ("step", (np.full((3, 1), 1e300),), r"actions\[0, 0, 0\] is inf: want finite numbers"),
    ("step", ([["left"], ["right"], ["left"]],), r"actions are <U5, not numbers: give float32 \[3, 1, 1\]"),
    ("step", (None,), r"actions are object, not numbers"),
    ("step", ([[0.0], [1.0, 2.0], [0.0]],), r"actions are no array \(.*\): give float32 \[3, 1, 1\]"),
    ("step", (np.zeros((3, 1), complex),), r"actions are complex128, not numbers"),
    *(("reset", {"seed": seed}, "seed = .*: want an integer of 0 or more") for seed in ("x", -1, True, 1.0, [1, 2, 3])),
    ("reset", {"options": {"state": 1}}, "reset got options {'state': 1}: these envs have none"),
]


def test_wrong_use_is_one_clear_sentence_and_nothing_breaks(envs: embodyrl.GymnasiumEnvs) -> None:
    envs.reset(seed=1)
    for method, given, expected in WRONG:
        arguments, named = (given, {}) if isinstance(given, tuple) else ((), given)
        with pytest.raises(embodyrl.UserError, match=expected) as caught:
            getattr(envs, method)(*arguments, **named)
        assert "\n" not in str(caught.value)
    envs.step(np.zeros((3, 1)))


def test_envs_that_do_not_play_say_so() -> None:
    with embodyrl.make_envs("gym/pendulum", 2, api="gymnasium", overrides=SHORT) as envs:
        for use in (lambda: envs.step(np.zeros((2, 1))), envs.render):
            with pytest.raises(embodyrl.UserError, match=r"^these envs play no episode yet: reset them first$"):
                use()
        envs.reset()
        with pytest.raises(embodyrl.UserError, match="reset got episodes and a seed"):
            envs.envs.reset([], seed=1)
    for use in (lambda: envs.step(np.zeros((2, 1))), envs.reset, envs.render):
        with pytest.raises(embodyrl.UserError, match=r"^these envs are closed: start new ones with make_envs$"):
            use()
    envs.close()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"api": "gymnasum"}, r"^api = 'gymnasum': want one of 'embodyrl', 'gymnasium' - did you mean 'gymnasium'\?$"),
        ({"num_envs": 0}, "^num_envs = 0: want an integer of 1 or more"),
        ({"chunk_size": "two"}, "^chunk_size = 'two': want an integer of 1 or more"),
        ({"seed": "x"}, "^seed = 'x': want an integer of 0 or more"),
    ],
)
def test_make_envs_refuses_what_is_none_before_it_starts_anything(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(embodyrl.UserError, match=expected):
        embodyrl.make_envs("gym/pendulum", **given)


@pytest.mark.faults
def test_an_episode_that_is_lost_is_truncated_and_the_next_one_begins() -> None:
    overrides = ["env.on_worker_death=restart"]
    with embodyrl.make_envs("gym/pendulum", 1, api="gymnasium", overrides=overrides) as envs:
        envs.reset(seed=1)
        manager: Any = envs.envs.manager
        psutil.Process(manager.workers[0].pid).send_signal(signal.SIGKILL)
        _, rewards, terminations, truncations, info = envs.step(np.zeros((1, 1)))
        assert (info["lost"], truncations, terminations, rewards) == ([True], [True], [False], [0.0])
        _, rewards, _, truncations, info = envs.step(np.zeros((1, 1)))
        assert not info["lost"] and not truncations and rewards == [0.0] and info["steps"] == [0]
        assert envs.step(np.zeros((1, 1)))[-1]["steps"] == [1]


class Push:
    """A model for Stable-Baselines3's evaluation."""

    def predict(self, observation: np.ndarray, **more: Any) -> tuple[np.ndarray, None]:
        return push(observation), None


def test_stable_baselines3_evaluates_and_learns_in_them(plain: embodyrl.Envs, repository: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

    spec = importlib.util.spec_from_file_location("sb3_envs", repository / "examples" / "sb3_envs.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    expected = [sum(reward for _, reward in steps[1 : LIMIT + 1]) for steps in episodes_of(plain, 9, LIMIT)]
    inner = example.Sb3Envs(plain)
    inner.seed(9)
    envs = VecNormalize(VecMonitor(inner), training=False, norm_obs=False, norm_reward=False)
    returns, lengths = evaluate_policy(Push(), envs, n_eval_episodes=ENVS, return_episode_rewards=True)
    assert np.allclose(returns, expected, atol=1e-4) and lengths == [LIMIT] * ENVS
    envs = VecNormalize(VecMonitor(inner))
    PPO("MlpPolicy", envs, n_steps=2 * LIMIT, batch_size=ENVS * LIMIT, n_epochs=1, seed=1, device="cpu").learn(1)
    assert np.isfinite(envs.obs_rms.mean).all() and envs.obs_rms.count > 2 * ENVS * LIMIT
    assert len(envs.venv.get_images()) == ENVS
