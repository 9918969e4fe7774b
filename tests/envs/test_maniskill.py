"""ManiSkill: what is checked before it is built, and how its actions are described."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from embodyrl.registry import SIMULATORS

if missing := [requirement.module for requirement in SIMULATORS.entry("maniskill").missing()]:
    pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)

from embodyrl.envs import maniskill
from embodyrl.envs.base import RenderError
from embodyrl.envs.maniskill import ManiSkill, sentence
from embodyrl.envs.options import ManiSkillConfig, RewardMode
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


@pytest.mark.parametrize(
    ("tasks", "options", "error", "message"),
    [
        (["PushCub-v1"], {}, UnknownNameError, r"maniskill has no task 'PushCub-v1' - did you mean 'PushCube-v1'\?"),
        (
            ["PickSingleYCB-v1"],
            {},
            UserError,
            "not on this machine: python -m mani_skill.utils.download_asset PickSing",
        ),
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

    entry = maniskill._load().REGISTERED_ENVS["PushCube-v1"]
    monkeypatch.setattr(entry, "cls", type("Asks", (), {"SUPPORTED_REWARD_MODES": ["dense"], "__new__": build}))
    before = download_asset.prompt_yes_no
    with pytest.raises(UserError, match="assets of the ManiSkill task 'PushCube-v1' are not on this machine"):
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


def test_an_action_of_one_moves_the_target_by_the_scale() -> None:
    ours = simulator("PushCube-v1")
    before = ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=0, seed=0)]).proprio
    ours.step_chunk([0], np.eye(1, 8, dtype=np.float32)[None])
    target = ours._seats[0].slot._env.agent.controller.controllers["arm"]._target_qpos  # type: ignore[union-attr]
    assert before is not None
    assert float(target[0, 0]) - before[0, 0] == pytest.approx(ours.spec.actions[0].scale, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "control_mode"),
    [("PushCube-v1", "pd_joint_delta_pos"), ("StackCube-v1", "pd_ee_delta_pose"), ("RollBall-v1", "pd_joint_pos")],
)
def test_numbers_are_those_of_maniskill_bit_for_bit(task: str, control_mode: str) -> None:
    from mani_skill.utils.registration import REGISTERED_ENVS

    from embodyrl.envs import maniskill_driver

    ours = simulator(task, control_mode=control_mode)
    ours.reset([0], [EpisodeSpec(task=task, start_state=5, seed=0)])
    low, high = ours.spec.action_low, ours.spec.action_high
    actions = np.random.default_rng(0).uniform(low, high, (20, len(low))).astype(np.float32)
    maniskill_driver.uninstall()
    try:
        env = REGISTERED_ENVS[task].cls(
            obs_mode="state",
            reward_mode="normalized_dense",
            control_mode=control_mode,
            sim_backend="physx_cpu",
            render_backend="none",
        )
        env.reset(seed=5)
        expected = [env.step(action) for action in actions]
    finally:
        maniskill_driver.install()
    for action, (observation, reward, _, _, info) in zip(actions, expected, strict=True):
        result = ours.step_chunk([0], action[None, None])
        assert result.observation.proprio is not None
        assert np.array_equal(result.observation.proprio, observation.numpy())
        assert (result.rewards[0, 0], result.success[0, 0]) == (reward.item(), info["success"].item())


def test_tasks_of_different_shapes_are_refused() -> None:
    ours = simulator("PushCube-v1", "PickCube-v1")
    with pytest.raises(UserError, match="mixes tasks of different shapes: 'PickCube-v1' has 42"):
        ours.reset([0], [EpisodeSpec(task="PickCube-v1", start_state=0, seed=0)])


def test_sentences() -> None:
    assert sentence("PushCube-v1") == "push the cube to the goal region"
    assert sentence("MS-CartpoleSwingUp-v1") == "cartpole swing up"


def test_rendering_says_that_it_cannot() -> None:
    ours = simulator("PushCube-v1")
    ours.reset([0], [EpisodeSpec(task="PushCube-v1", start_state=0, seed=0)])
    with pytest.raises(RenderError, match="without a renderer"):
        ours.render([0])
