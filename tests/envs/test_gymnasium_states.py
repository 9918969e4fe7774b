"""Saved slots of Gymnasium environments on MuJoCo: a snapshot of scene and Python objects goes on bit for bit."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from slow import only_slow

pytest.importorskip("mujoco", reason="mujoco not installed")

from embodyrl.envs.gymnasium import attributes
from embodyrl.envs.gymnasium.simulator import Gymnasium, known_tasks
from embodyrl.envs.mujoco import physics
from embodyrl.envs.options import GymnasiumConfig
from embodyrl.envs.states import StateError, pack, unpack
from embodyrl.envs.types import EpisodeSpec
from embodyrl.registry import SIMULATORS

HARD = {
    "mujoco": ["Humanoid-v5", "Pusher-v5"],
    "robotics": ["HandManipulateBlock_ContinuousTouchSensors-v1", "AdroitHandHammer-v1", "AntMaze_UMaze-v5"],
    "aloha": ["gym_aloha/AlohaInsertion-v0"],
    "hil": ["gym_hil/PandaArrangeBoxes-v0"],
    "dm_control": ["manipulator-bring_peg", "dog-fetch"],
    "robosuite": ["TwoArmHandover"],
}
"""Tasks that read much between two steps; with EMBODYRL_ALL_TASKS=1 all tasks of all families are tried."""
DEAR = ("hil", "robosuite")
"""Families whose steps take long; the contract suite plays them too."""
DONE, REST = 30, 15
"""Control steps before an episode is saved, and how many of those after it are compared."""


def simulator(name: str, *tasks: str, num_slots: int = 2) -> Gymnasium:
    """A simulator of `tasks`, or a skipped test."""
    if SIMULATORS.entry(name).missing():
        pytest.skip(f"{name} not installed")
    return Gymnasium(GymnasiumConfig(name=name, tasks=list(tasks), max_episode_steps=DONE + REST), num_slots)


def start(ours: Gymnasium, slot: int, task: str, number: int, steps: int) -> NDArray[np.float32]:
    """Play `steps` of an episode; returns the actions of the rest, `[15, D]`: random around a random direction."""
    low, high = ours.spec.action_low, ours.spec.action_high
    generator = np.random.default_rng(number)
    drawn = generator.uniform(-1, 1, len(low)) + 0.6 * generator.uniform(-1, 1, (steps + REST, len(low)))
    drawn = drawn.clip(-1, 1)
    plan = ((high + low) / 2 + (high - low) / 2 * drawn).astype(np.float32)
    ours.reset([slot], [EpisodeSpec(task=task, start_state=number, seed=number)])
    if steps:
        ours.step_chunk([slot], plan[None, :steps])
    return plan[steps:]


def go_on(ours: Gymnasium, slot: int, plan: NDArray[np.float32]) -> bytes:
    """Everything that comes out of a slot from now on, step by step."""
    parts = [ours.observe([slot]).proprio]
    for action in plan:
        result = ours.step_chunk([slot], action[None, None])
        parts += [result.rewards, result.success, result.terminated, result.observation.proprio]
        if result.terminated[0] or result.truncated[0]:
            break
    return b"".join(part.tobytes() for part in parts if part is not None)


def tasks_to_try() -> list[Any]:
    """Family and task of each case."""
    if not os.environ.get("EMBODYRL_ALL_TASKS"):
        cases = [(name, task) for name, tasks in HARD.items() for task in tasks]
        return [
            pytest.param(*case, marks=pytest.mark.by_hand(reason="takes long to load")) if case[0] in DEAR else case
            for case in cases
        ]
    here = [name for name in HARD if not SIMULATORS.entry(name).missing()]
    return [only_slow((name, task)) for name in here for task in known_tasks(name)]


@pytest.mark.parametrize(("name", "task"), tasks_to_try())
def test_an_episode_goes_on_bit_for_bit_from_a_snapshot(name: str, task: str) -> None:
    ours = simulator(name, task)
    for steps in (DONE, 0):
        plan = start(ours, 0, task, 3, steps)
        if not steps or ours._seats[0].over:  # some fall over
            plan = start(ours, 0, task, 3, steps := 0)
        (state,) = ours.get_state([0])
        assert unpack(state)[0]["saved_by"] == "snapshot"
        rest = go_on(ours, 0, plan)
        for slot in (1, 0):  # first where nothing was played
            ours.set_state([slot], [state])
            assert ours.get_state([slot]) == [state]
            assert go_on(ours, slot, plan) == rest
            start(ours, slot, task, 4, 2)
    ours.close()


def test_restoring_simulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import mujoco

    ours = simulator("mujoco", "HalfCheetah-v5")
    start(ours, 0, "HalfCheetah-v5", 3, DONE)
    (state,) = ours.get_state([0])

    def step(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr(mujoco, "mj_step", step)
    assert ours.set_state([1], [state]) == []


def test_states_that_were_saved_by_replay_still_load() -> None:
    ours, task = simulator("mujoco", "HalfCheetah-v5"), "HalfCheetah-v5"
    plan = start(ours, 0, task, 3, DONE)
    (state,) = ours.get_state([0])
    actions = ours._seats[0].actions[:DONE].copy()
    rest = go_on(ours, 0, plan)
    ours.set_state([1], [pack({**unpack(state)[0], "saved_by": "replay"}, {"actions": actions})])
    assert ours.get_state([1]) == [state] and go_on(ours, 1, plan) == rest


def test_an_environment_without_mujoco_is_replayed() -> None:
    config = GymnasiumConfig(name="gymnasium", tasks=["Pendulum-v1"], max_episode_steps=45)
    ours = Gymnasium(config, 1)
    start(ours, 0, "Pendulum-v1", 3, 2)
    assert unpack(ours.get_state([0])[0])[0]["saved_by"] == "replay"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scene.physics", None, "physics"),
        ("scene.data.xpos", lambda array: array[1:], r"data.xpos has shape \(7, 3\), want \(8, 3\)"),
        ("array./seen", None, "it lacks /seen"),
        ("plain", lambda array: array[1:], "does not fit this environment"),
        ("plain", lambda array: np.frombuffer(b'{"/other/x": 1}', np.uint8), "/other/x, which is not here|it lacks"),
        ("array./env/env/nothing", lambda array: np.zeros(1), "it has /env/env/nothing, which is not here"),
    ],
)
def test_a_snapshot_of_something_else_is_refused(name: str, change: Any, message: str) -> None:
    ours = simulator("mujoco", "HalfCheetah-v5")
    start(ours, 0, "HalfCheetah-v5", 3, 5)
    header, arrays = unpack(ours.get_state([0])[0])
    changed = {**arrays, name: change(arrays.get(name))} if change else {**arrays}
    if not change:
        del changed[name]
    with pytest.raises(StateError, match=message):
        ours.set_state([1], [pack(header, changed)])


class Thing:
    """An object with whatever attributes."""

    __module__ = "gymnasium.thing"

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def make_thing() -> Thing:
    """An object as a reset leaves it."""
    inner = Thing(draws=np.random.RandomState(1), goals={"a", "b"}, order=[], file="/tmp/one")
    return Thing(
        inner=inner,
        back=inner,
        steps=0,
        last=None,
        scale=np.float32(0.1),
        cache={"pose": np.zeros(3), "n": 1},
        buffer=deque([0.0, 0.0], maxlen=2),
        generator=np.random.default_rng(2),
        parts=[Thing(goal=np.ones(2, np.float32)), (np.arange(3), "text")],
    )


def play(thing: Any) -> None:
    """Change everything."""
    thing.inner.draws.normal(size=3)
    thing.inner.goals.discard("b")
    thing.inner.order.append("b")
    thing.inner.file = "/tmp/two"
    thing.steps, thing.last, thing.new = 7, np.array([np.nan, -0.0]), True
    thing.scale = np.float32(0.3)
    thing.cache["pose"][1] = 0.1
    thing.cache["more"] = 2.5
    del thing.cache["n"]
    thing.buffer.append(1 / 3)
    thing.generator.standard_normal(5)
    thing.parts[0].goal = np.array([0.1, 0.2], np.float32)


def test_what_objects_remember_comes_back_with_its_types() -> None:
    played, other = make_thing(), make_thing()
    play(played)
    saved = attributes.save({"env": played})
    attributes.restore({"env": other}, saved)
    again: Any = other
    assert again.inner.goals == {"a"} and again.inner.order == ["b"] and again.steps == 7 and again.new is True
    assert type(again.scale) is np.float32 and again.scale == np.float32(0.3)
    assert again.buffer == deque([0.0, 1 / 3]) and again.buffer.__class__ is deque
    assert sorted(again.cache) == ["more", "pose"] and again.back is again.inner
    assert again.inner.file == "/tmp/one", "the path of a file is this machine's"
    assert again.inner.draws.normal() == played.inner.draws.normal()  # type: ignore[attr-defined]
    assert again.generator.normal() == played.generator.normal()  # type: ignore[attr-defined]
    fresh, before = make_thing(), {name: array.tobytes() for name, array in saved.items()}
    attributes.restore({"env": fresh}, saved)
    assert {name: array.tobytes() for name, array in attributes.save({"env": fresh}).items()} == before


def test_an_attribute_that_an_episode_had_not_set_yet_is_removed() -> None:
    new, played = make_thing(), make_thing()
    saved = attributes.save({"env": new})
    play(played)
    attributes.restore({"env": played}, saved)
    assert not hasattr(played, "new") and sorted(played.cache) == ["n", "pose"]  # type: ignore[attr-defined]


def test_views_of_the_scene_are_left_to_the_scene() -> None:
    import mujoco

    data = mujoco.MjData(mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>"))
    assert physics.is_view(data.geom_xpos) and physics.is_view(data.geom_xpos[0, :2])
    assert not physics.is_view(data.geom_xpos.copy()[0]) and not physics.is_view(1.0)
    saved = attributes.save({"env": Thing(seen=data.geom_xpos[0], kept=data.geom_xpos[0].copy())})
    assert sorted(saved) == ["array./env/kept", "plain"]
