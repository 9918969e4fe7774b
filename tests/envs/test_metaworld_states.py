"""MetaWorld's saved slots: every task goes on from the middle of an episode, bit for bit, wherever it is restored."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray
from slow import only_slow, rest_slow

pytest.importorskip("metaworld", reason="metaworld not installed")

from embodyrl.envs.metaworld.simulator import TASKS, MetaWorld
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import NoOpenGLError
from embodyrl.envs.options import MetaWorldConfig, RenderQuality
from embodyrl.envs.states import StateError, pack, unpack
from embodyrl.envs.types import EpisodeSpec

DRAWN = sorted(TASKS) if os.environ.get("EMBODYRL_ALL_TASKS") else ["reach-v3", "door-lock-v3", "basketball-v3"]
DONE, REST = 25, 12
"""Control steps before an episode is saved, and how many of those after it are compared."""


def simulator(*tasks: str, num_slots: int = 2, images: bool = False, **options: Any) -> MetaWorld:
    """A simulator of `tasks`."""
    drawn = {"cameras": ["corner4"], "image_size": [48, 48], "render_quality": RenderQuality.fast} if images else {}
    config = MetaWorldConfig(name="metaworld", tasks=list(tasks), max_episode_steps=150, **drawn, **options)
    return MetaWorld(config, num_slots)


def episode(task: str, start_state: int) -> EpisodeSpec:
    """An episode."""
    return EpisodeSpec(task=task, start_state=start_state, seed=start_state)


def moves(task: str, steps: int = DONE + REST) -> NDArray[np.float32]:
    """Actions `[steps, 4]`: down to the table and then around, so that most tasks touch things."""
    generator = np.random.default_rng(sorted(TASKS).index(task))
    actions = np.clip(generator.uniform(-1, 1, 4) + 0.5 * generator.uniform(-1, 1, (steps, 4)), -1, 1)
    actions[: steps // 3, 1:3] = 0.6, -1.0
    return actions.astype(np.float32)


def go_on(ours: MetaWorld, slot: int, actions: NDArray[np.float32]) -> bytes:
    """Everything that comes out of a slot from now on, step by step."""
    seen = [ours.observe([slot])]
    numbers: list[float] = []
    for action in actions:
        result = ours.step_chunk([slot], action[None, None])
        seen.append(result.observation)
        numbers += [float(result.rewards[0, 0]), float(result.success[0, 0])]
    arrays = [array for each in seen for array in (each.images, each.proprio) if array is not None]
    return b"".join([np.array(numbers).tobytes(), *(array.tobytes() for array in arrays)])


def saved(ours: MetaWorld, task: str) -> tuple[bytes, bytes]:
    """The state of slot 0 in the middle of an episode, and how the episode goes on."""
    plan = moves(task)
    ours.reset([0], [episode(task, 3)])
    ours.step_chunk([0], plan[None, :DONE])
    (state,) = ours.get_state([0])
    return state, go_on(ours, 0, plan[DONE:])


def comes_back(ours: MetaWorld, task: str, state: bytes, rest: bytes, slot: int) -> bool:
    """Whether a slot goes on from `state` as the episode did, and can be saved again."""
    ours.set_state([slot], [state])
    return ours.get_state([slot]) == [state] and go_on(ours, slot, moves(task)[DONE:]) == rest


@pytest.fixture
def steps_simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Physics steps from now on, of which five are a control step."""
    counted = [0]
    real = mujoco.mj_step

    def step(model: Any, data: Any, nstep: int = 1) -> None:
        counted[0] += nstep
        real(model, data, nstep=nstep)

    monkeypatch.setattr(mujoco, "mj_step", step)
    yield counted


def check_in_this_process(task: str, *, images: bool) -> None:
    ours = simulator(task, images=images)
    state, rest = saved(ours, task)
    assert comes_back(ours, task, state, rest, slot=1), "in a slot that has played nothing"
    for slot in (0, 1):
        ours.reset([slot], [episode(task, 50 + slot)])
        ours.step_chunk([slot], moves(task)[None, 5:15])
        assert comes_back(ours, task, state, rest, slot), "where another episode was played"
    ours.reset([0], [episode(task, 4)])
    (fresh,) = ours.get_state([0])
    whole = go_on(ours, 0, moves(task)[:8])
    ours.set_state([1], [fresh])
    assert go_on(ours, 1, moves(task)[:8]) == whole, "an episode that has only begun"
    ours.close()


FEW = {"reach-v3", "door-lock-v3", "basketball-v3", "stick-pull-v3"}


@pytest.mark.parametrize("task", [task if task in FEW else only_slow(task) for task in sorted(TASKS)])
def test_every_task_goes_on_bit_for_bit_in_any_slot(task: str) -> None:
    check_in_this_process(task, images=False)


@pytest.mark.parametrize("task", rest_slow(DRAWN))
def test_images_come_back_too(task: str) -> None:
    try:
        rendering.context(16, 16).free()
    except NoOpenGLError as error:
        pytest.skip(str(error))
    check_in_this_process(task, images=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_task_goes_on_bit_for_bit_in_another_process(tmp_path: Path) -> None:
    expected = {}
    for task in sorted(TASKS):
        ours = simulator(task, num_slots=1)
        state, expected[task] = saved(ours, task)
        (tmp_path / task).write_bytes(state)
        ours.close()
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    code = f"import sys; sys.path += {folders!r}; import {Path(__file__).stem} as m; m.main()"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, stdin=subprocess.DEVNULL, timeout=300)
    different = [task for task, rest in expected.items() if (tmp_path / f"{task}.rest").read_bytes() != rest]
    assert not different


def main() -> None:
    """In a process of its own: go on with every task from the states in a folder, where nothing was played before."""
    folder = Path(sys.argv[1])
    for task in sorted(TASKS):
        ours = simulator(task, num_slots=1)
        ours.set_state([0], [(folder / task).read_bytes()])
        (folder / f"{task}.rest").write_bytes(go_on(ours, 0, moves(task)[DONE:]))
        ours.close()


@pytest.mark.parametrize("task", ["reach-v3", "box-close-v3", "bin-picking-v3", "door-lock-v3"])
def test_restoring_simulates_nothing_however_far_the_episode_was(task: str, steps_simulated: list[int]) -> None:
    ours = simulator(task)
    ours.reset([0], [episode(task, 3)])
    ours.step_chunk([0], moves(task, 100)[None])
    assert steps_simulated[0] >= 500
    (state,) = ours.get_state([0])
    steps_simulated[0] = 0
    ours.set_state([1], [state])
    assert steps_simulated[0] == 0
    assert go_on(ours, 1, moves(task)[:5]) == go_on(ours, 0, moves(task)[:5])


@pytest.mark.parametrize("task", ["reach-v3", "door-lock-v3", "pick-place-wall-v3"])
def test_states_that_were_saved_by_replay_still_load(task: str) -> None:
    ours = simulator(task)
    state, rest = saved(ours, task)
    header, _ = unpack(state)
    older = pack({**header, "saved_by": "replay"}, {"actions": moves(task)[:DONE]})
    ours.set_state([1], [older])
    assert ours.get_state([1]) == [state] and go_on(ours, 1, moves(task)[DONE:]) == rest


def test_an_episode_is_restored_where_another_task_was_played_and_a_repeated_action_counts_on() -> None:
    ours = simulator("push-v3", "bin-picking-v3", action_repeat=2)
    state, rest = saved(ours, "bin-picking-v3")
    ours.reset([1], [episode("push-v3", 9)])
    assert comes_back(ours, "bin-picking-v3", state, rest, slot=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("task.maxReachDist", "it lacks task.maxReachDist"),
        ("model.site_pos", "model.site_pos has shape"),
        ("observation", "observation"),
    ],
)
def test_a_snapshot_of_another_metaworld_is_refused(name: str, message: str) -> None:
    ours = simulator("reach-v3")
    header, arrays = unpack(saved(ours, "reach-v3")[0])
    changed = {**arrays, name: arrays[name][1:]} if name == "model.site_pos" else {**arrays}
    if name != "model.site_pos":
        del changed[name]
    with pytest.raises(StateError, match=message):
        ours.set_state([1], [pack(header, changed)])
