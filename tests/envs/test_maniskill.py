"""ManiSkill: what is checked before it is built, and how its actions are described."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from embodyrl.registry import SIMULATORS

if missing := [requirement.module for requirement in SIMULATORS.entry("maniskill").missing()]:
    pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)

import sapien

from embodyrl.envs.maniskill import loading
from embodyrl.envs.maniskill.simulator import ManiSkill
from embodyrl.envs.maniskill.tasks import TASK_DESCRIPTIONS, _registered, known_tasks, missing_assets, task_description
from embodyrl.envs.options import Driver, ManiSkillConfig, Proprio, RewardMode
from embodyrl.envs.types import EpisodeSpec
from embodyrl.errors import UnknownNameError, UserError


def simulator(*tasks: str, **options: Any) -> ManiSkill:
    """A simulator with one slot."""
    return ManiSkill(ManiSkillConfig(name="maniskill", tasks=list(tasks), **{"max_episode_steps": 50, **options}), 1)


@pytest.fixture(autouse=True)
def nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test may ever read the terminal."""

    def asked(*_: object) -> str:
        raise AssertionError("ManiSkill asked a question")

    monkeypatch.setattr("builtins.input", asked)
    yield


@pytest.fixture
def driver() -> None:
    """For tests that draw."""
    if loading.rendering_device() is None:
        pytest.skip("no Vulkan driver that SAPIEN can draw with")


@pytest.mark.parametrize(
    ("tasks", "options", "error", "message"),
    [
        (["PushCub-v1"], {}, UnknownNameError, r"maniskill has no task 'PushCub-v1' - did you mean 'PushCube-v1'\?"),
        (
            ["PickSingleYCB-v1"],
            {},
            UserError,
            "not on this machine: python -m mani_skill.utils.download_asset ycb",
        ),
        (
            ["AnymalC-Reach-v1"],
            {},
            UserError,
            r"the assets \(anymal_c\) .* not on this machine: python -m mani_skill.utils.download_asset anymal_c",
        ),
        (["OpenCabinetDoor-v1"], {}, UserError, "cannot be built: Partnet .*download_asset partnet_mobility_cabinet"),
        (["TwoRobotPickCube-v1"], {}, UserError, "has several robots"),
        (["PushCube-v1"], {"control_mode": "pd_joint_delta"}, UserError, "did you mean 'pd_joint_delta_pos'"),
        (["StackPyramid-v1"], {"reward_mode": RewardMode.dense}, UserError, "reward_mode is 'dense', but .* has only"),
    ],
)
def test_mistakes(tasks: list[str], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        simulator(*tasks, **options)


def test_a_question_on_the_terminal_becomes_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from mani_skill.utils import download_asset

    def build(cls: type, **_: Any) -> None:
        download_asset.prompt_yes_no("Robot widow has assets available for download. Download them now?")

    entry = loading.load().REGISTERED_ENVS["PushCube-v1"]
    monkeypatch.setattr(
        entry,
        "cls",
        type("Asks", (), {"SUPPORTED_REWARD_MODES": ["dense"], "SUPPORTED_OBS_MODES": [], "__new__": build}),
    )
    before = download_asset.prompt_yes_no
    with pytest.raises(UserError, match=r"the assets \(widow\) of .* 'PushCube-v1' are not on this machine"):
        simulator("PushCube-v1", reward_mode=RewardMode.dense)
    assert download_asset.prompt_yes_no is before


def test_action_fields_follow_the_controller() -> None:
    joints = simulator("PushCube-v1").spec.actions
    assert [(f.name, f.meaning, f.unit, round(f.scale, 6), len(f.low)) for f in joints] == [
        ("arm", "joint_delta", "rad", 0.1, 7),
        ("gripper", "gripper", "1", 1.0, 1),
    ]
    pose = simulator("PushCube-v1", control_mode="pd_ee_delta_pose").spec.actions
    assert [(f.name, f.meaning, f.unit, round(f.scale, 6), len(f.low)) for f in pose] == [
        ("arm_position", "delta_position", "m", 0.1, 3),
        ("arm_rotation", "delta_rotation", "rad", -0.1, 3),
        ("gripper", "gripper", "1", 1.0, 1),
    ]


def test_a_gripper_says_which_value_opens_it() -> None:
    ours = simulator("PushCube-v1")
    gripper = ours.spec.actions[1]
    assert (gripper.opens, gripper.closes) == (1.0, -1.0)
    for value, opening in ((gripper.opens, 0.04), (gripper.closes, 0.0)):
        ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=0, seed=0)])
        seen = ours.step_chunk([0], np.array([[[0.0] * 7 + [value]] * 20], np.float32)).observation.proprio
        assert seen is not None and seen[0, 7] == pytest.approx(opening, abs=2e-3)


def test_an_action_of_one_moves_the_target_by_the_scale() -> None:
    ours = simulator("PushCube-v1")
    before = ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=0, seed=0)]).proprio
    ours.step_chunk([0], np.eye(1, 8, dtype=np.float32)[None])
    target = ours._seats[0].slot._env.agent.controller.controllers["arm"]._target_qpos  # type: ignore[union-attr]
    assert before is not None
    assert float(target[0, 0]) - before[0, 0] == pytest.approx(ours.spec.actions[0].scale, rel=1e-5)


@pytest.mark.parametrize("kind", Driver)
@pytest.mark.parametrize(
    ("task", "control_mode"),
    [("PushCube-v1", "pd_joint_delta_pos"), ("StackCube-v1", "pd_ee_delta_pose"), ("RollBall-v1", "pd_joint_pos")],
)
def test_numbers_are_those_of_maniskill_bit_for_bit(task: str, control_mode: str, kind: Driver) -> None:
    loading.load()
    driver = importlib.import_module("embodyrl.envs.maniskill.driver")  # which only building a fast one installs again
    driver.Pose.create = classmethod(driver._create)
    driver.Articulation.set_joint_drive_targets = driver._set_joint_drive_targets
    env = gymnasium.make(
        task,
        obs_mode="state",
        reward_mode="normalized_dense",
        control_mode=control_mode,
        sim_backend="physx_cpu",
        render_backend="none",
    )
    env.reset(seed=5)
    low, high = env.action_space.low, env.action_space.high  # type: ignore[attr-defined]
    actions = np.random.default_rng(0).uniform(low, high, (20, len(low))).astype(np.float32)
    expected = [env.step(action) for action in actions]
    ours = simulator(task, control_mode=control_mode, driver=kind)
    ours.reset([0], [EpisodeSpec(task=task, start_state=5, seed=0)])
    for action, (observation, reward, _, _, info) in zip(actions, expected, strict=True):
        result = ours.step_chunk([0], action[None, None])
        assert result.observation.proprio is not None
        assert np.array_equal(result.observation.proprio, observation.numpy())
        assert (result.rewards[0, 0], result.success[0, 0]) == (reward.item(), info["success"].item())


def test_the_upstream_driver_does_without_the_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "embodyrl.envs.maniskill.driver", None)
    with pytest.raises(ImportError):
        simulator("PushCube-v1")
    ours = simulator("PushCube-v1", driver=Driver.upstream, proprio=Proprio.robot)
    ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=5, seed=0)])
    assert ours.step_chunk([0], np.zeros((1, 2, 8), np.float32)).steps.tolist() == [2]


def test_a_state_goes_from_each_driver_to_the_other() -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 10, 8)).astype(np.float32)
    fast, upstream = (simulator("PickCube-v1", proprio=Proprio.robot, driver=kind) for kind in Driver)
    for each in (fast, upstream):
        each.reset([0], [EpisodeSpec(task="PickCube-v1", start_state=3, seed=0)])
        each.step_chunk([0], actions)
    states = [each.get_state([0]) for each in (fast, upstream)]
    assert states[0] == states[1]
    assert not fast.set_state([0], states[1]) and not upstream.set_state([0], states[0])


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("MS-AntRun-v1", {"reward_mode": RewardMode.sparse}, "with env.driver = 'upstream' 'MS-AntRun-v1' has only"),
        ("SO100GraspCube-v1", {"cameras": ["base_camera"]}, "offers only none, state, state_dict, .* set env.driver"),
    ],
)
def test_the_upstream_driver_says_what_a_task_does_not_offer(
    task: str, options: dict[str, Any], message: str, driver: None
) -> None:
    with pytest.raises(UserError, match=message):
        simulator(task, driver=Driver.upstream, **options)


def test_tasks_of_different_shapes_are_refused() -> None:
    ours = simulator("PushCube-v1", "PickCube-v1")
    with pytest.raises(UserError, match="mixes tasks of different shapes: 'PickCube-v1' has 42"):
        ours.reset([0], [EpisodeSpec(task="PickCube-v1", start_state=0, seed=0)])


def test_task_descriptions() -> None:
    assert task_description("PushCube-v1") == "push the cube to the goal region"
    assert task_description("OpenCabinetDrawer-v1") == "open cabinet drawer"


def test_every_task_whose_files_come_with_maniskill_has_a_written_task_description() -> None:
    registered = loading.load().REGISTERED_ENVS
    shipped = [task for task, entry in registered.items() if not missing_assets(task) and not entry.asset_download_ids]
    elsewhere = ("SceneManipulation", "Empty-v1", "UnitreeGo2", "OpenCabinetDoor")  # no task, or no files either
    assert {task for task in shipped if not any(part in task for part in elsewhere)} == TASK_DESCRIPTIONS.keys()


def test_the_catalogue_agrees_with_what_maniskill_registers() -> None:
    registered = loading.load().REGISTERED_ENVS
    read = _registered()
    assert read == {
        task: (entry.asset_download_ids or [], entry.max_episode_steps)
        for task, entry in registered.items()
        if not task.endswith("SceneManipulation-v1")  # scenes without a task
    }
    assert set(known_tasks()) == set(registered)  # once ManiSkill is imported, those of plug-ins are known too


WITHOUT_DRIVER = """
from embodyrl.envs.base import RenderError
from embodyrl.envs.maniskill.simulator import ManiSkill
from embodyrl.envs.options import ManiSkillConfig
from embodyrl.envs.types import EpisodeSpec
from embodyrl.errors import UserError

def config(**options):
    return ManiSkillConfig(name="maniskill", tasks=["PushCube-v1"], **options)

ours = ManiSkill(config(), 1)
print(ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=5, seed=0)]).proprio.tobytes().hex())
for attempt in (lambda: ours.render([0]), lambda: ManiSkill(config(cameras=["base_camera"]), 1)):
    try:
        attempt()
    except (RenderError, UserError) as error:
        print(error)
"""


def test_without_a_driver_states_are_the_same_and_images_are_refused_in_words() -> None:
    ours = simulator("PushCube-v1")
    first = ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=5, seed=0)]).proprio
    assert first is not None
    environment = {**os.environ, "VK_ICD_FILENAMES": os.devnull, "VK_DRIVER_FILES": os.devnull}
    command = [sys.executable, "-c", WITHOUT_DRIVER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
    there, drawing, camera = done.stdout.splitlines()
    assert there == first.tobytes().hex()
    assert drawing.startswith("ManiSkill cannot render 'PushCube-v1' on this machine: install a Vulkan driver")
    assert camera.startswith("env.cameras: ManiSkill cannot render images on this machine: install a Vulkan driver")


def test_images_show_what_the_state_says(driver: None) -> None:
    """The red cube of PickCube is where the camera should see it: moving it moves the red pixels."""
    ours = simulator("PickCube-v1", cameras=["base_camera"], image_size=[96, 128])
    middles = []
    for start_state in range(4):
        seen = ours.reset([0], [EpisodeSpec(task="PickCube-v1", start_state=start_state, seed=0)])
        assert seen.images is not None and seen.images.shape == (1, 1, 96, 128, 3) and seen.images.dtype == np.uint8
        red, green, blue = (seen.images[0, 0, :, :, channel].astype(int) for channel in range(3))
        rows, columns = np.nonzero((red > 100) & (green < 40) & (blue < 40))
        assert len(rows) > 3
        cube = ours._seats[0].slot._env.cube.pose.p[0].numpy()  # type: ignore[union-attr]
        middles.append([rows.mean(), columns.mean(), *cube[:2]])
    down, right, forward, left = np.array(middles).T
    # The camera looks at the robot from the front: away from the robot is down, the robot's left is on the right.
    assert np.corrcoef(down, forward)[0, 1] > 0.95 and np.corrcoef(right, left)[0, 1] > 0.95


def test_images_are_drawn_at_chunk_ends_only(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = simulator("PushCube-v1", cameras=["base_camera"], image_size=[32, 32])
    ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=0, seed=0)])
    env = ours._seats[0].slot._env  # type: ignore[union-attr]
    drawn = []
    draw = env._get_obs_sensor_data
    monkeypatch.setattr(env, "_get_obs_sensor_data", lambda *args: drawn.append(1) or draw(*args))
    ours.step_chunk([0], np.zeros((1, 8, 8), np.float32))
    assert len(drawn) == 1


def test_states_are_the_same_with_and_without_cameras(driver: None) -> None:
    episode = EpisodeSpec(task="PickCube-v1", start_state=2, seed=0)
    blind, seeing = simulator("PickCube-v1"), simulator("PickCube-v1", cameras=["base_camera"], image_size=[32, 32])
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 10, 8)).astype(np.float32)
    for ours in (blind, seeing):
        ours.reset([0], [episode])
    one, other = (ours.step_chunk([0], actions) for ours in (blind, seeing))
    assert one.observation.proprio is not None and other.observation.proprio is not None
    assert np.array_equal(one.observation.proprio, other.observation.proprio)
    assert np.array_equal(one.rewards, other.rewards)


@pytest.mark.parametrize("kind", Driver)
def test_an_unknown_camera(driver: None, kind: Driver) -> None:
    with pytest.raises(UserError, match=r"'base_cam', which 'PushCube-v1' does not have - did you mean 'base_camera'"):
        simulator("PushCube-v1", cameras=["base_cam"], driver=kind)


def test_images_are_the_same_with_both_drivers(driver: None) -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 5, 8)).astype(np.float32)
    fast, upstream = (
        simulator("PickCube-v1", cameras=["base_camera"], image_size=[48, 64], driver=kind) for kind in Driver
    )
    for each in (fast, upstream):
        each.reset([0], [EpisodeSpec(task="PickCube-v1", start_state=3, seed=0)])
    one, other = (each.step_chunk([0], actions).observation.images for each in (fast, upstream))
    assert one is not None and other is not None and np.array_equal(one, other)


def test_the_upstream_driver_refuses_a_lens_given_in_pixels(driver: None) -> None:
    from mani_skill.envs.tasks import PushCubeEnv
    from mani_skill.sensors.camera import CameraConfig
    from mani_skill.utils.registration import register_env

    @register_env("PushCubeInPixels-v1")
    class InPixels(PushCubeEnv):
        @property
        def _default_sensor_configs(self) -> list[Any]:
            lens = np.array([[60.0, 0, 32.0], [0, 60.0, 24.0], [0, 0, 1]])
            return [CameraConfig("pixels", sapien.Pose([-1, 0, 1]), 64, 48, intrinsic=lens)]

    seen = {"cameras": ["pixels"], "image_size": [24, 32]}
    assert simulator("PushCubeInPixels-v1", **seen).spec.cameras == ("pixels",)
    with pytest.raises(UserError, match=r"lens of 'pixels' is given in pixels .*: set env.driver to fast"):
        simulator("PushCubeInPixels-v1", driver=Driver.upstream, **seen)


def test_a_lens_given_in_pixels_keeps_its_view(driver: None) -> None:
    """A camera whose intrinsics belong to its own size is drawn at that size and then shrunk."""
    from mani_skill.sensors.camera import CameraConfig

    from embodyrl.envs.maniskill.driver import _drawn, _resized

    lens = np.array([[623.588, 0, 319.501], [0, 623.588, 239.545], [0, 0, 1]])
    assert _drawn(CameraConfig("a", sapien.Pose(), 640, 480, intrinsic=lens), (224, 224)).keys() == {"shader_pack"}
    half = torch.zeros((1, 480, 640, 3), dtype=torch.uint8)
    half[:, :, 320:] = 200
    small = _resized(half, (12, 16))
    assert small.shape == (1, 12, 16, 3) and small.dtype == torch.uint8
    assert (small[:, :, :7] == 0).all() and (small[:, :, 9:] == 200).all()


def test_people_see_an_image(driver: None) -> None:
    ours = simulator("PushCube-v1")
    ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=0, seed=0)])
    (image,) = ours.render([0])
    assert image.shape == (512, 512, 3) and image.std() > 20


def test_proprio_of_the_robot_has_no_objects() -> None:
    full, robot = simulator("PushCube-v1"), simulator("PushCube-v1", proprio=Proprio.robot)
    assert (full.spec.proprio_dim, robot.spec.proprio_dim) == (35, 25)  # 9 positions, 9 velocities, pose of the tool
    starts = [robot.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=2, seed=0)]).proprio for _ in range(2)]
    robot._seats[0].slot._env.obj.set_pose(sapien.Pose([0.3, 0.3, 0.02]))  # type: ignore[union-attr]
    moved = robot._seats[0].slot.observe()[1]  # type: ignore[union-attr]
    assert starts[0] is not None and moved is not None and np.array_equal(starts[0][0], moved)


def push(ours: ManiSkill, start_state: int) -> NDArray[np.float32]:
    """Lower the hand behind the cube and push it, both fingers at once; returns the states `[20, S]`."""
    ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=start_state, seed=0)])
    env: Any = ours._seats[0].slot._env  # type: ignore[union-attr]
    states = []
    for _ in range(20):
        hand, cube = env.agent.tcp.pose.p[0].numpy(), env.obj.pose.p[0].numpy()
        behind = -0.05 if hand[2] > 0.06 else 0.05
        target = np.array([cube[0] + behind, cube[1], 0.02])
        action = np.array([*np.clip(20 * (target - hand), -1, 1), -1], np.float32)
        states.append(ours.step_chunk([0], action[None, None]).observation.proprio[0])  # type: ignore[index]
    return np.array(states)


def test_in_a_scene_that_is_rebuilt_an_episode_does_not_depend_on_those_before() -> None:
    """In one that is used again, 15 of 24 repetitions differed."""
    ours = simulator("PushCube-v1", control_mode="pd_ee_delta_pos", rebuild=True)
    first = {number: push(ours, number) for number in range(3)}
    assert all(np.abs(states[-1, 28] - states[0, 28]) > 0.02 for states in first.values()), "nothing was pushed"
    for number in (1, 0, 2, 0):
        assert np.array_equal(push(ours, number), first[number])
    usual = simulator("PushCube-v1", control_mode="pd_ee_delta_pos")
    assert np.array_equal(push(usual, 1)[0], first[1][0]), "another layout"


def test_an_episode_ends_at_success_where_that_is_wanted() -> None:
    for wanted in (False, True):
        ours = simulator("PushCube-v1", end_at_success=wanted)
        ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=0, seed=0)])
        env = ours._seats[0].slot._env  # type: ignore[union-attr]
        env.obj.set_pose(env.goal_region.pose)
        result = ours.step_chunk([0], np.zeros((1, 2, 8), np.float32))
        assert result.success[0, 0] and result.terminated[0] == wanted and result.steps[0] == (1 if wanted else 2)


def test_the_sparse_reward_is_success() -> None:
    ours = simulator("PushCube-v1", reward_mode=RewardMode.sparse)
    ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=0, seed=0)])
    assert not ours.step_chunk([0], np.zeros((1, 3, 8), np.float32)).rewards.any()
    env = ours._seats[0].slot._env  # type: ignore[union-attr]
    env.obj.set_pose(env.goal_region.pose)
    assert ours.step_chunk([0], np.zeros((1, 1, 8), np.float32)).rewards.tolist() == [[1.0]]


BRIDGE = "PutCarrotOnPlateInScene-v1"


@pytest.mark.skipif(bool(missing_assets(BRIDGE)), reason="the assets of ManiSkill's bridge tasks are not here")
def test_a_twin_of_a_real_scene(driver: None) -> None:
    """Its own words, camera and control mode; a photograph behind what is drawn; layouts counted through."""
    options = {"cameras": ["3rd_view_camera"], "proprio": Proprio.robot, "reward_mode": RewardMode.sparse}
    ours = simulator(BRIDGE, **options)
    assert ours.spec.tasks == {BRIDGE: "put carrot on plate"}
    assert [(field.meaning, field.unit) for field in ours.spec.actions[:2]] == [
        ("delta_position", "m"),
        ("delta_rotation", "rad"),
    ]
    seen = {n: ours.reset([0], [EpisodeSpec(task=BRIDGE, start_state=n, seed=0)]).images for n in (0, 2, 24)}
    assert seen[0] is not None and seen[0].shape == (1, 1, 224, 224, 3)
    assert np.array_equal(seen[0], seen[24]) and not np.array_equal(seen[0], seen[2])  # 12 places x 2 directions
    env = ours._seats[0].slot._env  # type: ignore[union-attr]
    assert env.control_mode == "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"
    photograph = env._rgb_overlay_images["3rd_view_camera"][:8, :8].float().mean((0, 1))
    assert np.allclose(seen[0][0, 0, :3, :3].mean((0, 1)), photograph.numpy(), atol=20)
