"""What a newcomer's simulator gets to read: real plug-ins in real processes."""

import numpy as np
import pytest
from wrong_simulator import WrongConfig

from embodyrl.envs.manager import EnvManager
from embodyrl.envs.types import EpisodeSpec
from embodyrl.errors import UserError
from embodyrl.placement.launcher import RemoteError


def run(name, wrong):
    config = WrongConfig(name=name, wrong=wrong, num_envs=2, workers=2, cameras=["side"], image_size=[8, 16])
    with EnvManager(config, chunk_size=2, plugins=["wrong_simulator"]) as manager:
        # Of the second process only, so that the env's number in the run is not that in the process.
        manager.reset([1], [EpisodeSpec(task="wait", start_state=0, seed=0)])
        manager.step([1], np.zeros((1, 2, 1), np.float32))


def message(name, wrong):
    with pytest.raises(RemoteError) as caught:
        run(name, wrong)
    assert caught.value.is_user_error
    assert "Traceback" not in str(caught.value)
    assert "direct cause" not in caught.value.remote_traceback
    assert "During handling" not in caught.value.remote_traceback
    return caught.value.for_people


RESET = "simulator 'wrong_slots', env 1, reset: Waiting.observe() returned "
IMAGES = (
    ", want uint8 (1, 8, 16, 3), that is (views, height, width, 3) with env.cameras = ['side'] and "
    "env.image_size = [8, 16]: "
)
STATE = ", want float32 (2,), the SimulatorSpec.proprio_dim = 2 numbers: "
NUMBERS = "return 2 numbers, or declare in SimulatorSpec how many there are"
STEP = "simulator 'wrong_slots', env 1, step_chunk: Waiting.step() returned "
TRANSITION = (
    ", want Transition(reward, terminated, success, truncated), a number and three bools: "
    "return Transition(reward=float(...), terminated=bool(...), success=bool(...))"
)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            "size",
            f"{RESET}images uint8 (1, 7, 16, 3){IMAGES}"
            "render at env.image_size, or embodyrl.envs.images.resize(image, *config.image_size) for each image",
        ),
        (
            "type",
            f"{RESET}images float32 (1, 8, 16, 3){IMAGES}"
            "colours are whole numbers from 0 to 255: (255 * images).round().astype(np.uint8)",
        ),
        ("channels", f"{RESET}images uint8 (1, 3, 8, 16){IMAGES}channels come last: np.moveaxis(images, -3, -1)"),
        (
            "views",
            f"{RESET}images uint8 (8, 16, 3){IMAGES}"
            "stack the images of the cameras, also if there is one: np.stack([image])",
        ),
        (
            "state",
            f"{RESET}proprio float32 (3,){STATE}return 2 numbers, or declare in SimulatorSpec how many there are",
        ),
        ("double", f"{RESET}proprio float64 (2,){STATE}convert it with .astype(np.float32)"),
        ("pair", f"{RESET}float32 (2,), want a pair (images or None, proprio or None)"),
        ("tuple", f"{STEP}tuple(float, bool, bool){TRANSITION}"),
        ("reward", f"{STEP}Transition(float64 (2,), bool, bool, bool){TRANSITION}"),
        ("no reward", f"{STEP}Transition(None, bool, bool, bool){TRANSITION}"),
        ("terminated", f"{STEP}Transition(float, bool (2,), bool, bool){TRANSITION}"),
    ],
)
def test_a_slot_that_returns_something_else(wrong, text):
    assert message("wrong_slots", wrong) == text


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            "images",
            "reset: it returned images uint8 (1, 1, 8, 16, 4), want uint8 (1, 1, 8, 16, 3), that is (envs, views, "
            "height, width, 3) with env.cameras = ['side'] and env.image_size = [8, 16]: "
            "stack one RGB image per camera, in the order of env.cameras",
        ),
        (
            "no state",
            "reset: it returned proprio None, want float32 (1, 2), the SimulatorSpec.proprio_dim = 2 numbers of each "
            f"env: {NUMBERS}",
        ),
        ("pair", "reset: it returned tuple, want an embodyrl.envs.Observation"),
        ("task", "reset: it returned the task description 'go', which no task of SimulatorSpec.tasks has"),
        ("rewards", "step_chunk: it returned rewards float32 (1,), want float32 (1, 2), a row for each env"),
        ("done", "step_chunk: it returned terminated None, want bool (1,), a row for each env"),
    ],
)
def test_a_batch_that_returns_something_else(wrong, text):
    assert message("wrong_batch", wrong) == f"simulator 'wrong_batch', env 1, {text}"


def test_a_spec_with_another_image_size_is_refused_before_anything_is_played():
    with pytest.raises(UserError, match=r"env\.image_size is \[8, 16\], but simulator 'wrong_slots' declares .*8, 12"):
        run("wrong_slots", "spec")


def test_an_error_in_the_simulators_own_code_keeps_its_traceback():
    with pytest.raises(RemoteError, match=r"(?s)could not convert string to float.*wrong_simulator\.py.*in step"):
        run("wrong_slots", "own")


def test_what_is_right_passes():
    run("wrong_slots", "nothing")
    run("wrong_batch", "nothing")
