"""The scripted expert of LIBERO: it solves the tasks that it claims to play, from any moment on, and refuses others."""

from __future__ import annotations

import libero_files
import numpy as np
import pytest
from libero_files import needs_assets
from numpy.typing import NDArray

from embodyrl.config import ConfigError, load_config
from embodyrl.data.experts import Remembering, scripted_expert
from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.libero.pick_and_place import GRASPS, PickAndPlace
from embodyrl.envs.libero.scene import read_scene
from embodyrl.envs.libero.tasks import (
    ROBOT_STATE,
    known_tasks,
    read_states,
    start_states_file,
    task_file,
)
from embodyrl.envs.options import LiberoConfig, Proprio
from embodyrl.errors import UserError
from embodyrl.registry import EXPERTS, SIMULATORS

if SIMULATORS.entry("libero").missing():
    pytest.skip("LIBERO not installed", allow_module_level=True)

BOWL, SOUP = "libero_spatial/2", "libero_object/0"
PLAYED = [task for task in known_tasks() if EXPERTS.entry("libero").cannot_play([task]) is None]


def config(*tasks: str, **options) -> LiberoConfig:
    return LiberoConfig(name="libero", tasks=list(tasks), **options)


def play(expert, simulator, episode: EpisodeSpec, *, pushed: bool = False, most: int = 220) -> tuple[bool, list]:
    """Play an episode; returns whether it was solved, and the actions. If pushed, others act for a while."""
    slots = np.zeros(1, np.int64)
    expert.begin(0, episode)
    observation, actions = simulator.reset([0], [episode]), []
    for step in range(most):
        action = expert.act(slots, observation)
        if pushed and 45 <= step < 50:
            action = np.array([[0.9, -0.9, 0.9, 0.0, 0.0, 0.0, -1.0]], np.float32)
        actions.append(action[0])
        result = simulator.step_chunk([0], action[:, None])
        observation = result.observation
        if result.terminated[0]:
            return True, actions
    return False, actions


@needs_assets
@pytest.mark.parametrize("task", [BOWL, SOUP])
def test_it_solves_a_task_with_small_steps_and_after_a_push(task: str) -> None:
    from embodyrl.envs.libero.simulator import Libero

    expert = scripted_expert(config(task))
    simulator = Libero(expert.env, 1)
    for start, pushed in ((0, False), (21, False), (42, True)):
        solved, actions = play(expert, simulator, EpisodeSpec(task=task, start_state=start, seed=0), pushed=pushed)
        assert solved, start
        assert 60 < len(actions) < 190, start
        arm = np.array(actions)[:, :6]
        assert np.abs(arm if not pushed else arm[:45]).max() <= 0.81
    simulator.close()


@needs_assets
def test_the_state_has_the_objects_in_the_order_of_the_task_file() -> None:
    from embodyrl.envs.libero.driver import Driver

    place = libero_files.place()
    assert place is not None
    for task in (BOWL, "libero_goal/4"):
        scene, driver = read_scene(task_file(task)), Driver(task_file(task), place)
        driver.reset(3, read_states(start_states_file(task))[3])
        with driver.scene() as at:
            state = np.concatenate([driver.robot(at), driver.objects(at)])
            for name in scene.kinds:
                assert np.allclose(state[scene.place(name)][:3], at.body(f"{name}_main").xpos, atol=1e-6), name
            for name, middle in scene.fixtures.items():
                found = driver._env.get_object(name)
                assert np.abs(at.body(found.root_body).xpos[:2] - middle).max() <= 0.011, name


def test_what_it_claims_to_play_has_one_goal_and_a_known_grasp() -> None:
    assert len(PLAYED) == 23
    for task in PLAYED:
        scene = read_scene(task_file(task))
        ((verb, what, where),) = scene.goal
        assert verb in ("on", "in") and scene.kinds[what] in GRASPS
        assert where in scene.kinds or any(where.startswith(name) for name in {**scene.kinds, **scene.fixtures})


@pytest.mark.parametrize("task", ["libero_spatial/4", "libero_goal/7", "libero_10/0"])
def test_other_tasks_are_refused_with_those_that_it_plays(task: str) -> None:
    with pytest.raises(UserError, match=rf"does not play {task}: it plays libero_spatial/.*, libero_goal/"):
        scripted_expert(config(BOWL, task))


def test_a_config_that_asks_it_for_another_task_is_refused() -> None:
    given = ["env=libero/spatial", "eval.episodes=20", "rollout.chunk_size=1"]
    with pytest.raises(ConfigError, match="'libero' does not play libero_spatial/4"):
        load_config("push_dagger", given)


def test_the_recording_shows_what_the_config_names() -> None:
    seen = Observation(proprio=np.arange(47, dtype=np.float32)[None], task_descriptions=[""])
    for proprio, numbers in ((Proprio.robot, ROBOT_STATE), (Proprio.full, 47)):
        expert = scripted_expert(config(BOWL, proprio=proprio))
        shown = expert.recorded(seen).proprio
        assert expert.env.proprio is Proprio.full
        assert shown is not None and shown.tolist() == [list(range(numbers))]


def still(**objects: list[float]) -> NDArray[np.float64]:
    """A state `[47]` with the hand above the table, pointing down, and objects upright at these positions."""
    scene = read_scene(task_file(BOWL))
    state = np.zeros(47)
    state[:8] = [-0.2, 0.0, 1.18, np.pi, 0.0, 0.0, 0.039, -0.039]
    for number, name in enumerate(scene.kinds):
        state[scene.place(name)] = [*objects.get(name, [0.3, -1.0 - number, 0.9]), 1.0, 0.0, 0.0, 0.0]
    return state


BOWL_AT = [-0.05, 0.0, 0.9]


@pytest.mark.parametrize(
    ("others", "side"),
    [
        ({}, 90),
        ({"akita_black_bowl_2": [-0.05, 0.1, 0.9]}, 30),
        ({"plate_1": [-0.05, 0.1, 0.9]}, 90),
        ({"glazed_rim_porcelain_ramekin_1": [0.0, 0.1, 0.9]}, 120),
    ],
)
def test_a_bowl_is_grasped_at_its_rim_where_nothing_stands(others: dict[str, list[float]], side: int) -> None:
    state = still(akita_black_bowl_1=BOWL_AT, **others)
    rules = PickAndPlace(read_scene(task_file(BOWL)))
    pose = state[read_scene(task_file(BOWL)).place("akita_black_bowl_1")]
    assert np.degrees(rules._side(state, pose)) == pytest.approx(side)


def test_what_it_remembers_is_the_height_at_which_the_object_stood() -> None:
    expert = scripted_expert(config(BOWL))
    assert isinstance(expert, Remembering)
    episode = EpisodeSpec(task=BOWL, start_state=0, seed=0)
    expert.begin(0, episode)
    assert expert.memory(0) == ""
    state = still(akita_black_bowl_1=BOWL_AT, plate_1=[0.06, 0.2, 0.9])
    lifted = still(akita_black_bowl_1=[-0.05, 0.0, 0.92], plate_1=[0.06, 0.2, 0.9])
    lifted[:3] = [-0.05, 0.048, 0.954]
    lifted[6:8] = [0.004, -0.004]
    seen, later = (
        Observation(proprio=each[None].astype(np.float32), task_descriptions=[""]) for each in (state, lifted)
    )
    expert.act(np.zeros(1, np.int64), seen)
    expert.begin(1, episode)
    expert.remember(1, expert.memory(0))
    one, other = expert.act(np.array([0, 1]), Observation.concat([later, later]))
    assert np.array_equal(one, other) and one[2] > 0.5 and one[6] == 1.0, "lifts it"
