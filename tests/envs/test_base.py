"""The base class of simulators made of single environments: what it refuses, and what it says then."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embodyrl.envs.base import (
    ActionError,
    EpisodeOverError,
    NotFiniteError,
    RenderError,
    RestoreMismatchWarning,
    SimulatorError,
    Slot,
    SlotSimulator,
    StateError,
    Transition,
)
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.errors import UnknownNameError, UserError


class Counter(Slot):
    """A world that counts: the observation is (start state, sum of all first action entries)."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.start = 0
        self.sum = 0.0
        self.steps = 0
        self.closed = 0
        self.resets = 0

    def reset(self, episode: EpisodeSpec) -> None:
        self.start, self.sum, self.steps = episode.start_state, 0.0, 0
        self.resets += 1

    def step(self, action: NDArray[np.float32]) -> Transition:
        self.steps += 1
        self.sum += float(action[0])
        reward = math.nan if self.task == "nan" and self.steps == 3 else float(action[0])
        if self.task == "crash":
            raise KeyError("wheel fell off")
        second = self.steps == 2
        return Transition(reward, self.task == "ends" and second, False, self.task == "cut" and second)

    def observe(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32] | None]:
        if self.task == "wide":
            return None, np.zeros(3, np.float32)
        if self.task == "blind":
            return None, None
        value = math.inf if self.task == "inf" and self.steps else self.sum
        return None, np.array([self.start, value], np.float32)

    def snapshot(self) -> dict[str, NDArray[Any]] | None:
        if self.task != "exact":
            return None
        return {"start": np.array([self.start]), "counts": np.array([[self.sum, self.steps]])}

    def restore(self, episode: EpisodeSpec, snapshot: Mapping[str, NDArray[Any]]) -> None:
        (self.start,) = snapshot["start"].tolist()
        ((self.sum, self.steps),) = snapshot["counts"].tolist()

    def close(self) -> None:
        self.closed += 1


class Counters(SlotSimulator):
    """Counters, and a list of all that were built."""

    def __init__(
        self, *tasks: str, num_slots: int = 2, max_episode_steps: int = 5, most_spare: int | None = None
    ) -> None:
        self.built: list[Counter] = []
        field = ActionField(name="push", meaning="force", unit="N", low=(-1.0, -2.0), high=(1.0, 2.0))
        super().__init__(
            SimulatorSpec(
                tasks={task: f"do {task}" for task in tasks},
                actions=(field,),
                proprio_dim=2,
                max_episode_steps=max_episode_steps,
                control_frequency=10.0,
            ),
            num_slots,
            most_spare=most_spare,
        )

    def make_slot(self, task: str) -> Slot:
        self.built.append(Counter(task))
        return self.built[-1]


def spec(task: str = "count", start_state: int = 3, **changes: Any) -> EpisodeSpec:
    """An episode."""
    return EpisodeSpec(**{"task": task, "start_state": start_state, "seed": 1, **changes})


def plan(steps: int = 1, slots: int = 1, value: float = 1.0) -> NDArray[np.float32]:
    """Actions `[slots, steps, 2]`, all `value`."""
    return np.full((slots, steps, 2), value, np.float32)


def running(task: str = "count", **options: Any) -> Counters:
    """A simulator whose slot 1 plays `task`."""
    simulator = Counters(task, **options)
    simulator.reset([1], [spec(task)])
    return simulator


def test_the_environments_that_were_played_last_are_kept() -> None:
    simulator = Counters("a", "b", "c", num_slots=1, most_spare=1)

    def play(task: str) -> list[str]:
        simulator.reset([0], [spec(task)])
        return [each.task for each in simulator.built if each.closed]

    assert play("a") == play("b") == []
    assert play("c") == ["a"]
    assert play("b") == ["a"] and len(simulator.built) == 3, "it was kept"
    assert play("a") == ["a", "c"] and len(simulator.built) == 4
    simulator.close()
    assert all(each.closed == 1 for each in simulator.built)


def test_nan_reward_is_refused_with_slot_and_step() -> None:
    simulator = running("nan")
    with pytest.raises(NotFiniteError, match=r"slot 1, step 3 \(task 'nan', start state 3, seed 1\): reward is nan"):
        simulator.step_chunk([1], plan(5))
    with pytest.raises(EpisodeOverError):  # and the slot does not go on as if nothing had happened
        simulator.step_chunk([1], plan())


def test_infinite_observation_is_refused_with_slot_step_and_entry() -> None:
    simulator = running("inf")
    with pytest.raises(NotFiniteError, match=r"slot 1, step 2 .*: proprio\[1\] is inf, want a finite number"):
        simulator.step_chunk([1], plan(2))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros((1, 1, 2)), "actions are float64, want float32 numpy"),
        ([[[0.0, 0.0]]], "actions are list, want float32 numpy"),
        (np.zeros((1, 2), np.float32), r"shape \(1, 2\), want \[slots, chunk, action dims\] = \(1, 'C', 2\)"),
        (np.zeros((1, 0, 2), np.float32), r"shape \(1, 0, 2\), want .* = \(1, 1, 2\)"),
        (np.zeros((2, 1, 2), np.float32), r"shape \(2, 1, 2\), want .* = \(1, 1, 2\)"),
        (np.zeros((1, 4, 7), np.float32), r"shape \(1, 4, 7\), want .* = \(1, 4, 2\)"),
        (np.array([[[0, math.nan]]], np.float32), r"actions\[0, 0, 1\] is nan: want finite numbers"),
    ],
)
def test_wrong_actions_are_refused_with_what_was_found_and_wanted(actions: Any, message: str) -> None:
    simulator = running()
    with pytest.raises(ActionError, match=message):
        simulator.step_chunk([1], actions)
    assert simulator.step_chunk([1], plan()).steps[0] == 1  # nothing was executed


def test_bounds_of_actions_that_are_none_are_refused() -> None:
    refused = {
        "number 1 goes from -inf to 1": ((-1.0, -math.inf), (1.0, 1.0)),
        "number 0 goes from nan to 1": ((math.nan,), (1.0,)),
        "number 0 goes from -1 to 3e+38": ((-1.0,), (3e38,)),
        "number 0 goes from 1 to 0": ((1.0,), (0.0,)),
        "want as many numbers in both": ((0.0,), (1.0, 1.0)),
        "choices are whole numbers": ((0.0,), (1.5,)),
    }
    for message, (low, high) in refused.items():
        with pytest.raises(UserError, match=re.escape(message)):
            ActionField(name="push", meaning="discrete", unit="1", low=low, high=high)


def test_actions_beyond_the_bounds_are_clipped() -> None:
    assert running().step_chunk([1], plan(1, value=50.0)).rewards[0, 0] == 1.0


@pytest.mark.parametrize(
    ("slots", "message"),
    [([], "no slots"), ([2], "want numbers from 0 to 1"), ([-1], "from 0 to 1"), ([1, 1], "each slot once")],
)
def test_wrong_slots_are_refused(slots: list[int], message: str) -> None:
    with pytest.raises(SimulatorError, match=message):
        running().reset(slots, [spec()] * len(slots))


def test_one_episode_per_slot() -> None:
    with pytest.raises(SimulatorError, match="2 slots and 1 episodes"):
        running().reset([0, 1], [spec()])


@pytest.mark.parametrize("use", ["step_chunk", "observe", "get_state", "render"])
def test_a_slot_that_was_never_reset_says_so(use: str) -> None:
    simulator = running()
    arguments = [[0], plan()] if use == "step_chunk" else [[0]]
    with pytest.raises(EpisodeOverError, match=r"slot 0 .*no episode yet.*reset it first"):
        getattr(simulator, use)(*arguments)


def test_an_exception_names_the_slot_and_leaves_it_ended() -> None:
    simulator = running("crash")
    with pytest.raises(KeyError) as caught:
        simulator.step_chunk([1], plan())
    assert caught.value.__notes__ == ["after slot 1, step 0 (task 'crash', start state 3, seed 1)"]
    with pytest.raises(EpisodeOverError):
        simulator.step_chunk([1], plan())


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("wide", r"slots \[1\]: Counter\.observe\(\) returned proprio float32 \(3,\), want float32 \(2,\)"),
        ("blind", r"Counter\.observe\(\) returned proprio None, want float32 \(2,\)"),
    ],
)
def test_an_observation_that_is_not_the_declared_one_is_refused(task: str, message: str) -> None:
    with pytest.raises(SimulatorError, match=message):
        running(task)


@pytest.mark.parametrize(
    ("task", "steps", "terminated", "truncated"),
    [("count", 5, False, True), ("ends", 2, True, False), ("cut", 2, False, True)],
)
def test_how_an_episode_ends(task: str, steps: int, terminated: bool, truncated: bool) -> None:
    result = running(task).step_chunk([1], plan(9))
    assert (result.steps[0], result.terminated[0], result.truncated[0]) == (steps, terminated, truncated)
    assert result.rewards[0].tolist() == [1.0] * steps + [0.0] * (9 - steps)


def test_termination_at_the_time_limit_is_termination() -> None:
    result = running("ends", max_episode_steps=2).step_chunk([1], plan(2))
    assert result.terminated[0] and not result.truncated[0]


def test_environments_are_built_at_once_for_one_task_and_shared_between_slots_for_several() -> None:
    assert len(Counters("count").built) == 2
    simulator = Counters("count", "ends")
    assert simulator.built == []
    simulator.reset([0, 1], [spec("count"), spec("ends")])
    simulator.reset([0], [spec("ends")])
    simulator.reset([1], [spec("count")])  # takes over the environment that slot 0 left
    assert [slot.task for slot in simulator.built] == ["count", "ends", "ends"]
    assert simulator.observe([0, 1]).task_descriptions == ["do ends", "do count"]
    simulator.close()
    simulator.close()
    assert [slot.closed for slot in simulator.built] == [1, 1, 1]


def test_unknown_task_names_the_near_one_and_all() -> None:
    with pytest.raises(UnknownNameError, match=r"has no task 'coumt' - did you mean 'count'\? \(tasks: count\)"):
        running().reset([0], [spec("coumt")])


def test_state_is_a_header_and_raw_actions() -> None:
    simulator = running()
    simulator.step_chunk([1], plan(2, value=0.5))
    (state,) = simulator.get_state([1])
    assert b'"task": "count"' in state and state.endswith(np.full((2, 2), 0.5, "<f4").tobytes())
    simulator.set_state([0], [state])
    assert simulator.observe([0]).proprio == pytest.approx(np.array([[3.0, 1.0]]))
    assert simulator.step_chunk([0], plan(9)).steps[0] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: b"", "was not saved by this kind of simulator"),
        (lambda state: b"\x80\x04" + state, "was not saved by this kind of simulator"),
        (lambda state: state[:-1], "is damaged: [0-9]+ bytes, want"),
        (lambda state: state + b"x", "is damaged"),
        (lambda state: state.replace(b'{"', b"{,"), "header cannot be read"),
        (lambda state: state.replace(b'"arrays"', b'"array5"'), "header cannot be read"),
        (lambda state: state.replace(b'"<f4"', b'"O__"'), "header cannot be read"),
        (lambda state: state.replace(b'"version": 2', b'"version": 9'), "has version 9, want 2"),
        (lambda state: state.replace(b"Counters", b"MuJoCo22"), "is one of MuJoCo22, this simulator is Counters"),
        (lambda state: state.replace(b'"action_dim": 2', b'"action_dim": 7'), "7 action dims"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    simulator = running()
    simulator.step_chunk([1], plan(2))
    (state,) = simulator.get_state([1])
    with pytest.raises(StateError, match=message):
        simulator.set_state([0], [change(state)])


def test_a_snapshot_is_restored_without_playing_the_episode_again() -> None:
    simulator = running("exact")
    simulator.step_chunk([1], plan(2, value=0.5))
    (state,) = simulator.get_state([1])
    assert b'["counts", "<f8", [1, 2]]' in state and state.endswith(np.array([1.0, 2.0], "<f8").tobytes())
    elsewhere = Counters("exact")
    elsewhere.set_state([0], [state])
    assert [counter.resets for counter in elsewhere.built] == [0, 0]
    assert elsewhere.observe([0]).proprio == pytest.approx(np.array([[3.0, 1.0]]))
    assert elsewhere.get_state([0]) == [state]
    assert elsewhere.step_chunk([0], plan(9)).steps[0] == 3


def test_a_snapshot_of_an_ended_episode_stays_ended() -> None:
    simulator = running("exact")
    simulator.step_chunk([1], plan(5))
    simulator.set_state([0], simulator.get_state([1]))
    with pytest.raises(EpisodeOverError, match="slot 0 was stepped but its episode is over"):
        simulator.step_chunk([0], plan())


def test_a_snapshot_that_does_not_fit_is_refused() -> None:
    simulator = running("exact")
    (state,) = simulator.get_state([1])
    with pytest.raises(StateError, match="does not fit this environment of 'exact': 'counts'"):
        simulator.set_state([0], [state.replace(b'["counts"', b'["counta"')])
    with pytest.raises(EpisodeOverError):
        simulator.step_chunk([0], plan())


def test_a_restored_episode_that_differs_is_reported() -> None:
    simulator = running()
    simulator.step_chunk([1], plan(2))
    (state,) = simulator.get_state([1])
    elsewhere = Counters("count")
    elsewhere.built[-1].reset = lambda episode: None  # type: ignore[method-assign]  # a simulator that forgets
    with pytest.warns(RestoreMismatchWarning, match="not bit for bit the one that was saved"):
        assert elsewhere.set_state([0], [state]) == [0]


def test_without_images_rendering_says_so() -> None:
    with pytest.raises(RenderError, match="Counter renders no images"):
        running().render([1])
