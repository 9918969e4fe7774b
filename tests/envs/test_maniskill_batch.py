"""ManiSkill as one batch.

PhysX on the CPU has one scene per environment, so several are put side by side here: that runs everything but the GPU
itself, which the tests marked `gpu` need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from embodyrl.registry import SIMULATORS

if missing := [requirement.module for requirement in SIMULATORS.entry("maniskill").missing()]:
    pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)

from embodyrl.envs.base import EpisodeOverError, NotFiniteError, RenderError, SimulatorError
from embodyrl.envs.maniskill import loading
from embodyrl.envs.maniskill.batch import ManiSkillBatch, ManiSkillScenes, Outcome
from embodyrl.envs.maniskill.simulator import ManiSkill, open_simulator
from embodyrl.envs.options import ManiSkillConfig, Proprio, Sim
from embodyrl.envs.states import StateError, unpack
from embodyrl.envs.types import EpisodeSpec
from embodyrl.errors import UserError

TASK = "PickCube-v1"
CLOSE = 0.02
"""What a restored episode may differ by [m, rad, ...]: PhysX forgets what it remembered of contacts."""


class SideBySide:
    """Environments of one scene each, stepped together. See `Scenes`."""

    def __init__(self, task: str, config: ManiSkillConfig, count: int) -> None:
        self.scenes = [ManiSkillScenes(task, config, 1) for _ in range(count)]
        self.count = count
        first = self.scenes[0]
        self.fields, self.task_description = first.fields, first.task_description
        self.control_frequency = first.control_frequency

    def start(self, scene: int, episode: EpisodeSpec) -> None:
        self.scenes[scene].start(0, episode)

    def step(self, actions: NDArray[np.float32]) -> Outcome:
        outcomes = [scene.step(actions[i : i + 1]) for i, scene in enumerate(self.scenes)]
        *columns, says_success = zip(*outcomes, strict=True)
        return Outcome(*map(np.concatenate, columns), says_success=all(says_success))

    def proprio(self) -> NDArray[np.float32]:
        return np.concatenate([scene.proprio() for scene in self.scenes])

    def images(self) -> NDArray[np.uint8]:
        return np.concatenate([scene.images() for scene in self.scenes])

    def snapshot(self) -> dict[str, NDArray[np.float32]]:
        rows = [scene.snapshot() for scene in self.scenes]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def restore(self, scenes: Sequence[int], rows: Mapping[str, NDArray[np.float32]]) -> None:
        for row, scene in enumerate(scenes):
            self.scenes[scene].restore([0], {name: values[row : row + 1] for name, values in rows.items()})

    def render(self) -> NDArray[np.uint8]:
        return np.concatenate([scene.render() for scene in self.scenes])  # type: ignore[arg-type]

    def close(self) -> None:
        for scene in self.scenes:
            scene.close()


def config(**options: Any) -> ManiSkillConfig:
    return ManiSkillConfig(name="maniskill", **{"tasks": [TASK], "max_episode_steps": 12, **options})


def batch(count: int, **options: Any) -> ManiSkillBatch:
    return ManiSkillBatch(config(**options), count, SideBySide)


def episode(number: int, task: str = TASK) -> EpisodeSpec:
    return EpisodeSpec(task=task, start_state=100 + number, seed=7 * number, group=number)


def actions(number: int, steps: int = 12) -> NDArray[np.float32]:
    return np.random.default_rng(number).uniform(-1, 1, (1, steps, 8)).astype(np.float32)


def proprio(simulator: Any, slot: int) -> NDArray[np.float32]:
    seen = simulator.observe([slot]).proprio
    assert seen is not None
    return seen[0]


@pytest.fixture(scope="module")
def three() -> Iterator[ManiSkillBatch]:
    """Three slots; no test may depend on what was played before."""
    built = batch(3)
    yield built
    built.close()


def test_one_slot_plays_what_an_environment_of_its_own_plays_bit_for_bit() -> None:
    ours, theirs = ManiSkillBatch(config(), 1), ManiSkill(config(), 1)
    assert ours.spec == theirs.spec
    for number in (0, 1):
        first, other = (simulator.reset([0], [episode(number)]) for simulator in (ours, theirs))
        assert first.task_descriptions == other.task_descriptions and np.array_equal(first.proprio, other.proprio)  # type: ignore[arg-type]
        for chunk in np.split(actions(number), 3, axis=1):
            mine, its = (simulator.step_chunk([0], chunk) for simulator in (ours, theirs))
            for name in ("rewards", "success", "terminated", "truncated", "steps"):
                assert np.array_equal(getattr(mine, name), getattr(its, name)), name
            assert np.array_equal(mine.observation.proprio, its.observation.proprio)  # type: ignore[arg-type]
        assert mine.truncated[0]


def test_slots_play_the_same_alone_and_together(three: ManiSkillBatch) -> None:
    alone = []
    for number in range(3):
        three.reset([0], [episode(number)])
        alone.append(three.step_chunk([0], actions(number)))
    three.reset([2, 0, 1], [episode(number) for number in range(3)])
    together = three.step_chunk([2, 0, 1], np.concatenate([actions(number) for number in range(3)]))
    for number, result in enumerate(alone):
        assert np.array_equal(together.rewards[number], result.rewards[0])
        assert result.observation.proprio is not None and together.observation.proprio is not None
        assert np.array_equal(together.observation.proprio[number], result.observation.proprio[0])


def test_a_slot_that_is_not_asked_stays_where_it_is(three: ManiSkillBatch) -> None:
    three.reset([0, 1, 2], [episode(number) for number in range(3)])
    three.step_chunk([0, 1, 2], np.concatenate([actions(number, 4) for number in range(3)]))
    before, frozen = proprio(three, 1), three._scenes.snapshot()
    three.step_chunk([2, 0], np.concatenate([actions(8, 5), actions(9, 5)]))
    assert np.array_equal(proprio(three, 1), before)
    after = three._scenes.snapshot()
    assert all(np.allclose(after[name][1], frozen[name][1], atol=1e-6) for name in frozen)
    assert any(np.abs(after[name][0] - frozen[name][0]).max() > 0.01 for name in frozen)
    rest = three.step_chunk([1], actions(1)[:, 4:])
    three.reset([0], [episode(1)])
    whole = three.step_chunk([0], actions(1))
    assert rest.steps[0] == 8 and rest.truncated[0]
    assert np.allclose(rest.rewards[0], whole.rewards[0, 4:], atol=CLOSE)


def test_a_slot_stops_at_its_own_end_inside_a_chunk(three: ManiSkillBatch) -> None:
    three.reset([0], [episode(0)])
    three.step_chunk([0], actions(0)[:, :10])
    three.reset([1, 2], [episode(1), episode(2)])
    ends = np.concatenate([actions(0)[:, 10:], actions(5, 4)], axis=1)
    result = three.step_chunk([1, 0, 2], np.concatenate([actions(1, 6), ends, actions(2, 6)]))
    assert result.steps.tolist() == [6, 2, 6] and result.truncated.tolist() == [False, True, False]
    assert not result.rewards[1, 2:].any() and result.rewards[1, :2].all()
    with pytest.raises(EpisodeOverError, match="slot 0 was stepped but its episode is over"):
        three.step_chunk([0], actions(0, 1))
    three.reset([0], [episode(0)])
    whole = three.step_chunk([0], actions(0))
    assert whole.observation.proprio is not None and result.observation.proprio is not None
    assert np.array_equal(result.observation.proprio[1], whole.observation.proprio[0])
    three.reset([0], [episode(2)])
    assert np.array_equal(three.step_chunk([0], actions(2, 6)).rewards[0], result.rewards[2])


def test_states_go_on_in_any_slot_and_twice_the_same(three: ManiSkillBatch) -> None:
    three.reset([0, 1], [episode(3), episode(4)])
    three.step_chunk([0, 1], np.concatenate([actions(3, 5), actions(4, 5)]))
    states = three.get_state([1, 0])
    assert all(isinstance(state, bytes) for state in states)
    before = proprio(three, 0)
    whole = three.step_chunk([0], actions(3)[:, 5:])
    restored = []
    for slot in (2, 0):
        three.reset([slot], [episode(6)])
        three.set_state([slot], [states[1]])
        assert np.array_equal(proprio(three, slot), before)
        (header, arrays), (wanted, rows) = unpack(three.get_state([slot])[0]), unpack(states[1])
        assert header == wanted and all(np.allclose(arrays[name], rows[name], atol=1e-6) for name in rows)
        restored.append(three.step_chunk([slot], actions(3)[:, 5:]))
    assert np.array_equal(restored[0].rewards, restored[1].rewards)
    assert np.allclose(restored[0].rewards, whole.rewards, atol=CLOSE)
    assert restored[0].truncated[0] and restored[0].steps[0] == 7


def test_a_restored_episode_has_its_goal(three: ManiSkillBatch) -> None:
    three.reset([0], [episode(3)])
    goal = proprio(three, 0)[-13:]
    (state,) = three.get_state([0])
    three.reset([1], [episode(9)])
    three.set_state([1], [state])
    stepped = three.step_chunk([1], np.zeros((1, 1, 8), np.float32)).observation.proprio
    three.reset([0], [episode(3)])
    expected = three.step_chunk([0], np.zeros((1, 1, 8), np.float32)).observation.proprio
    assert stepped is not None and expected is not None and len(goal) == 13
    assert np.allclose(stepped, expected, atol=CLOSE)


def test_a_state_of_an_ended_episode_stays_ended(three: ManiSkillBatch) -> None:
    three.reset([0], [episode(0)])
    last = three.step_chunk([0], actions(0)).observation
    states = three.get_state([0])
    three.set_state([1], states)
    assert last.proprio is not None and np.array_equal(proprio(three, 1), last.proprio[0])
    with pytest.raises(EpisodeOverError):
        three.step_chunk([1], actions(0, 1))


@pytest.mark.parametrize("control_mode", ["pd_joint_target_delta_pos", "pd_ee_target_delta_pose"])
def test_targets_of_a_controller_are_part_of_the_state(control_mode: str) -> None:
    ours = batch(2, control_mode=control_mode)
    dims = ours.spec.action_dim
    plan = np.random.default_rng(0).uniform(-1, 1, (1, 8, dims)).astype(np.float32)
    ours.reset([0], [episode(0)])
    ours.step_chunk([0], plan[:, :4])
    assert any("target" in name for name in ours._scenes.snapshot())
    states = ours.get_state([0])
    whole = ours.step_chunk([0], plan[:, 4:])
    ours.set_state([1], states)
    rest = ours.step_chunk([1], plan[:, 4:])
    assert np.allclose(rest.observation.proprio, whole.observation.proprio, atol=CLOSE)  # type: ignore[arg-type]


def test_an_episode_ends_at_success_where_that_is_wanted() -> None:
    task = "PushCube-v1"
    ours = ManiSkillBatch(config(tasks=[task], end_at_success=True), 2, SideBySide)
    ours.reset([0, 1], [episode(0, task), episode(1, task)])
    env = ours._scenes.scenes[1]._env  # type: ignore[attr-defined]
    env.obj.set_pose(env.goal_region.pose)
    result = ours.step_chunk([0, 1], np.zeros((2, 4, 8), np.float32))
    assert result.terminated.tolist() == [False, True] and result.steps.tolist() == [4, 1]
    assert result.success[1].tolist() == [True, False, False, False]


def test_a_result_that_is_not_finite_is_refused_with_slot_and_step(three: ManiSkillBatch) -> None:
    three.reset([0, 1], [episode(0), episode(1)])
    step = three._scenes.step

    def broken(plan: NDArray[np.float32]) -> Outcome:
        outcome = step(plan)
        outcome.rewards[1] = np.nan
        return outcome

    three._scenes.step = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(NotFiniteError, match=r"slot 1, step 1 .*PickCube-v1.*reward nan"):
            three.step_chunk([0, 1], np.zeros((2, 3, 8), np.float32))
    finally:
        three._scenes.step = step  # type: ignore[method-assign]


Wrong = Callable[[ManiSkillBatch], object]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda s: s.reset([], []), SimulatorError, "no slots"),
        (lambda s: s.reset([3], [episode(0)]), SimulatorError, "numbers from 0 to 2"),
        (lambda s: s.reset([0, 0], [episode(0)] * 2), SimulatorError, "each slot once"),
        (lambda s: s.reset([0, 1], [episode(0)]), SimulatorError, "2 slots and 1 episodes"),
        (lambda s: s.reset([0], [episode(0, "PushCube-v1")]), UserError, "no task 'PushCube-v1'"),
        (lambda s: s.step_chunk([0], np.zeros((1, 1, 7), np.float32)), ValueError, "shape"),
        (lambda s: s.set_state([0], [b"nonsense"]), StateError, "not saved by this kind"),
        (lambda s: s.set_state([0, 1], s.get_state([0])), SimulatorError, "2 slots and 1 states"),
    ],
)
def test_mistakes(three: ManiSkillBatch, wrong: Wrong, error: type[Exception], message: str) -> None:
    three.reset([0], [episode(0)])
    with pytest.raises(error, match=message):
        wrong(three)


def test_a_fresh_slot_and_a_closed_simulator_say_so() -> None:
    ours = batch(1)
    for call in (ours.observe, ours.get_state, ours.render):
        with pytest.raises(EpisodeOverError, match="slot 0 has no episode yet"):
            call([0])
    ours.close()
    ours.close()
    with pytest.raises(SimulatorError, match="closed"):
        ours.reset([0], [episode(0)])


def test_several_tasks_are_refused() -> None:
    with pytest.raises(UserError, match="all slots play one task"):
        batch(1, tasks=["PickCube-v1", "PushCube-v1"])


def test_images_are_those_of_the_slots() -> None:
    if loading.rendering_device() is None:
        pytest.skip("no Vulkan driver that SAPIEN can draw with")
    options = {"cameras": ["base_camera"], "image_size": [32, 48], "proprio": Proprio.robot}
    ours, theirs = batch(2, **options), ManiSkill(config(**options), 1)
    assert ours.spec == theirs.spec
    seen = ours.reset([0, 1], [episode(0), episode(1)])
    later = ours.step_chunk([1], actions(1, 3)).observation
    assert seen.images is not None and later.images is not None and seen.images.shape == (2, 1, 32, 48, 3)
    for number in (0, 1):
        expected = theirs.reset([0], [episode(number)])
        assert np.array_equal(seen.images[number], expected.images[0])  # type: ignore[index]
    after = theirs.step_chunk([0], actions(1, 3)).observation
    assert np.array_equal(later.images, after.images)  # type: ignore[arg-type]
    still = ours.observe([0, 1])
    assert np.array_equal(still.images[0], seen.images[0])  # type: ignore[index]
    assert ours.render([1]).shape == (1, 512, 512, 3)


def test_without_a_driver_people_are_told() -> None:
    if loading.rendering_device() is not None:
        pytest.skip("this machine draws")
    ours = batch(1)
    ours.reset([0], [episode(0)])
    with pytest.raises(RenderError, match="install a Vulkan driver"):
        ours.render([0])


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=r"env\.sim is 'gpu', but this process finds no CUDA device"):
        open_simulator(config(sim=Sim.gpu), 2)


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Any]:
    """Four slots on a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    built = open_simulator(config(sim=Sim.gpu), 4)
    yield built
    built.close()


@pytest.mark.gpu
def test_gpu_start_states_decide_the_start_in_any_slot(on_gpu: Any) -> None:
    first = on_gpu.reset([0, 1, 2, 3], [episode(0), episode(1), episode(0), episode(2)]).proprio
    assert np.array_equal(first[0], first[2])
    assert len({row.tobytes() for row in first}) == 3
    again = on_gpu.reset([3, 1], [episode(1), episode(0)]).proprio
    assert np.array_equal(again, first[[1, 0]])
    assert np.array_equal(on_gpu.observe([0, 2]).proprio, first[[0, 2]])


@pytest.mark.gpu
def test_gpu_slots_stop_at_their_own_end_and_others_stay(on_gpu: Any) -> None:
    on_gpu.reset([0, 1, 2, 3], [episode(number) for number in range(4)])
    plans = np.concatenate([actions(number) for number in range(4)])
    on_gpu.step_chunk([0], plans[:1, :10])
    start = on_gpu.observe([3]).proprio
    result = on_gpu.step_chunk([0, 1], np.concatenate([plans[:1, -6:], plans[1:2, :6]]))
    assert result.steps.tolist() == [2, 6] and result.truncated.tolist() == [True, False]
    assert np.array_equal(on_gpu.observe([3]).proprio, start)
    late = on_gpu.step_chunk([3], plans[3:4])
    on_gpu.reset([0], [episode(3)])
    assert np.allclose(on_gpu.step_chunk([0], plans[3:4]).rewards, late.rewards, atol=CLOSE)


@pytest.mark.gpu
def test_gpu_states_go_on_in_any_slot(on_gpu: Any) -> None:
    on_gpu.reset([0, 1], [episode(3), episode(4)])
    on_gpu.step_chunk([0, 1], np.concatenate([actions(3, 5), actions(4, 5)]))
    states = on_gpu.get_state([0, 1])
    whole = on_gpu.step_chunk([0], actions(3)[:, 5:])
    on_gpu.set_state([3, 2], states)
    rest = on_gpu.step_chunk([3], actions(3)[:, 5:])
    assert np.allclose(rest.rewards, whole.rewards, atol=CLOSE)


@pytest.mark.gpu
def test_gpu_images() -> None:
    if not torch.cuda.is_available() or loading.rendering_device() is None:
        pytest.skip("no NVIDIA GPU, or none that draws")
    options = {"cameras": ["base_camera"], "image_size": [64, 64], "sim": Sim.gpu}
    ours = open_simulator(config(**options), 4)
    seen = ours.reset([0, 1, 2, 3], [episode(0), episode(1), episode(0), episode(2)]).images
    assert seen is not None and seen.shape == (4, 1, 64, 64, 3) and seen.std() > 10
    assert np.array_equal(seen[0], seen[2]) and not np.array_equal(seen[0], seen[1])
    ours.close()
