"""What every simulator must do, checked over every one that is installed. The EnvManager relies on all of it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from slow import only_slow

from embodyrl.envs.base import EpisodeOverError, RenderError, RestoreMismatchWarning, SimulatorError
from embodyrl.envs.states import pack, unpack
from embodyrl.envs.types import Simulator
from embodyrl.registry import SIMULATORS, load_target

from . import backends
from .backends import BACKENDS, LIMIT, Backend, Trajectory, actions, arrays_of, episode, go_on, missing, play, same

SHORT = [
    "metaworld",
    "metaworld-rgb-mixed",
    "maniskill",
    "gymnasium-box",
    "gymnasium-discrete",
    "gymnasium-rgb",
    "custom",
]
"""What `make test` plays: each kind, with and without images, with one task and several, ending in either way."""
PARAMS = [each if each.label in SHORT else only_slow(each) for each in BACKENDS]


@pytest.fixture(scope="module", params=PARAMS, ids=lambda backend: backend.label)
def backend(request: pytest.FixtureRequest) -> Backend:
    """One backend after the other; skipped with the reason where it is not installed."""
    chosen: Backend = request.param
    reason = missing(chosen)
    if reason:
        pytest.skip(reason)
    return chosen


@pytest.fixture(scope="module")
def simulator(backend: Backend) -> Iterator[Simulator]:
    """A simulator of two slots, shared by the tests: no test may depend on what was played before."""
    built = backend.build(num_slots=2)
    yield built
    built.close()


@pytest.fixture(autouse=True)
def no_mismatch() -> Iterator[None]:
    """A restored state that differs from the saved one is only a warning to a user, but a failure here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def test_spec_says_what_is_offered(simulator: Simulator, backend: Backend) -> None:
    spec = simulator.spec
    assert list(spec.tasks) == list(backend.tasks)
    assert all(len(task_description.split()) > 1 for task_description in spec.tasks.values())
    assert spec.max_episode_steps == LIMIT
    assert spec.control_frequency > 0
    assert spec.action_dim == sum(len(field.low) for field in spec.actions) > 0
    assert all(len(field.low) == len(field.high) and field.name and field.unit for field in spec.actions)
    assert np.isfinite(spec.action_low).all() and np.isfinite(spec.action_high).all()
    assert (spec.action_low < spec.action_high).all()
    assert all(field.opens != field.closes for field in spec.actions if field.meaning == "gripper")
    assert list(spec.cameras) == backend.options.get("cameras", [])
    assert list(spec.image_size) == (backend.options["image_size"] if spec.cameras else [0, 0])
    assert spec.cameras or spec.proprio_dim


@pytest.mark.parametrize(("key", "attribute"), [("state_dim", "proprio_dim"), ("action_dim", "action_dim")])
def test_what_is_told_before_it_starts_is_true(
    simulator: Simulator, backend: Backend, key: str, attribute: str
) -> None:
    fact = getattr(SIMULATORS.entry(backend.name), key)
    told = None if fact is None else load_target(fact)(backend.config())
    assert told in (None, getattr(simulator.spec, attribute))


def test_shapes_and_types(simulator: Simulator, backend: Backend) -> None:
    spec = simulator.spec
    first = simulator.reset([0, 1], [episode(backend, 0), episode(backend, 1)])
    plan = np.stack([actions(simulator, 0), actions(simulator, 1)])[:, :3]
    result = simulator.step_chunk([0, 1], plan)
    for observation in (first, result.observation):
        assert (observation.images is not None) == bool(spec.cameras)
        assert (observation.proprio is not None) == (spec.proprio_dim > 0)
        images, proprio = arrays_of(observation)
        assert images.dtype == np.uint8 and proprio.dtype == np.float32
        assert images.shape == ((2, len(spec.cameras), *spec.image_size, 3) if spec.cameras else (2, 0))
        assert proprio.shape == (2, spec.proprio_dim)
        assert observation.task_descriptions == [spec.tasks[episode(backend, number).task] for number in (0, 1)]
    assert result.rewards.shape == (2, 3) and result.rewards.dtype == np.float32
    assert result.success.shape == (2, 3) and result.success.dtype == np.bool_
    assert result.terminated.shape == (2,) and result.terminated.dtype == np.bool_
    assert result.truncated.shape == (2,) and result.truncated.dtype == np.bool_
    assert result.steps.shape == (2,) and result.steps.dtype == np.int32


def test_order_of_slots_is_the_callers(simulator: Simulator, backend: Backend) -> None:
    forth = simulator.reset([0, 1], [episode(backend, 0), episode(backend, 1)])
    back = simulator.reset([1, 0], [episode(backend, 0), episode(backend, 1)])
    assert same(forth, back)
    assert same(simulator.observe([1, 0]), back) and not same(simulator.observe([0, 1]), back)


def test_same_episode_same_trajectory_in_any_slot(simulator: Simulator, backend: Backend) -> None:
    first = {number: play(simulator, 0, backend, number) for number in (0, 1, 2)}
    assert {number: play(simulator, 0, backend, number) for number in (2, 0, 1)} == first
    assert {number: play(simulator, 1, backend, number) for number in (1, 2, 0)} == first


def test_interleaved_slots_do_not_disturb_each_other(simulator: Simulator, backend: Backend) -> None:
    alone = [play(simulator, 0, backend, 0), play(simulator, 0, backend, 1)]
    simulator.reset([0, 1], [episode(backend, 0), episode(backend, 1)])
    plans = [actions(simulator, 0), actions(simulator, 1)]
    for index in range(min(len(trajectory.rewards) for trajectory in alone)):
        result = simulator.step_chunk([0, 1], np.stack([plan[index : index + 1] for plan in plans]))
        for row, trajectory in enumerate(alone):
            assert result.rewards[row, 0] == trajectory.rewards[index]
            assert trajectory.shows(index + 1, result.observation, row)


def test_chunks_do_not_change_the_trajectory(simulator: Simulator, backend: Backend) -> None:
    single = play(simulator, 0, backend, 0)
    assert single.shows(0, simulator.reset([0], [episode(backend, 0)]))
    rewards: list[float] = []
    plan = actions(simulator, 0)
    while True:
        result = simulator.step_chunk([0], plan[None, len(rewards) : len(rewards) + 4])
        rewards += result.rewards[0, : result.steps[0]].tolist()
        assert single.shows(len(rewards), result.observation)
        if result.terminated[0] or result.truncated[0]:
            break
    assert rewards == single.rewards.tolist()


def test_start_states_differ(simulator: Simulator, backend: Backend) -> None:
    same_task = range(0, 4 * len(backend.tasks), len(backend.tasks))
    starts = [arrays_of(simulator.reset([0], [episode(backend, number)])) for number in same_task]
    assert len({images.tobytes() + proprio.tobytes() for images, proprio in starts}) == 4
    if simulator.spec.cameras:
        assert len({images.tobytes() for images, _ in starts}) == 4


def test_start_state_decides_the_start_and_the_seed_does_not(simulator: Simulator, backend: Backend) -> None:
    one = episode(backend, 0)
    other = type(one)(task=one.task, start_state=one.start_state, seed=one.seed + 12345, group=9)
    assert same(simulator.reset([0], [one]), simulator.reset([0], [other]))


def test_truncated_exactly_at_the_time_limit(backend: Backend, simulator: Simulator) -> None:
    trajectory = play(simulator, 0, backend, 0)
    terminated, truncated = trajectory.ends.T
    assert not terminated[:-1].any() and not truncated[:-1].any()
    assert terminated[-1] != truncated[-1]
    if truncated[-1]:
        assert len(trajectory.rewards) == LIMIT


def test_a_slot_stops_at_its_own_end_inside_a_chunk(simulator: Simulator, backend: Backend) -> None:
    lasting = next(number for number in range(20) if len(play(simulator, 0, backend, number).rewards) == LIMIT)
    simulator.reset([0, 1], [episode(backend, lasting), episode(backend, 1)])
    simulator.step_chunk([0], actions(simulator, lasting)[None, : LIMIT - 2])
    ends = np.zeros((5, simulator.spec.action_dim), np.float32)
    ends[:2] = actions(simulator, lasting)[LIMIT - 2 :]
    result = simulator.step_chunk([0, 1], np.stack([ends, actions(simulator, 1, 5)]))
    assert result.steps.tolist() == [2, 5]
    assert result.truncated.tolist() == [True, False]
    assert not result.terminated.any()
    assert not result.rewards[0, 2:].any() and not result.success[0, 2:].any()


def test_an_ended_episode_is_not_stepped(simulator: Simulator, backend: Backend) -> None:
    play(simulator, 0, backend, 0)
    with pytest.raises(EpisodeOverError, match="slot 0 was stepped but its episode is over"):
        simulator.step_chunk([0], actions(simulator, 0)[None, :1])


def test_termination_is_not_truncation(backend: Backend) -> None:
    if not backend.ends_itself:
        pytest.skip("its episodes end by the time limit")
    simulator = backend.build(num_slots=1, max_episode_steps=60)
    simulator.reset([0], [episode(backend, 0)])
    result = simulator.step_chunk([0], np.tile(simulator.spec.action_high, (1, 60, 1)))
    assert result.terminated[0] and not result.truncated[0]
    assert 0 < result.steps[0] < 60 and not result.rewards[0, result.steps[0] :].any()
    simulator.close()


def test_observe_gives_the_last_observation(simulator: Simulator, backend: Backend) -> None:
    first = simulator.reset([0], [episode(backend, 0)])
    later = simulator.step_chunk([0], actions(simulator, 0)[None, :2]).observation
    seen = simulator.observe([0])
    assert same(seen, later) and not same(seen, first)


def test_state_goes_on_in_the_same_and_in_another_slot(simulator: Simulator, backend: Backend) -> None:
    whole = play(simulator, 0, backend, 3)
    done = len(whole.rewards) // 2
    simulator.reset([0], [episode(backend, 3)])
    simulator.step_chunk([0], actions(simulator, 3)[None, :done])
    (state,) = simulator.get_state([0])
    assert isinstance(state, bytes)
    rest = whole.after(done)
    assert go_on(simulator, 0, actions(simulator, 3)[done:]) == rest  # saving changed nothing
    for slot in (0, 1):
        play(simulator, slot, backend, 4)
        simulator.set_state([slot], [state])
        assert simulator.get_state([slot]) == [state]
        assert go_on(simulator, slot, actions(simulator, 3)[done:]) == rest


def test_state_of_a_fresh_and_of_an_ended_episode(simulator: Simulator, backend: Backend) -> None:
    simulator.reset([0], [episode(backend, 0)])
    fresh = simulator.get_state([0])
    whole = go_on(simulator, 0, actions(simulator, 0))
    ended = simulator.get_state([0])
    simulator.set_state([1], ended)
    assert whole.shows(-1, simulator.observe([1]))
    with pytest.raises(EpisodeOverError):
        simulator.step_chunk([1], actions(simulator, 0)[None, :1])
    simulator.set_state([1], fresh)
    assert go_on(simulator, 1, actions(simulator, 0)) == whole


def test_states_that_do_not_come_back_are_named_and_others_are_not(simulator: Simulator, backend: Backend) -> None:
    simulator.reset([0, 1], [episode(backend, 0), episode(backend, 1)])
    simulator.step_chunk([0, 1], np.stack([actions(simulator, 0)[:3], actions(simulator, 1)[:3]]))
    states = simulator.get_state([0, 1])
    assert not simulator.set_state([1, 0], states)
    header, arrays = unpack(states[1])
    shown_otherwise = pack({**header, "check": header["check"] ^ 1}, arrays)
    with pytest.warns(RestoreMismatchWarning, match=f"slot 0, step 3 .task '{header['task']}'"):
        assert simulator.set_state([1, 0], [states[0], shown_otherwise]) == [0]


def test_another_process_plays_and_goes_on_bit_for_bit(simulator: Simulator, backend: Backend, tmp_path: Path) -> None:
    whole = play(simulator, 0, backend, 3)
    done = len(whole.rewards) // 2
    simulator.reset([0], [episode(backend, 3)])
    simulator.step_chunk([0], actions(simulator, 3)[None, :done])
    (tmp_path / "state").write_bytes(simulator.get_state([0])[0])
    job = {
        "label": backend.label,
        "state_file": str(tmp_path / "state"),
        "done": done,
        "out": str(tmp_path / "out.npz"),
    }
    command = [sys.executable, "-W", "error::RuntimeWarning", backends.__file__, json.dumps(job)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=120)
    with np.load(tmp_path / "out.npz") as there:
        assert Trajectory(*[there[f"whole{index}"] for index in range(len(whole.arrays()))]) == whole
        assert Trajectory(*[there[f"rest{index}"] for index in range(len(whole.arrays()))]) == whole.after(done)


def test_images_are_for_people_or_refused_in_words(simulator: Simulator, backend: Backend) -> None:
    simulator.reset([0, 1], [episode(backend, 0), episode(backend, 1)])
    try:
        images = simulator.render([0, 1])
    except RenderError as error:
        assert len(str(error).split()) > 3
        return
    assert images.ndim == 4 and images.shape[0] == 2 and images.shape[3] == 3 and images.dtype == np.uint8


def test_nothing_is_nan(simulator: Simulator, backend: Backend) -> None:
    for number in range(3):
        trajectory = play(simulator, 0, backend, number)
        assert np.isfinite(trajectory.proprio).all() and np.isfinite(trajectory.rewards).all()


def test_every_camera_sees_the_scene_change(simulator: Simulator, backend: Backend) -> None:
    if not simulator.spec.cameras:
        pytest.skip("it has no cameras")
    images = play(simulator, 0, backend, 0).images
    assert (images.std(axis=(2, 3, 4)) > 1).all(), "an image of one colour"
    for view in range(images.shape[1]):
        assert (images[0, view] != images[-1, view]).any(), simulator.spec.cameras[view]
    for one, other in itertools.combinations(range(images.shape[1]), 2):
        assert (images[0, one] != images[0, other]).any(), "two cameras show the same"


def test_closing_twice_is_harmless_and_a_closed_simulator_says_so(backend: Backend) -> None:
    simulator = backend.build(num_slots=1)
    simulator.reset([0], [episode(backend, 0)])
    simulator.close()
    simulator.close()
    with pytest.raises(SimulatorError, match="closed"):
        simulator.reset([0], [episode(backend, 0)])
