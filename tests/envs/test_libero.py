"""LIBERO: the same images and numbers as its own environment, its start states, and what is said when it lacks
something."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libero_files
import numpy as np
import pytest
from libero_files import needs_assets, needs_pro
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from embodyrl.config import ConfigError, load_config
from embodyrl.envs.base import RenderError
from embodyrl.envs.libero import pro
from embodyrl.envs.libero import tasks as libero_tasks
from embodyrl.envs.libero.tasks import official_state, read_states, start_states_file, task_description, task_file
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import NoOpenGLError
from embodyrl.envs.options import Driver, LiberoConfig, Proprio, RenderQuality
from embodyrl.envs.states import StateError
from embodyrl.envs.types import EpisodeSpec
from embodyrl.errors import UnknownNameError, UserError
from embodyrl.registry import SIMULATORS

if SIMULATORS.entry("libero").missing():
    pytest.skip("LIBERO not installed", allow_module_level=True)

from embodyrl.envs.libero.driver import REST
from embodyrl.envs.libero.simulator import Libero, LiberoSlot

STOVE = "libero_goal/7"
"""Turn on the stove: solved as soon as its knob is turned."""
SIZE = [40, 56]
OF_PRO = ["libero_goal_object/3", "libero_object_with_mug/2"]
COMPARED: list[Any] = [(STOVE, 3, 1.0), ("libero_spatial/4", 0, None)]
"""What is compared with LIBERO's own environment: task, start state, and the angle that the stove's knob starts at."""
if os.environ.get("EMBODYRL_ALL_TASKS"):
    OF_PRO = [task for task in libero_tasks.known_tasks() if pro.has(task.partition("/")[0])]
    tasks = [task for task in libero_tasks.known_tasks() if not task.startswith("libero_90") and task not in OF_PRO]
    COMPARED += [(task, 7 * index % 50, None) for index, task in enumerate(tasks)]
COMPARED += [pytest.param(task, 7 * index, None, marks=needs_pro) for index, task in enumerate(OF_PRO)]


def config(*tasks: str, **options: Any) -> LiberoConfig:
    """Options of LIBERO."""
    given = {"settle_steps": 0, **options}
    return LiberoConfig(name="libero", tasks=list(tasks or [STOVE]), **given)


def episode(number: int = 0, task: str = STOVE) -> EpisodeSpec:
    """An episode from official start state `number` of those for training."""
    return EpisodeSpec(task=task, start_state=number, seed=0)


def moves(number: int, steps: int) -> NDArray[np.float32]:
    """Actions `[steps, 7]`: mostly in one direction, so that the arm goes somewhere."""
    generator = np.random.default_rng(number)
    return np.clip(generator.uniform(-1, 1, 7) + 0.5 * generator.uniform(-1, 1, (steps, 7)), -1, 1).astype(np.float32)


@pytest.fixture(scope="module")
def stove() -> Iterator[Libero]:
    """One slot that plays the stove; shared, because everything but the options is put back by `reset`."""
    if libero_files.place() is None:
        pytest.skip("LIBERO's assets are not there")
    simulator = Libero(config(), 1)
    yield simulator
    simulator.close()


def slot_of(simulator: Libero) -> LiberoSlot:
    """The environment in the only slot, playing."""
    simulator.reset([0], [episode()])
    slot = simulator._seats[0].slot
    assert isinstance(slot, LiberoSlot)
    return slot


def with_knob(slot: LiberoSlot, angle: float) -> NDArray[np.float64]:
    """Official state 0 of the stove with its knob turned to `angle` [rad]."""
    state = read_states(start_states_file(STOVE))[0].copy()
    state[1 + int(slot._driver.model.joint("flat_stove_1_button").qposadr[0])] = angle
    return state


@needs_assets
@pytest.mark.parametrize(("task", "number", "knob"), COMPARED)
def test_images_numbers_and_success_are_those_of_libero(
    task: str, number: int, knob: float | None, tmp_path: Path
) -> None:
    try:
        rendering.context(*SIZE).free()
    except NoOpenGLError as error:
        pytest.skip(str(error))
    ours = Libero(config(task, cameras=["agentview", "wrist"], image_size=SIZE), 1)
    slot = ours.make_slot(task)
    assert isinstance(slot, LiberoSlot)
    state = read_states(start_states_file(task))[number] if knob is None else with_knob(slot, knob)
    plan = np.concatenate([[REST] * 2, moves(number, 6)])
    job = {
        "task_file": str(task_file(task)),
        "assets": str(libero_files.place()),
        "package": str(pro.ROOT.parents[1]) if pro.has(task.partition("/")[0]) else None,
        "home": str(tmp_path),
        "gl": rendering.choose(),
        "number": number,
        "state": state.tolist(),
        "image_size": SIZE,
        "actions": plan.astype(float).tolist(),
    }
    script = Path(__file__).parent / "libero_reference.py"
    command = [sys.executable, str(script), json.dumps(job), str(tmp_path / "theirs.npz")]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=240)
    with np.load(tmp_path / "theirs.npz") as theirs:
        # What was there before must not matter.
        slot._driver.reset(number + 1, read_states(start_states_file(task))[number + 1])
        slot._driver.step(REST)
        slot._driver.reset(number, state)
        solved = []
        for index in range(len(plan) + 1):
            images, proprio = slot.observe()
            assert images is not None and np.array_equal(images, theirs["images"][index]), index
            assert np.array_equal(proprio, theirs["proprio"][index]), index
            assert np.array_equal(slot._driver.data.qpos, theirs["positions"][index]), index
            if index < len(plan):
                solved.append(slot.step(plan[index]).success)
        assert solved == theirs["done"].tolist() == [knob is not None] * len(plan)
    slot.close()
    ours.close()


@needs_assets
@pytest.mark.parametrize(("cameras", "proprio"), [(["wrist", "agentview"], Proprio.robot), ([], Proprio.full)])
def test_both_drivers_give_the_same_images_numbers_and_success(cameras: list[str], proprio: Proprio) -> None:
    try:
        fast, upstream = (
            Libero(config(cameras=cameras, image_size=SIZE, proprio=proprio, driver=driver), 1) for driver in Driver
        )
    except NoOpenGLError as error:
        pytest.skip(str(error))
    assert fast.spec == upstream.spec
    for number in (2, 1, 2):  # of the upstream driver, too, an episode does not depend on the last one
        seen = [[each.reset([0], [episode(number)])] for each in (fast, upstream)]
        for action in moves(number, 6):
            results = [each.step_chunk([0], action[None, None]) for each in (fast, upstream)]
            assert np.array_equal(results[0].success, results[1].success)
            assert np.array_equal(results[0].rewards, results[1].rewards)
            for observations, result in zip(seen, results, strict=True):
                observations.append(result.observation)
        for ours, theirs in zip(*seen, strict=True):
            assert not cameras or np.array_equal(ours.images, theirs.images)
            assert ours.proprio is not None and theirs.proprio is not None
            assert np.array_equal(ours.proprio[:, :8], theirs.proprio[:, :8])
            # Objects: the upstream driver shows them one physics step (2 ms) later.
            assert np.abs(ours.proprio - theirs.proprio).max() < 0.02
    fast.close()
    upstream.close()


@needs_assets
def test_the_upstream_driver_says_what_it_does_not_do(stove: Libero) -> None:
    stove.reset([0], [episode()])
    snapshot = stove.get_state([0])
    upstream = Libero(config(driver=Driver.upstream), 1)
    upstream.reset([0], [episode()])
    with pytest.raises(StateError, match=r"saved with env\.driver = 'fast'"):
        upstream.set_state([0], snapshot)
    with pytest.raises(RenderError, match=r"renders what env\.cameras names"):
        upstream.render([0])
    upstream.close()


def test_a_burner_is_seen_to_go_on_one_step_late_as_in_libero(stove: Libero) -> None:
    slot = slot_of(stove)
    burner = slot._driver.model.site("flat_stove_1_burner").id
    knob = int(slot._driver.model.joint("flat_stove_1_button").qposadr[0])

    def is_seen() -> bool:
        with slot._driver.scene() as scene:
            return bool(scene.model.site_rgba[burner, 3] > 0)

    slot.step(REST)
    assert not is_seen()
    slot._driver.data.qpos[knob] = 1.0
    assert slot.step(REST).success and not is_seen()
    halfway = slot.snapshot()
    assert slot.step(REST).success and is_seen()
    slot._driver.reset(0, read_states(start_states_file(STOVE))[0])
    assert not is_seen()
    slot.restore(episode(), halfway)
    assert not is_seen()
    slot.step(REST)
    assert is_seen()


@needs_assets
def test_settling_is_ten_steps_of_rest_that_do_not_count(stove: Libero) -> None:
    settled = Libero(config(settle_steps=10, max_episode_steps=2), 1)
    first = settled.reset([0], [episode(5)])
    stove.reset([0], [episode(5)])
    rested = stove.step_chunk([0], np.tile(REST, (1, 10, 1)))
    assert first.proprio is not None and rested.observation.proprio is not None
    assert np.array_equal(first.proprio, rested.observation.proprio)
    result = settled.step_chunk([0], moves(0, 3)[None])
    assert result.steps.tolist() == [2] and result.truncated.tolist() == [True]
    settled.close()


def test_the_gripper_opens_at_minus_one_and_closes_at_one(stove: Libero) -> None:
    (gripper,) = (field for field in stove.spec.actions if field.meaning == "gripper")
    assert (gripper.opens, gripper.closes) == (-1.0, 1.0)

    def width(value: float | None) -> float:
        stove.reset([0], [episode()])
        action = np.zeros(7, np.float32)
        action[6] = value
        proprio = stove.step_chunk([0], np.tile(action, (1, 15, 1))).observation.proprio
        assert proprio is not None
        return float(proprio[0, 6] - proprio[0, 7])

    assert width(gripper.opens) > 0.07 and width(gripper.closes) < 0.005
    assert width(0.2) == width(gripper.closes)  # only the sign counts


def test_actions_move_the_hands_target_as_the_fields_say(stove: Libero) -> None:
    arm, wrist, _ = stove.spec.actions
    assert (arm.unit, wrist.unit) == ("m", "rad")
    slot = slot_of(stove)
    controller = slot._driver._controller
    position, rotation = controller.ee_pos.copy(), Rotation.from_matrix(controller.ee_ori_mat)
    slot.step(np.array([0.5, -0.25, 1, 0.2, 0.4, -0.1, -1], np.float32))
    assert controller.goal_pos - position == pytest.approx(arm.scale * np.array([0.5, -0.25, 1]))
    turned = Rotation.from_matrix(controller.goal_ori) * rotation.inv()
    assert turned.as_rotvec() == pytest.approx(wrist.scale * np.array([0.2, 0.4, -0.1]), abs=1e-6)


@pytest.mark.parametrize("entry", range(6))
def test_the_hand_follows_its_target(stove: Libero, entry: int) -> None:
    start = stove.reset([0], [episode()]).proprio
    action = np.zeros(7, np.float32)
    action[entry], action[6] = 0.2, -1
    end = stove.step_chunk([0], np.tile(action, (1, 20, 1))).observation.proprio
    assert start is not None and end is not None
    before, after = Rotation.from_rotvec(start[0, 3:6]), Rotation.from_rotvec(end[0, 3:6])
    moved = (end - start)[0, :3] / 0.05 if entry < 3 else (after * before.inv()).as_rotvec() / 0.5
    assert 0.6 < moved[entry % 3] < 4.0  # of 20 * 0.2: the target keeps ahead of the hand by 0.2
    assert np.delete(moved, entry % 3) == pytest.approx(0, abs=0.25)


@needs_assets
@pytest.mark.parametrize("end_at_success", [True, False])
def test_reward_and_end_at_success(end_at_success: bool) -> None:
    simulator = Libero(config(end_at_success=end_at_success), 1)
    slot = slot_of(simulator)
    assert slot.step(REST) == (0.0, False, False, False)
    slot._driver.reset(0, with_knob(slot, 1.0))
    assert slot.step(REST) == (1.0, end_at_success, True, False)
    simulator.close()


@needs_assets
def test_full_proprio_adds_the_objects() -> None:
    full = Libero(config(proprio=Proprio.full), 1)
    proprio = full.reset([0], [episode()]).proprio
    model = slot_of(full)._driver.model
    assert proprio is not None and proprio.shape == (1, 8 + model.nq - 9)  # without the arm's 7 joints and 2 fingers
    bowl = 1 + int(model.joint("akita_black_bowl_1_joint0").qposadr[0])
    assert set(read_states(start_states_file(STOVE))[0, bowl : bowl + 7].astype(np.float32)) <= set(proprio[0, 8:])
    full.close()


def test_physics_that_diverge_are_an_error_with_slot_and_step(stove: Libero) -> None:
    slot_of(stove)._driver.data.qvel[-1] = np.nan
    with pytest.raises(np.linalg.LinAlgError, match="NaN") as caught:
        stove.step_chunk([0], moves(0, 2)[None])
    assert "after slot 0, step 0 (task 'libero_goal/7'" in caught.value.__notes__[0]


def test_a_snapshot_of_another_task_is_refused(stove: Libero) -> None:
    stove.reset([0], [episode()])
    (state,) = stove.get_state([0])
    assert len(state) < 20_000
    physics = len(slot_of(stove).snapshot()["physics"])
    damaged = state.replace(f'["physics", "<f8", [{physics}]]'.encode(), f'["physics", "<f8", [1,{physics}]'.encode())
    with pytest.raises(StateError):
        stove.set_state([0], [damaged])
    with pytest.raises(StateError, match=r"does not fit this environment of 'libero_goal/7': 'physics'"):
        stove.set_state([0], [state.replace(b'["physics"', b'["physicz"')])


@needs_assets
def test_fast_images_are_others_and_of_the_same_scene() -> None:
    images = {}
    for quality in RenderQuality:
        try:
            simulator = Libero(config(cameras=["wrist", "agentview"], image_size=SIZE, render_quality=quality), 1)
        except NoOpenGLError as error:
            pytest.skip(str(error))
        images[quality] = simulator.reset([0], [episode()]).images
        shown = simulator.render([0])
        assert images[quality] is not None and np.array_equal(shown, images[quality][:, 0])
        simulator.close()
    full, fast = (images[quality].astype(float) for quality in (RenderQuality.full, RenderQuality.fast))
    assert full.shape == (1, 2, *SIZE, 3) and (full != fast).any()
    assert np.abs(full - fast).mean() < 20 and min(full[0, 0].std(), full[0, 1].std()) > 20
    assert np.abs(full[0, 0] - full[0, 1]).mean() > 20


@needs_assets
def test_tasks_with_the_same_objects_share_a_renderer_and_are_drawn_as_alone() -> None:
    tasks = ["libero_spatial/0", "libero_spatial/1"]
    options: dict[str, Any] = {"cameras": ["agentview"], "image_size": SIZE, "render_quality": RenderQuality.fast}
    try:
        both = Libero(config(*tasks, **options), 1)
    except NoOpenGLError as error:
        pytest.skip(str(error))
    first, second = (both.reset([0], [episode(task=task)]).images for task in tasks)
    assert len(both._renderers._kept) == 1
    both.close()
    alone = Libero(config(tasks[1], **options), 1)
    assert np.array_equal(alone.reset([0], [episode(task=tasks[1])]).images, second)
    assert not np.array_equal(first, second)
    alone.close()


@pytest.mark.parametrize(
    ("start_state", "options", "expected"),
    [
        (0, {}, 0),
        (39, {}, 39),
        (40, {}, 40),
        (49, {}, 49),
        (50, {}, 40),
        (10_000, {}, 40),
        (10_007, {}, 47),
        (5, {"start_states": 3}, 5),
        (50, {"start_states": 3}, 3),
        (39, {"start_states": 50, "share_start_states": True}, 39),
        (50, {"start_states": 50, "share_start_states": True}, 0),
        (10_007, {"share_start_states": True}, 7),
    ],
)
def test_official_states_of_training_and_evaluation(start_state: int, options: dict[str, Any], expected: int) -> None:
    assert official_state(start_state, config(**options)) == expected


def test_training_and_evaluation_share_no_state_unless_asked() -> None:
    for states in range(1, 50):
        options = config(start_states=states)
        training = {official_state(number, options) for number in range(states)}
        evaluation = {official_state(number, options) for number in range(states, states + 200)}
        assert training | evaluation == set(range(50)) and not training & evaluation


def test_start_states_are_what_torch_reads() -> None:
    import torch

    folder = libero_tasks.package() / "init_files" / "libero_10"
    files = sorted(folder.glob("*.pruned_init"))
    tasks = {task_description(task): task for task in libero_tasks.known_tasks() if task.startswith("libero_10/")}
    name = next(file for file in files if "turn_on_the_stove" in file.stem)
    ours = read_states(start_states_file(tasks["turn on the stove and put the moka pot on it"]))
    theirs = torch.load(name, weights_only=False)
    assert ours.shape[0] == 50 and ours.dtype == np.float64 and np.array_equal(ours, theirs)


def test_start_states_are_read_without_running_what_is_in_the_file(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    (tmp_path / "pickle").write_bytes(pickle.dumps(Trap()))
    with (tmp_path / "pickle").open("rb") as file, pytest.raises(pickle.UnpicklingError, match="is not part of"):
        libero_tasks._ArrayUnpickler(file).load()
    assert not (tmp_path / "sprung").exists()


def test_tasks_and_task_descriptions_are_those_of_the_public_evaluations() -> None:
    tasks = libero_tasks.known_tasks()
    own = [task for task in tasks if not pro.has(task.partition("/")[0])]
    assert len(own) == len(set(own)) == 130 and all(task_file(task).is_file() for task in own)
    assert task_description("libero_goal/0") == "open the middle drawer of the cabinet"
    assert task_description("libero_10/0") == "put both the alphabet soup and the tomato sauce in the basket"
    assert task_description("libero_90/0") == "close the top drawer of the cabinet"  # KITCHEN_SCENE10_...: two digits


def test_config_files_name_whole_suites() -> None:
    folder = Path(__file__).parents[2] / "configs" / "env" / "libero"
    limits = {"spatial": 220, "object": 280, "goal": 300, "long": 520}
    assert {file.stem for file in folder.glob("*.yaml")} == limits.keys()
    for name, steps in limits.items():
        written = (folder / f"{name}.yaml").read_text()
        tasks = [line.split()[1] for line in written.splitlines() if line.startswith("  - ")]
        assert len(tasks) == 10 and len({task.partition("/")[0] for task in tasks}) == 1
        assert all(f"{task}  # {task_description(task)}\n" in written for task in tasks)
        assert f"max_episode_steps: {steps}\n" in written


@needs_assets
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["libero_gaol/7"]}, r"has no task 'libero_gaol/7' - did you mean 'libero_goal/7'\?"),
        ({"cameras": ["agentviev"]}, r"has no camera 'agentviev' - did you mean 'agentview'\?"),
    ],
)
def test_names_that_do_not_exist(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        Libero(config(*options.pop("tasks", []), **options), 1)


@needs_assets
def test_tasks_of_different_shapes_are_refused_in_words() -> None:
    simulator = Libero(config(STOVE, "libero_object/0", proprio=Proprio.full), 1)
    with pytest.raises(UserError, match=r"'libero_object/0' has \d+ state numbers, .* or set env.proprio to robot"):
        simulator.reset([0], [episode(task="libero_object/0")])
    simulator.close()


def faults(*overrides: str) -> list[str]:
    """What `validate` says about LIBERO Goal with these changes."""
    try:
        load_config("experiment/libero_goal", list(overrides))
    except ConfigError as error:
        return [f"{fault.message} - {fault.hint}" for fault in error.faults]
    return []


@needs_assets
def test_the_next_environment_frees_the_memory_of_one_that_is_gone(stove: Libero) -> None:
    slot = stove.make_slot(STOVE)
    assert isinstance(slot, LiberoSlot)
    gone = weakref.ref(slot._driver._env)
    gc.disable()  # it looks for cycles by the number of objects, of which an environment has few
    try:
        slot.close()
        del slot
        assert gone() is not None
        stove.make_slot(STOVE).close()
        assert gone() is None
    finally:
        gc.enable()


@needs_assets
@pytest.mark.parametrize("lost", ["flat_stove.xml", "flat_stove/*.png"])
def test_a_file_that_is_missing_among_the_assets_is_named(tmp_path: Path, lost: str) -> None:
    shutil.copytree(libero_files.place(), tmp_path / "assets", copy_function=os.symlink)
    for file in (tmp_path / "assets" / "articulated_objects").glob(lost):
        file.unlink()
    with pytest.raises(UserError, match=rf"LIBERO's assets in {tmp_path}/assets are not complete: .*flat_stove"):
        Libero(config(assets=str(tmp_path / "assets")), 1)


@needs_assets
def test_start_states_and_episodes_have_to_fit() -> None:
    assert faults() == [] == faults("env.start_states=50", "env.share_start_states=true")
    (none_left,) = faults("env.start_states=50")
    assert "leaves none of LIBERO's start states for evaluation" in none_left
    (quality,) = faults("env.driver=upstream", "env.render_quality=fast")
    assert quality.endswith("set it to full, or env.driver to fast")
    (twice,) = faults("eval.episodes=101")
    assert twice.endswith("set eval.episodes to 100 or less")
    assert faults("eval.episodes=500", "env.share_start_states=true") == []


@needs_assets
def test_nothing_is_asked_written_or_shown(tmp_path: Path) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    code = (
        "import sys; from embodyrl.envs.libero.simulator import Libero; from embodyrl.envs.options import LiberoConfig;"
        f"simulator = Libero(LiberoConfig(name='libero', tasks=['{STOVE}']), 1);"
        "simulator.close(); print('torch' in sys.modules)"
    )
    hidden = ("LIBERO_CONFIG_PATH", "MUJOCO_GL", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment.update(HOME=str(home), TMPDIR=str(temporary), PYTHONPATH=str(Path(__file__).parents[2]))
    ran = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False\n", "")
    assert list(temporary.iterdir()) == []
    assert {path.name for path in home.iterdir()} <= {".config", ".cache"}  # matplotlib's


def test_it_loads_whatever_the_uuid_of_a_ranks_gpu_is() -> None:
    """robosuite refuses to be imported where the number of the EGL device is not part of CUDA_VISIBLE_DEVICES."""
    gpu = {"CUDA_VISIBLE_DEVICES": "GPU-0a1b2c4d", "MUJOCO_EGL_DEVICE_ID": "3", "MUJOCO_GL": "egl"}
    program = (
        "import os\n"
        "from embodyrl.envs.libero.driver import load\n"
        "load()\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['MUJOCO_EGL_DEVICE_ID'], os.environ['MUJOCO_GL'])\n"
    )
    command, variables = [sys.executable, "-c", program], {**os.environ, **gpu, "PYOPENGL_PLATFORM": "egl"}
    ran = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "GPU-0a1b2c4d 3 egl"
    refused = subprocess.run(
        [sys.executable, "-c", "import robosuite"], env=variables, capture_output=True, text=True, timeout=240
    )
    assert "AssertionError: MUJOCO_EGL_DEVICE_ID" in refused.stderr, "it imports now: the workaround can go"
