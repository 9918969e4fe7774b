"""MetaWorld: the same numbers as its own environments, whatever we leave out around them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from numpy.typing import NDArray
from omegaconf import OmegaConf
from slow import rest_slow

pytest.importorskip("metaworld", reason="metaworld not installed")

from embodyrl.envs.metaworld.simulator import TASKS, MetaWorld
from embodyrl.envs.options import Driver, MetaWorldConfig, Proprio
from embodyrl.envs.states import StateError
from embodyrl.envs.types import EpisodeSpec
from embodyrl.errors import UnknownNameError, UserError

CONFIGS = Path(__file__).parents[2] / "configs" / "env" / "metaworld"

# One of each kind: a free object, a moved body, two objects, contacts that count, a quaternion from a body.
COMPARED = ["reach-v3", "drawer-open-v3", "stick-pull-v3", "push-v3", "door-open-v3"]
if os.environ.get("EMBODYRL_ALL_TASKS"):
    COMPARED = sorted(TASKS)


def simulator(*tasks: str, num_slots: int = 1, **options: Any) -> MetaWorld:
    """A simulator of `tasks`."""
    return MetaWorld(MetaWorldConfig(name="metaworld", tasks=list(tasks), **options), num_slots)


def episode(task: str, start_state: int = 0) -> EpisodeSpec:
    """An episode."""
    return EpisodeSpec(task=task, start_state=start_state, seed=start_state)


def moves(number: int, steps: int) -> NDArray[np.float32]:
    """Actions `[steps, 4]`: mostly in one direction, so that the arm goes somewhere and touches things."""
    generator = np.random.default_rng(number)
    return np.clip(generator.uniform(-1, 1, 4) + 0.5 * generator.uniform(-1, 1, (steps, 4)), -1, 1).astype(np.float32)


def own_episode(task: str, start_state: int, actions: NDArray[np.float32]) -> tuple[list[Any], list[Any], list[bool]]:
    """What MetaWorld's own environment, fresh and with its own reset and step, makes of an episode."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    env: Any = ALL_V3_ENVIRONMENTS[task]()
    env._partially_observable, env._set_task_called = False, True
    del env.sawyer_observation_space
    # Let it draw the layout from our generator once; from then on it is frozen, as after `set_task`.
    env._freeze_rand_vec, env.seeded_rand_vec = False, True
    env.np_random = np.random.default_rng(start_state)
    env.reset_model()
    env._freeze_rand_vec = True
    observation, _ = env.reset()
    observations, rewards, success = [observation.astype(np.float32)], [], []
    for action in actions:
        observation, reward, _, _, info = env.step(action)
        observations.append(observation.astype(np.float32))
        rewards.append(np.float32(reward))
        success.append(bool(info["success"]))
    env.close()
    return observations, rewards, success


@pytest.mark.parametrize("task", COMPARED)
def test_numbers_are_those_of_metaworld_bit_for_bit(task: str) -> None:
    ours = simulator(task, max_episode_steps=60)
    for start_state in (1, 0, 1):
        actions = moves(start_state, 40)
        observations, rewards, success = own_episode(task, start_state, actions)
        first = ours.reset([0], [episode(task, start_state)]).proprio
        assert first is not None and np.array_equal(first[0], observations[0])
        for index, action in enumerate(actions):
            result = ours.step_chunk([0], action[None, None])
            assert result.observation.proprio is not None
            assert np.array_equal(result.observation.proprio[0], observations[index + 1]), index
            assert (result.rewards[0, 0], result.success[0, 0]) == (rewards[index], success[index])
    ours.close()


@pytest.mark.parametrize("task", COMPARED)
def test_both_drivers_give_the_same_numbers_bit_for_bit(task: str) -> None:
    fast, upstream = (simulator(task, max_episode_steps=60, driver=driver) for driver in Driver)
    for start_state in (1, 0, 1):  # of the upstream driver, too, an episode does not depend on the last one
        starts = [each.reset([0], [episode(task, start_state)]).proprio for each in (fast, upstream)]
        assert np.array_equal(*starts)
        results = [each.step_chunk([0], moves(start_state, 40)[None]) for each in (fast, upstream)]
        for name in ("rewards", "success", "steps", "terminated", "truncated"):
            assert np.array_equal(*(getattr(result, name) for result in results)), name
        assert np.array_equal(*(result.observation.proprio for result in results))
    fast.close()
    upstream.close()


def test_a_state_goes_from_the_upstream_to_the_fast_driver_but_not_back() -> None:
    task, actions = "push-v3", moves(0, 10)
    fast, upstream = (simulator(task, max_episode_steps=60, driver=driver) for driver in Driver)
    for each in (fast, upstream):
        each.reset([0], [episode(task)])
        each.step_chunk([0], actions[None])
    replayed, snapshot = upstream.get_state([0])[0], fast.get_state([0])[0]
    assert not fast.set_state([0], [replayed])
    with pytest.raises(StateError, match=r"saved with env\.driver = 'fast'"):
        upstream.set_state([0], [snapshot])


def test_the_goal_is_in_the_observation() -> None:
    ours = simulator("reach-v3")
    goals = [ours.reset([0], [episode("reach-v3", number)]).proprio for number in range(2)]
    for goal in goals:
        assert (
            goal is not None and (goal[0, -3:] >= [-0.1, 0.8, 0.05]).all() and (goal[0, -3:] <= [0.1, 0.9, 0.3]).all()
        )
    assert goals[0] is not None and goals[1] is not None and not np.array_equal(goals[0][0, -3:], goals[1][0, -3:])


def to_goal(simulator: MetaWorld, chunk: int) -> Any:
    """Drive the hand towards the goal of reach-v3 for `chunk` actions at once."""
    seen = simulator.observe([0]).proprio
    assert seen is not None
    way = seen[0, -3:] - seen[0, :3]
    action = np.append(way / np.abs(way).max(), 0).astype(np.float32)
    return simulator.step_chunk([0], np.tile(action, (1, chunk, 1)))


def test_the_robots_own_numbers_are_the_first_four_and_tell_nothing_else() -> None:
    full, robot = simulator("push-v3"), simulator("push-v3", proprio=Proprio.robot)
    assert (full.spec.proprio_dim, robot.spec.proprio_dim) == (39, 4)
    starts = []
    for start_state in range(3):
        seen = [ours.reset([0], [episode("push-v3", start_state)]).proprio for ours in (full, robot)]
        assert seen[0] is not None and seen[1] is not None and np.array_equal(seen[0][:, :4], seen[1])
        starts.append(seen)
    # Where object and goal are differs, and only the full numbers say so.
    assert len({seen[0].tobytes() for seen in starts if seen[0] is not None}) == 3
    assert len({seen[1].tobytes() for seen in starts if seen[1] is not None}) == 1


@pytest.mark.slow
def test_every_task_starts_and_steps() -> None:
    ours = simulator(*sorted(TASKS), max_episode_steps=5)
    for task in sorted(TASKS):
        ours.reset([0], [episode(task)])
        result = ours.step_chunk([0], moves(0, 1)[None])
        assert result.steps[0] == 1 and result.observation.task_descriptions == [TASKS[task]]
        assert result.observation.proprio is not None and result.observation.proprio.any()
        ours._idle.clear()
    ours.close()


def test_the_mixes_are_those_of_metaworld() -> None:
    from metaworld.env_dict import MT10_V3, MT50_V3

    for name, tasks in (("mt10", MT10_V3), ("mt50", MT50_V3)):
        written = OmegaConf.load(CONFIGS / f"{name}.yaml")
        assert list(written.tasks) == list(tasks)


def test_success_ends_the_episode_only_if_asked() -> None:
    for end_at_success in (False, True):
        ours = simulator("reach-v3", max_episode_steps=100, end_at_success=end_at_success)
        ours.reset([0], [episode("reach-v3")])
        result = to_goal(ours, 99)
        first = int(np.argmax(result.success[0]))
        assert result.success[0, first] and 5 < first < 90
        assert result.terminated[0] == end_at_success
        assert result.steps[0] == (first + 1 if end_at_success else 99)
        ours.close()


@pytest.mark.parametrize("ends", [False, True])
def test_a_repeated_action_is_the_same_action_several_times(ends: bool) -> None:
    task, actions = "reach-v3", moves(3, 6)
    single, triple = simulator(task, end_at_success=ends), simulator(task, end_at_success=ends, action_repeat=3)
    assert triple.spec.control_frequency == 80 / 3 and triple.spec.actions[0].scale == pytest.approx(0.03)
    for each in (single, triple):
        each.reset([0], [episode(task)])
    for action in actions:
        one = single.step_chunk([0], np.tile(action, (1, 3, 1)))
        other = triple.step_chunk([0], action[None, None])
        assert np.array_equal(one.observation.proprio, other.observation.proprio)
        assert other.rewards.sum() == pytest.approx(one.rewards.sum())
        assert other.success.any() == one.success.any() and other.steps.tolist() == [1]


def test_the_step_limit_counts_repetitions() -> None:
    with pytest.raises(UserError, match=r"200 x env.action_repeat = 3, .* set at most 166"):
        simulator("reach-v3", max_episode_steps=200, action_repeat=3)


def test_tasks_are_known_without_metaworld_and_are_its_tasks() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    assert set(TASKS) == set(ALL_V3_ENVIRONMENTS) and len(TASKS) == 50
    code = "import sys; from embodyrl.envs.metaworld.info import MetaWorldInfo; MetaWorldInfo('metaworld').tasks();"
    code += "print('mujoco' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("tasks", "options", "error", "message"),
    [
        (
            ["reach-v2"],
            {},
            UnknownNameError,
            r"metaworld has no task 'reach-v2' - did you mean 'reach-v3'\? \(tasks: as",
        ),
        (["reach-v3", "reach-v3"], {}, UserError, "names 'reach-v3' twice"),
        ([], {}, UserError, "env.tasks is empty"),
        (
            ["reach-v3"],
            {"cameras": ["griperPOV"]},
            UnknownNameError,
            r"metaworld has no camera 'griperPOV' - did you mean 'gripperPOV'\? \(cameras: corner, corner2,",
        ),
        (["reach-v3"], {"cameras": ["corner", "corner"]}, UserError, "env.cameras names 'corner' twice"),
        (["reach-v3"], {"max_episode_steps": 501}, UserError, "max_episode_steps is 501, but MetaWorld .* 500 steps"),
    ],
)
def test_mistakes(tasks: list[str], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        simulator(*tasks, **options)


STATE_ONLY = (
    "import sys\n"
    "from embodyrl.envs.metaworld.simulator import MetaWorld, MetaWorldConfig\n"
    "from embodyrl.envs.types import EpisodeSpec\n"
    "ours = MetaWorld(MetaWorldConfig(name='metaworld', tasks=['reach-v3']), 1)\n"
    "seen = ours.reset([0], [EpisodeSpec(task='reach-v3', start_state=0, seed=0)])\n"
    "print(seen.images, sorted({'OpenGL', 'glfw'} & set(sys.modules)))\n"
)
NO_OPENGL = [
    {"MUJOCO_GL": "osmesa"},  # no library of that name on a bare machine
    {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "osmesa"},  # these two do not go together on any machine
    {"MUJOCO_GL": "glfw", "DISPLAY": ""},
    {"MUJOCO_GL": "off"},
    {"MUJOCO_GL": "nonsense"},
]


@pytest.mark.parametrize("environment", rest_slow(NO_OPENGL), ids=lambda environment: "-".join(environment.values()))
def test_without_cameras_no_opengl_is_needed_whatever_the_environment_says(environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", STATE_ONLY]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=240)
    assert (ran.returncode, ran.stdout.split()[0]) == (0, "None"), ran.stderr
    assert "OpenGL" not in ran.stdout, "nothing that draws is loaded"


def test_a_run_without_cameras_forks_its_simulators_where_there_is_no_opengl(tmp_path: Path) -> None:
    words = ["-m", "embodyrl", "run", f"run.dir={tmp_path / 'run'}", "run.iterations=1", "tracking.report=false"]
    words += ["run.eval_every=0", "eval.episodes=2", "env.num_envs=2", "env.workers=2", "rollout.num_chunks=40"]
    words += ["algorithm.minibatches=2", "algorithm.epochs=1", "env.max_episode_steps=20"]
    ran = programs.run(words, env={**os.environ, "MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "osmesa"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "could not be imported" not in ran.stdout + (tmp_path / "run" / "run.log").read_text()
