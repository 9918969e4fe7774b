"""MetaWorld's images: those that MetaWorld draws, the right way up, and nothing else changes when they are drawn."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from slow import rest_slow

pytest.importorskip("metaworld", reason="metaworld not installed")

from embodyrl.envs.metaworld import tasks
from embodyrl.envs.metaworld.simulator import MetaWorld, MetaWorldSlot
from embodyrl.envs.metaworld.tasks import CAMERAS
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import NoOpenGLError, Renderer
from embodyrl.envs.options import MetaWorldConfig, RenderQuality
from embodyrl.envs.types import EpisodeSpec, Observation

try:
    rendering.context(16, 16).free()
except NoOpenGLError as error:
    pytest.skip(str(error), allow_module_level=True)

FAST = RenderQuality.fast
TASKS = sorted(tasks.TASKS) if os.environ.get("EMBODYRL_ALL_TASKS") else ["reach-v3", "door-open-v3", "hammer-v3"]
MOVES = np.tile(np.array([0.3, -0.5, 0.4, 0.6], np.float32), (5, 1))


def simulator(*tasks: str, num_slots: int = 1, **options: Any) -> MetaWorld:
    """A simulator of `tasks`."""
    return MetaWorld(MetaWorldConfig(name="metaworld", tasks=list(tasks), **options), num_slots)


def start(ours: MetaWorld, task: str, start_state: int = 3) -> Observation:
    """Begin an episode in slot 0."""
    return ours.reset([0], [EpisodeSpec(task=task, start_state=start_state, seed=1)])


def env_of(ours: MetaWorld) -> Any:
    """MetaWorld's environment in slot 0."""
    slot = ours._seats[0].slot
    assert isinstance(slot, MetaWorldSlot)
    return slot._env


def turned(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Turned by 180 degrees."""
    return image[::-1, ::-1]


def metaworlds_own(env: Any, camera: str, size: tuple[int, int]) -> NDArray[np.uint8]:
    """What MetaWorld's (Gymnasium's) own renderer draws of `env`."""
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

    rendering.choose()
    renderer = MujocoRenderer(env.model, env.data, width=size[1], height=size[0], camera_name=camera)
    image: NDArray[np.uint8] = renderer.render("rgb_array")
    renderer.close()
    return image


def test_images_are_metaworlds_own_bit_for_bit_and_the_right_way_up() -> None:
    size = 48, 80
    ours = simulator("push-v3", cameras=list(CAMERAS), image_size=list(size))
    start(ours, "push-v3")
    images = ours.step_chunk([0], MOVES[None]).observation.images
    assert images is not None and images.shape == (1, len(CAMERAS), *size, 3)
    for image, camera in zip(images[0], CAMERAS, strict=True):
        own = metaworlds_own(env_of(ours), camera, size)
        assert np.array_equal(image, turned(own) if CAMERAS[camera] else own), camera
    ours.close()


def test_cameras_that_are_turned_are_those_mounted_upside_down() -> None:
    ours = simulator("push-v3")
    start(ours, "push-v3")
    for camera, is_upside_down in CAMERAS.items():
        upwards = env_of(ours).data.camera(camera).xmat.reshape(3, 3)[2, 1]  # z of the image's upward direction
        assert is_upside_down == (upwards < -0.1), camera
    ours.close()


def test_corner4_is_the_view_of_public_vla_evaluations() -> None:
    """They move `corner2` to (0.75, 0.075, 0.7) and turn its images."""
    ours = simulator("door-open-v3", cameras=["corner4"], image_size=[64, 64])
    images = start(ours, "door-open-v3").images
    env = env_of(ours)
    env.model.cam_pos[env.model.camera("corner2").id] = 0.75, 0.075, 0.7
    import mujoco

    mujoco.mj_forward(env.model, env.data)
    assert images is not None
    assert np.array_equal(images[0, 0], turned(metaworlds_own(env, "corner2", (64, 64))))
    ours.close()


@pytest.mark.parametrize("task", rest_slow(TASKS))
def test_the_first_image_shows_everything_where_it_is(task: str) -> None:
    import mujoco

    ours = simulator(task, cameras=["corner2", "gripperPOV"], image_size=[64, 64], render_quality=FAST)
    start(ours, task, start_state=1)
    images = start(ours, task, start_state=2).images
    env = env_of(ours)
    before = env.data.site_xpos.copy()
    mujoco.mj_forward(env.model, env.data)
    assert images is not None and np.array_equal(before, env.data.site_xpos)
    slot = ours._seats[0].slot
    assert slot is not None and np.array_equal(slot.observe()[0], images[0])
    ours.close()


def test_the_goal_of_the_first_image_is_where_the_numbers_say() -> None:
    ours = simulator("reach-v3", cameras=["corner2"], image_size=[64, 64], render_quality=FAST)
    for start_state in (1, 2):
        proprio = start(ours, "reach-v3", start_state).proprio
        assert proprio is not None
        assert np.allclose(env_of(ours).data.site("goal").xpos, proprio[0, -3:], atol=1e-6)
    ours.close()


@pytest.mark.parametrize("task", rest_slow(TASKS))
def test_drawing_changes_no_number(task: str) -> None:
    results = []
    for options in ({}, {"cameras": ["corner2"], "image_size": [32, 32], "render_quality": FAST}):
        ours = simulator(task, **options)
        first = start(ours, task).proprio
        steps = [ours.step_chunk([0], move[None, None]) for move in MOVES]
        results.append([first, *[(step.observation.proprio, step.rewards) for step in steps]])
        ours.close()
    assert repr(results[0]) == repr(results[1])
    assert np.array_equal(results[0][-1][0], results[1][-1][0]) and results[0][-1][1] == results[1][-1][1]


def test_fast_images_differ_from_full_ones_and_nothing_else_does() -> None:
    seen = {}
    for quality in RenderQuality:
        ours = simulator("push-v3", cameras=["corner2"], image_size=[64, 64], render_quality=quality)
        start(ours, "push-v3")
        seen[quality] = ours.step_chunk([0], MOVES[None])
        ours.close()
    full, fast = seen[RenderQuality.full], seen[RenderQuality.fast]
    assert full.observation.images is not None and fast.observation.images is not None
    differs = (full.observation.images != fast.observation.images).any(axis=-1)
    assert 0.02 < differs.mean() < 0.98
    assert np.array_equal(full.observation.proprio, fast.observation.proprio)
    assert np.array_equal(full.rewards, fast.rewards)


def test_full_is_the_default_and_is_drawn_with_the_models_own_settings() -> None:
    assert MetaWorldConfig(name="metaworld", tasks=["reach-v3"]).render_quality is RenderQuality.full
    for quality, shadows in ((RenderQuality.full, 4096), (FAST, 0)):
        ours = simulator("reach-v3", cameras=["corner2"], image_size=[32, 32], render_quality=quality)
        start(ours, "reach-v3")
        assert env_of(ours).model.vis.quality.shadowsize == shadows
        ours.close()


def test_slots_of_a_task_share_a_context_and_tasks_make_room_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodyrl.envs.metaworld.simulator.KEPT_RENDERERS", 1)
    made = []
    original = Renderer.__init__
    monkeypatch.setattr(Renderer, "__init__", lambda self, *args: (made.append(args), original(self, *args))[1])
    options: dict[str, Any] = {"cameras": ["corner2"], "image_size": [32, 32], "render_quality": FAST}
    ours = simulator("reach-v3", "drawer-open-v3", num_slots=2, **options)
    first = [EpisodeSpec(task="reach-v3", start_state=number, seed=0) for number in (1, 2)]
    alone = ours.reset([0, 1], first).images
    assert len(made) == 1
    one = simulator("reach-v3", "drawer-open-v3", **options)
    images = [start(one, task).images for task in ("reach-v3", "drawer-open-v3", "reach-v3")]
    assert len(made) == 4, "room for one only"
    assert np.array_equal(images[0], images[2]) and not np.array_equal(images[0], images[1])
    again = ours.reset([0, 1], first).images  # whatever others made and released meanwhile
    assert alone is not None and again is not None and np.array_equal(alone, again)
    ours.close()
    one.close()


def test_a_renderer_that_is_forgotten_does_not_spoil_the_others() -> None:
    ours = simulator("door-open-v3", cameras=["corner2"], image_size=[32, 32], render_quality=FAST)
    images = start(ours, "door-open-v3").images
    env = env_of(ours)
    for _ in range(2):
        forgotten = Renderer(env.model, 40, 40, FAST)
        forgotten.render(env.data, "corner2")
        slot = ours._seats[0].slot
        assert slot is not None and images is not None and np.array_equal(slot.observe()[0], images[0])
        del forgotten
    ours.close()


def test_images_for_people() -> None:
    plain = simulator("reach-v3")
    start(plain, "reach-v3")
    before = plain.render([0])
    plain.step_chunk([0], MOVES[None])
    assert before.shape == (1, 480, 480, 3) and (before != plain.render([0])).any()
    plain.close()
    seeing = simulator("reach-v3", cameras=["topview", "corner"], image_size=[32, 48], render_quality=FAST)
    images = start(seeing, "reach-v3").images
    assert images is not None and np.array_equal(seeing.render([0]), images[:, 0])
    seeing.close()


DRAW = (
    "from embodyrl.envs.metaworld.simulator import MetaWorld, MetaWorldConfig\n"
    "from embodyrl.envs.types import EpisodeSpec\n"
    "from embodyrl.errors import UserError\n"
    "config = MetaWorldConfig(name='metaworld', tasks=['reach-v3'], cameras={cameras}, image_size=[48, 64])\n"
    "try:\n"
    "    seen = MetaWorld(config, 1).reset([0], [EpisodeSpec(task='reach-v3', start_state=0, seed=0)])\n"
    "    print('fine', seen.images if seen.images is None else seen.images.tobytes().hex()[:20000])\n"
    "except UserError as error:\n"
    "    print(error)\n"
)


def in_a_process(cameras: list[str], **environment: str) -> str:
    """What a fresh process says that starts an episode."""
    kept = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    command = [sys.executable, "-c", DRAW.format(cameras=cameras)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**kept, **environment}, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_processes_draw_the_same_at_full_quality() -> None:
    assert in_a_process(["corner2"]) == in_a_process(["corner2"]) != "fine None"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MUJOCO_GL": "eggl"}, "the environment variable MUJOCO_GL is 'eggl', which MuJoCo does not know"),
        ({"MUJOCO_GL": "off"}, "MUJOCO_GL is 'off', which forbids rendering: unset it"),
        ({"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "7"}, "cannot render images on this machine with egl"),
        ({"MUJOCO_GL": "glfw", "DISPLAY": ""}, "cannot render images on this machine with glfw"),
        ({"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "osmesa"}, "cannot render images on this machine with egl"),
    ],
)
def test_no_opengl_is_said_in_words(environment: dict[str, str], message: str) -> None:
    assert message in in_a_process(["corner2"], **environment)


@pytest.mark.parametrize("task", rest_slow(["reach-v3", "faucet-close-v3"]))
def test_the_dots_that_mark_goals_can_be_left_out(task: str) -> None:
    seen = []
    for shown in (True, False):
        ours = simulator(task, cameras=["corner4"], image_size=[96, 96], render_quality=FAST, show_goals=shown)
        seen.append(start(ours, task))
        ours.close()
    assert seen[0].images is not None and seen[1].images is not None
    assert 0 < (seen[0].images != seen[1].images).any(-1).mean() < 0.02
    assert np.array_equal(seen[0].proprio, seen[1].proprio)
