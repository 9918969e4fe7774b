"""What robots and benchmarks call the things that a policy sees."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.serving.observing import Observer, RequestError

ARM = ActionField(name="arm", meaning="joint_target", unit="rad", low=(-1.0,) * 7, high=(1.0,) * 7)


def spec(**changes: Any) -> SimulatorSpec:
    """A robot with two cameras and eight numbers."""
    there: dict[str, Any] = {
        "tasks": {"a": "pick up the bowl", "b": "open the drawer"},
        "actions": (ARM,),
        "proprio_dim": 8,
        "max_episode_steps": 100,
        "control_frequency": 20.0,
        "cameras": ("agentview", "wrist"),
        "image_size": (4, 6),
    }
    return SimulatorSpec(**{**there, **changes})


FRONT, WRIST = np.full((4, 6, 3), 10, np.uint8), np.full((4, 6, 3), 20, np.uint8)
STATE = np.arange(8, dtype=np.float32)
LIBERO = {"observation/image": FRONT, "observation/wrist_image": WRIST, "observation/state": STATE, "prompt": "go"}


@pytest.mark.parametrize(
    "message",
    [
        LIBERO,
        {**LIBERO, "observation/state": STATE.tolist()},
        {
            "observation/exterior_image_1_left": FRONT,
            "observation/wrist_image_left": WRIST,
            "observation/joint_position": STATE[:7],
            "observation/gripper_position": STATE[7:],
            "prompt": "go",
        },
        {
            "images": {"agentview": FRONT.transpose(2, 0, 1), "wrist": WRIST.transpose(2, 0, 1)},
            "state": STATE.astype(np.float64),
            "prompt": "go",
        },
        {"agentview": FRONT / 255.0, "wrist": WRIST.astype(np.float32) / 255.0, "state": STATE, "prompt": "go"},
    ],
    ids=["LIBERO", "a list", "DROID", "ALOHA", "floats"],
)
def test_observations_of_openpis_robots_are_read(message: dict[str, Any]) -> None:
    found = Observer(spec()).read(message)
    assert found.images is not None and found.images.shape == (1, 2, 4, 6, 3) and found.images.dtype == np.uint8
    assert (
        np.abs(found.images[0, 0].astype(int) - 10).max() <= 1
        and np.abs(found.images[0, 1].astype(int) - 20).max() <= 1
    )
    assert found.proprio is not None and found.proprio.dtype == np.float32
    assert found.proprio.tolist() == [STATE.tolist()] and found.task_descriptions == ["go"]


def test_keys_can_be_named() -> None:
    keys = {"wrist": "hand/rgb", "state": "q+gripper", "prompt": "instruction"}
    message = {"agentview": FRONT, "hand": {"rgb": WRIST}, "q": STATE[:7], "gripper": 7.0, "instruction": "go"}
    observer = Observer(spec(), keys)
    assert observer.read(message).task_descriptions == ["go"]
    assert observer.keys()["state"] == ("q+gripper",)
    with pytest.raises(RequestError, match="the image of camera 'wrist' is missing: it is looked for under 'hand/rgb'"):
        observer.read({**LIBERO})
    with pytest.raises(
        UserError, match=re.escape("--map wirst=...: the policy sees no 'wirst' - did you mean 'wrist'?")
    ):
        Observer(spec(), {"wirst": "x"})


def test_a_policy_of_one_task_knows_what_to_do() -> None:
    alone = Observer(spec(tasks={"a": "pick up the bowl"}, cameras=(), proprio_dim=2))
    assert alone.read({"state": [0.0, 1.0]}).task_descriptions == ["pick up the bowl"]
    assert alone.read({"state": [0.0, 1.0], "prompt": "wait"}).task_descriptions == ["wait"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "the task description is NoneType"),
        ({"prompt": "x" * 5000}, "the task description is str of 5,000"),
        ({"observation/state": STATE[:7]}, "observation/state has 7 numbers, but the policy sees 8"),
        ({"observation/state": STATE[None]}, "observation/state is float32 [1, 8]: want a row of numbers"),
        ({"observation/state": [1, [2]]}, "observation/state is list of 2: want a row of numbers"),
        (
            {"observation/state": np.append(STATE[:7], np.nan)},
            "observation/state has a number that is not finite (at 7)",
        ),
        ({"observation/image": FRONT[:2]}, "observation/image is 2 x 6 pixels, but the policy sees 4 x 6: resize it"),
        ({"observation/image": FRONT[..., :2]}, "observation/image is uint8 [4, 6, 2]: want an image"),
        ({"observation/image": FRONT.astype(np.int64)}, "observation/image has numbers of type int64: want uint8"),
        ({"observation/image": FRONT.astype(np.float32)}, "observation/image has floats from 10 to 10: want 0 to 1"),
        ({"observation/image": FRONT * np.nan}, "observation/image has floats from nan to nan: want 0 to 1"),
        ({"observation/image": b"png"}, "observation/image is bytes of 3: want an image"),
    ],
)
def test_what_the_policy_cannot_see_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        Observer(spec()).read({**LIBERO, **changes})


def test_images_of_another_size_are_scaled_if_that_is_asked_for() -> None:
    wide = np.full((8, 24, 3), 200, np.uint8)  # twice as wide as the policy sees, for its height
    found = Observer(spec(), resize=True).read({**LIBERO, "observation/image": wide}).images
    assert found is not None and found[0, 1].tolist() == WRIST.tolist(), "which has the size"
    assert found[0, 0, 1:3].min() == 200 and found[0, 0, 0].max() == found[0, 0, 3].max() == 0


def test_what_is_missing_is_named_beside_what_is_there() -> None:
    message = {name: value for name, value in LIBERO.items() if name != "observation/state"}
    with pytest.raises(RequestError, match=r"the state is missing: .* the message has 'observation/image'"):
        Observer(spec()).read(message)
    with pytest.raises(UserError, match=re.escape("the policy sees 2 frames of each camera")):
        Observer(spec(frames=2))
