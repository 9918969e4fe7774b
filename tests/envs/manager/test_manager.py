import dataclasses
import gc
import os

import numpy as np
import pytest
from far_away import far
from toy_simulator import Do, ToyConfig, actions, episode

from embodyrl.envs.manager import EnvManager
from embodyrl.envs.manager.pool import with_task_descriptions
from embodyrl.envs.types import EpisodeSpec
from embodyrl.errors import UserError
from embodyrl.placement.local import LocalWorker

ALL = range(4)


def start(num_envs=4, workers=2, chunk_size=1, *, kind=EnvManager, **options):
    config = ToyConfig(num_envs=num_envs, workers=workers, **{"max_episode_steps": 5, **options})
    return kind(config, chunk_size=chunk_size, plugins=["toy_simulator"])


def same(left, right):
    for name in ("images", "proprio"):
        if getattr(left, name) is not None:
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
    assert left.task_descriptions == right.task_descriptions


@pytest.fixture(scope="module")
def local():
    with start() as running:
        yield running


@pytest.fixture(scope="module", params=["local", "remote"])
def manager(request):
    if request.param == "local":
        yield request.getfixturevalue("local")
    else:
        with start(kind=far) as running:
            yield running


def test_spec(manager):
    assert manager.spec.proprio_dim == 3
    assert (manager.num_envs, manager.chunk_size) == (4, 1)


def test_workers(local):
    assert [worker.spec.slots for worker in local.workers] == [range(0, 2), range(2, 4)]
    assert len({worker.pid for worker in local.workers}) == 2


def test_reset_returns_the_episodes_that_were_asked_for(manager):
    observation = manager.reset([3, 0], [episode(7), episode(5, task="subtract")])
    assert observation.proprio.dtype == np.float32
    np.testing.assert_array_equal(observation.proprio, [[7, 0, 7], [5, 0, 7]])
    assert observation.task_descriptions == ["add the numbers up", "subtract the numbers"]
    assert observation.images is None


def test_a_slot_that_is_not_addressed_is_not_touched(manager):
    before = manager.reset(ALL, [episode(slot, seed=slot) for slot in ALL])
    manager.step([1], actions(1))
    after = manager.observe(ALL)
    np.testing.assert_array_equal(before.proprio[[0, 2, 3]], after.proprio[[0, 2, 3]])
    assert after.proprio[1, 1] == 1


def test_results_come_in_the_order_of_the_slots(manager):
    manager.reset(ALL, [episode(10 * slot) for slot in ALL])
    result = manager.step([2, 0, 3], actions(3, number=0.0))
    assert np.round(result.rewards[:, 0] / 10).tolist() == [2, 0, 3]
    np.testing.assert_array_equal(result.observation.proprio[:, 0], result.rewards[:, 0])


def test_returned_numbers_are_the_callers_own(manager):
    manager.reset(ALL, [episode(1)] * 4)
    first = manager.step(ALL, actions(4))
    kept = first.rewards.copy(), first.observation.proprio.copy()
    manager.step(ALL, actions(4))
    np.testing.assert_array_equal(first.rewards, kept[0])
    np.testing.assert_array_equal(first.observation.proprio, kept[1])


def shown(observation):
    """The number that the toy paints into each slot's images."""
    assert (observation.images == observation.images[:, :1, :1, :1, :1]).all()
    return observation.images[:, 0, 0, 0, 0].tolist()


def test_images_stay_while_the_chunk_decided_on_them_is_simulated():
    with start(images=True) as manager:
        seen = manager.reset(ALL, [episode(10 * slot + 10) for slot in ALL])
        assert shown(seen) == [10, 20, 30, 40]
        for _ in range(3):
            before = shown(seen)
            following = manager.step(ALL, actions(4, number=5.0)).observation
            assert shown(seen) == before
            assert shown(following) != before
            seen = following


def test_images_of_some_slots_are_the_right_ones_whichever_of_them_stepped_before():
    with start(images=True) as manager:
        manager.reset(ALL, [episode(10 * slot + 10, seed=slot) for slot in ALL])
        after = {slot: shown(manager.step([slot], actions(1)).observation)[0] for slot in (1, 2)}
        expected = [10, after[1], after[2], 40]
        assert shown(manager.observe(ALL)) == expected
        manager.step([0], actions(1))
        after[0] = shown(manager.observe([0]))[0]
        for slots in ([0, 1], [1, 2], [2, 0, 1]):
            assert shown(manager.observe(slots)) == [after[slot] for slot in slots]


def test_the_final_images_of_some_slots_come_with_the_present_ones_of_the_others():
    with start(images=True) as manager:
        manager.reset(ALL, [episode(10 * slot + 10, seed=slot) for slot in ALL])
        states = manager.get_state(ALL)
        undisturbed = shown(manager.step(ALL, actions(4)).observation)
        manager.set_state(ALL, states)
        result = manager.step(ALL, actions(4, slot1=Do.END), [episode(90)] * 4)
        assert shown(result.final_observation) == undisturbed
        assert shown(result.observation) == [undisturbed[0], 90, *undisturbed[2:]]


def test_an_ended_slot_starts_its_next_episode_at_once(manager):
    manager.reset(ALL, [episode(1)] * 4)
    result = manager.step(ALL, actions(4, slot1=Do.END), [episode(50)] * 4)
    assert result.ended.tolist() == result.terminated.tolist() == result.success[:, 0].tolist()
    assert result.ended.tolist() == [False, True, False, False]
    np.testing.assert_array_equal(result.observation.proprio[1], [50, 0, 7])
    assert result.final_observation.proprio[1, 1] == 1
    others = [0, 2, 3]
    np.testing.assert_array_equal(result.final_observation.proprio[others], result.observation.proprio[others])
    assert manager.step([1], actions(1)).observation.proprio[0, 1] == 1


def test_the_next_task_shows_in_the_observation_but_not_in_the_final_one(manager):
    manager.reset([0, 1], [episode(1)] * 2)
    result = manager.step([0, 1], actions(2, slot0=Do.END), [episode(1, task="subtract")] * 2)
    assert result.observation.task_descriptions == ["subtract the numbers", "add the numbers up"]
    assert result.final_observation.task_descriptions == ["add the numbers up"] * 2


def test_without_a_next_episode_a_slot_stays_at_its_end(manager):
    manager.reset(ALL, [episode(1)] * 4)
    result = manager.step(ALL, actions(4, slot2=Do.END))
    assert result.final_observation is result.observation
    assert manager.observe([2]).proprio[0, 1] == 1
    with pytest.raises(ValueError, match=r"envs \[2\] play no episode"):
        manager.step(ALL, actions(4))
    manager.reset([2], [episode(1)])
    manager.step(ALL, actions(4))


def test_the_time_limit_truncates(manager):
    manager.reset([0], [episode(1)])
    results = [manager.step([0], actions(1)) for _ in range(5)]
    assert [bool(result.truncated[0]) for result in results] == [False] * 4 + [True]
    assert not any(result.terminated[0] for result in results)


def test_a_chunk_stops_at_the_end_of_the_episode():
    with start(chunk_size=3, num_envs=2) as manager:
        manager.reset([0, 1], [episode(1)] * 2)
        chunk = actions(2, 3)
        chunk[0, 1, 0] = Do.END
        result = manager.step([0, 1], chunk, [episode(9)] * 2)
        assert result.steps.tolist() == [2, 3]
        assert result.rewards[0, 2] == 0.0
        assert result.success.tolist() == [[False, True, False], [False, False, False]]
        assert result.final_observation.proprio[:, 1].tolist() == [2, 3]
        assert result.observation.proprio[:, 1].tolist() == [0, 3]


def test_send_and_receive_in_different_groupings(manager):
    manager.reset(ALL, [episode(slot, seed=slot) for slot in ALL])
    manager.send([0, 2], actions(2))
    manager.send([1], actions(1))
    with pytest.raises(ValueError, match=r"envs \[2\] are busy"):
        manager.send([2, 3], actions(2))
    with pytest.raises(ValueError, match=r"envs \[1\] are busy"):
        manager.get_state([1])
    with pytest.raises(ValueError, match=r"envs \[3\] have no chunk under way"):
        manager.receive([2, 3])
    apart = [manager.receive([2]), manager.receive([1, 0])]
    manager.reset(ALL, [episode(slot, seed=slot) for slot in ALL])
    together = manager.step(ALL, actions(4))
    np.testing.assert_array_equal(apart[0].rewards, together.rewards[[2]])
    np.testing.assert_array_equal(apart[1].rewards, together.rewards[[1, 0]])


def test_steps_are_rung_for_and_wait_their_turn_as_messages_where_a_process_is_busy(local, monkeypatch):
    sent = []
    request = LocalWorker.request

    def noting(worker, method, *args, **options):
        sent.append((worker.spec.rank, method, args))
        return request(worker, method, *args, **options)

    local.reset(ALL, [episode(10 * slot) for slot in ALL])
    monkeypatch.setattr(LocalWorker, "request", noting)
    for slots in (ALL, [3, 0], [1], ALL):
        local.step(slots, actions(len(slots)))
    assert sent == []
    assert local.observe(ALL).proprio[:, 1].tolist() == [3, 3, 2, 3]
    sent.clear()
    local.send([0], actions(1))
    local.send([1, 2], actions(2))
    assert sent == [(0, "step", (1,))]
    assert local.receive(ALL[:3]).observation.proprio[:, 1].tolist() == [4, 4, 3]


def test_a_slow_slot_holds_nobody_up_who_does_not_wait_for_it(local):
    local.reset(ALL, [episode(1)] * 4)
    local.send([0, 1], actions(2, slot0=Do.SLOW))
    steps = 0
    while local._requests[0] is not None and steps < 3:
        local.step([2, 3], actions(2))
        steps += 1
    assert steps == 3
    assert local.receive([0, 1]).steps.tolist() == [1, 1]


def test_ready_slots_are_served_while_a_slow_one_is_under_way():
    with start(workers=4, max_episode_steps=10**6) as manager:
        manager.reset(ALL, [episode(slot, seed=slot) for slot in ALL])
        manager.send(ALL, actions(4, slot1=Do.SLOW))
        seen, rounds = [], 0
        while 1 not in seen:
            slots, result = manager.receive_ready(2 if rounds else 3)
            assert slots.tolist() == sorted(slots) and len(slots) >= 2 and len(result.rewards) == len(slots)
            seen += slots.tolist()
            manager.send(slots, actions(len(slots)))
            rounds += 1
        assert rounds > 2
        slots, _ = manager.receive_ready(4)
        assert slots.tolist() == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="cannot wait for 1 envs: 0 have a chunk under way"):
            manager.receive_ready(1)


def test_what_is_ready_is_what_would_have_been_received():
    with start(workers=2) as manager:
        manager.reset(ALL, [episode(slot, seed=slot) for slot in ALL])
        states = manager.get_state(ALL)
        expected = manager.step(ALL, actions(4, slot2=Do.END), [episode(50)] * 4)
        manager.set_state(ALL, states)
        manager.send([3, 0, 2], actions(4, slot2=Do.END)[[3, 0, 2]], [episode(50)] * 3)
        manager.send([1], actions(1), [episode(50)])
        apart = {}
        while len(apart) < 4:
            slots, result = manager.receive_ready(1)
            rows = zip(slots.tolist(), result.rewards, result.observation.proprio, result.terminated, strict=True)
            apart |= {slot: row for slot, *row in rows}
        for slot in ALL:
            np.testing.assert_array_equal(apart[slot][0], expected.rewards[slot])
            np.testing.assert_array_equal(apart[slot][1], expected.observation.proprio[slot])
            assert apart[slot][2] == expected.terminated[slot]


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ([], "different slots"),
        ([0, 0], "different slots"),
        ([4], r"within 0\.\.3"),
        ([-1], r"within 0\.\.3"),
        ([[0]], "different slots"),
    ],
)
def test_wrong_slots(manager, slots, text):
    with pytest.raises(ValueError, match=text):
        manager.observe(slots)


def test_wrong_actions(manager):
    manager.reset(ALL, [episode(1)] * 4)
    with pytest.raises(ValueError, match=r"got shape \(4, 2\), want \[B, C, D\] = \(4, 1, 2\)"):
        manager.step(ALL, np.zeros((4, 2)))
    bad = actions(4)
    bad[3, 0, 1] = np.nan
    with pytest.raises(ValueError, match="env 3, action 0, dim 1 is nan"):
        manager.step(ALL, bad)
    manager.step(ALL, actions(4))  # nothing was sent: the manager goes on


def test_wrong_episodes(manager):
    with pytest.raises(ValueError, match="got 1 episodes for 4 envs"):
        manager.reset(ALL, [episode()])
    with pytest.raises(ValueError, match="'multiply' is not one of"):
        manager.reset([0], [episode(task="multiply")])


def test_a_reset_needs_an_episode(manager):
    with pytest.raises(ValueError, match="env 0: got no episode"):
        manager.reset([0], [None])


def test_states_continue_bit_for_bit_in_any_slot(manager):
    manager.reset(ALL, [episode(slot, seed=slot) for slot in ALL])
    manager.step(ALL, actions(4))
    states = manager.get_state(ALL)
    expected = manager.step(ALL, actions(4))
    manager.set_state([1, 0, 3, 2], states)
    again = manager.step(ALL, actions(4))
    np.testing.assert_array_equal(again.rewards, expected.rewards[[1, 0, 3, 2]])


def test_the_state_of_an_ended_slot_is_still_ended(manager):
    manager.reset([0], [episode(1)])
    manager.step([0], actions(1, slot0=Do.END))
    states = manager.get_state([0])
    manager.reset([0], [episode(1)])
    manager.set_state([0], states)
    with pytest.raises(ValueError, match="play no episode"):
        manager.step([0], actions(1))


def test_wrong_number_of_states(manager):
    with pytest.raises(ValueError, match="got 1 states for 2 envs"):
        manager.set_state([0, 1], [b""])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_video_has_an_image_per_executed_action_and_changes_nothing(workers):
    with start(chunk_size=3, workers=workers, images=True) as manager:
        manager.reset(ALL, [episode(slot, seed=slot) for slot in ALL])
        states = manager.get_state(ALL)
        chunk = actions(4, 3)
        chunk[2, 1, 0] = Do.END
        slots, following = [3, 2, 0], [episode(50)] * 3
        expected = manager.step(slots, chunk[slots], following)
        manager.set_state(ALL, states)
        result, videos = manager.step_recorded(slots, chunk[slots], following)
        for name in ("rewards", "success", "terminated", "truncated", "steps"):
            np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))
        same(result.observation, expected.observation)
        same(result.final_observation, expected.final_observation)
        assert [video.shape for video in videos] == [(3, 8, 8, 3), (2, 8, 8, 3), (3, 8, 8, 3)]
        assert [video[:, 0, 0, 0].tolist() for video in videos] == [[1, 2, 3], [1, 2], [1, 2, 3]]


def test_every_step_keeps_the_observations_in_between_and_changes_nothing_else():
    config = ToyConfig(num_envs=4, workers=2, images=True, max_episode_steps=5)
    with (
        start(chunk_size=3, images=True) as manager,
        EnvManager(config, chunk_size=3, every_step=True, plugins=["toy_simulator"]) as keeping,
        start(images=True) as single,
    ):
        for each in (manager, keeping, single):
            each.reset(ALL, [episode(10 * slot + 10, seed=slot) for slot in ALL])
        for end in (False, True):
            chunk = actions(4, 3)
            chunk[1, 1, 0] = Do.END if end else Do.STEP
            expected, result = (each.step(ALL, chunk, [episode(90)] * 4) for each in (manager, keeping))
            for name in ("rewards", "success", "terminated", "truncated", "steps"):
                np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))
            same(result.observation, expected.observation)
            same(result.final_observation, expected.final_observation)
            assert expected.step_images is None and expected.step_proprio is None
            for slot in ALL:
                for number in range(3):
                    if number < result.steps[slot]:
                        seen = single.step([slot], chunk[[slot], number : number + 1]).observation
                        np.testing.assert_array_equal(result.step_images[slot, number], seen.images[0])
                        np.testing.assert_array_equal(result.step_proprio[slot, number], seen.proprio[0])
                    else:
                        assert (
                            not result.step_images[slot, number].any() and not result.step_proprio[slot, number].any()
                        )
        assert result.ended.all() and result.steps.tolist() == [2, 2, 2, 2]


def test_render(manager):
    manager.reset(ALL, [episode(1)] * 4)
    manager.step([3], actions(1))
    images = manager.render([3, 1])
    assert (images.shape, images.dtype) == ((2, 8, 8, 3), np.uint8)
    assert images[:, 0, 0, 0].tolist() == [1, 0]


def trajectory(workers):
    dice = np.random.default_rng(1)
    with start(workers=workers, images=True, chunk_size=2) as manager:
        numbers = iter(range(1000))
        seen = [manager.reset(ALL, [episode(next(numbers), seed=slot) for slot in ALL])]
        results = []
        for _ in range(12):
            chunk = np.zeros((4, 2, 2), np.float32)
            chunk[..., 1] = dice.uniform(-1, 1, (4, 2))
            chunk[..., 0] = dice.random((4, 2)) < 0.2  # Do.END
            results.append(manager.step(ALL, chunk, [episode(next(numbers), seed=slot) for slot in ALL]))
            seen += [results[-1].observation, results[-1].final_observation]
        return seen, results, manager.get_state(ALL)


def test_the_number_of_workers_changes_nothing():
    (seen, results, states), (other_seen, other_results, other_states) = trajectory(1), trajectory(2)
    assert any(result.ended.any() for result in results)
    for left, right in zip(seen, other_seen, strict=True):
        same(left, right)
    for left, right in zip(results, other_results, strict=True):
        for name in ("rewards", "success", "terminated", "truncated", "steps"):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
    assert states == other_states


def test_states_move_to_a_manager_with_another_number_of_workers():
    with start(workers=2) as first:
        first.reset(ALL, [episode(slot, seed=slot) for slot in ALL])
        first.step(ALL, actions(4))
        states = first.get_state(ALL)
        expected = first.step(ALL, actions(4))
    with start(workers=1) as second:
        second.set_state(ALL, states)
        np.testing.assert_array_equal(second.step(ALL, actions(4)).rewards, expected.rewards)


def test_images_travel(manager):
    with start(images=True, num_envs=2) as seeing:
        observation = seeing.reset([0, 1], [episode(20), episode(30)])
        assert (observation.images.shape, observation.images.dtype) == ((2, 2, 4, 6, 3), np.uint8)
        assert observation.images[:, 1, 3, 5, 2].tolist() == [20, 30]


def test_cameras_that_the_simulator_does_not_show_are_refused():
    with pytest.raises(UserError, match=r"env.cameras is \['top'\], but simulator 'toy' shows no images"):
        start(cameras=["top"])


def test_a_manager_that_is_dropped_leaves_nothing_open():
    gc.collect()  # what other tests have dropped
    before = len(os.listdir("/proc/self/fd"))
    manager = start(num_envs=1, workers=1)
    pid = manager.workers[0].pid
    del manager
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not os.path.exists(f"/proc/{pid}")


def test_workers_load_only_what_simulators_need(tmp_path, fresh_children):
    (tmp_path / "lists_modules.py").write_text(
        "import toy_simulator, sys\nimport embodyrl.envs.manager.worker\nprint(*sorted(sys.modules))\n"
    )
    config = ToyConfig(num_envs=1)
    with EnvManager(config, chunk_size=1, plugins=["lists_modules"], plugin_path=str(tmp_path), log_dir=tmp_path):
        loaded = set((tmp_path / "env-0.log").read_text().split())
    assert "numpy" in loaded
    assert not loaded & {"torch", "hydra", "omegaconf", "typer", "rich", "pytest"}


def test_a_gymnasium_environment_plays_the_same_in_any_number_of_workers():
    from embodyrl.envs.options import GymnasiumConfig

    def play(workers):
        config = GymnasiumConfig(
            name="gymnasium", tasks=["Pendulum-v1"], num_envs=2, workers=workers, max_episode_steps=3
        )
        with EnvManager(config, chunk_size=2) as manager:
            rows = [manager.reset([0, 1], [EpisodeSpec(task="Pendulum-v1", start_state=s, seed=s) for s in (0, 1)])]
            for k in range(4):
                next_episodes = [EpisodeSpec(task="Pendulum-v1", start_state=9 + k, seed=s) for s in (0, 1)]
                chunk = np.full((2, 2, manager.spec.action_dim), 0.3, np.float32)
                rows.append(manager.step([0, 1], chunk, next_episodes).observation)
            return rows

    for left, right in zip(play(1), play(2), strict=True):
        same(left, right)


def test_closing_twice_and_using_after():
    manager = start(num_envs=1, workers="auto")
    manager.close()
    manager.close()
    with pytest.raises(RuntimeError, match="is closed"):
        manager.observe([0])


def test_output_goes_to_the_log_folder(tmp_path):
    config = ToyConfig(num_envs=1, workers=1)
    with EnvManager(config, chunk_size=1, plugins=["toy_simulator"], log_dir=tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["env-0.log"]


def test_a_task_is_told_in_the_words_of_the_config():
    with start(num_envs=2, workers=1, task_descriptions={"subtract": "take the numbers away"}) as manager:
        assert manager.spec.tasks == {"add": "add the numbers up", "subtract": "take the numbers away"}
        observation = manager.reset([0, 1], [episode(), episode(task="subtract")])
        assert observation.task_descriptions == ["add the numbers up", "take the numbers away"]


def test_a_task_description_of_two_tasks_cannot_be_replaced_for_one(manager):
    spec = dataclasses.replace(manager.spec, tasks={"a": "go", "b": "go", "c": "stop"})
    assert with_task_descriptions(spec, {"c": "halt"}).tasks == {"a": "go", "b": "go", "c": "halt"}
    with pytest.raises(UserError, match="the same task description for a and b"):
        with_task_descriptions(spec, {"b": "run"})
    with pytest.raises(UserError, match=r"no task 'd' is played \(env.tasks: a, b, c\)"):
        with_task_descriptions(spec, {"d": "run"})
