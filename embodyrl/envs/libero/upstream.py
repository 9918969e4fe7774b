"""Driver of LIBERO's environments through their own interface, for versions that `driver` does not support.

Observations, images and success are those of `driver`, bit for bit, with one exception: with `proprio: full`, the poses
of objects are those at the end of the control step. `driver` gives them as robosuite's own observables do, a moment
earlier (2 ms, one physics step). There are no snapshots, so states are saved by replay; robosuite renders the images.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.base import RenderError, Slot, Transition
from embodyrl.envs.libero import task_files, tasks
from embodyrl.envs.libero.driver import SETTLING, importing_robosuite, load
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.options import LiberoConfig, Proprio
from embodyrl.envs.types import EpisodeSpec


class UpstreamSlot(Slot):
    """One environment of LIBERO, with nothing in it replaced."""

    def __init__(self, task: str, config: LiberoConfig, assets: Path) -> None:
        self._config = config
        self._states = tasks.read_states(task_files.files_of(task, config).start_states)
        self._env = _make(task, config, assets)
        self._axis_angle = importlib.import_module("robosuite.utils.transform_utils").quat2axisangle
        robot = self._env.robots[0]
        addresses = [
            self._env.sim.model.get_joint_qpos_addr(name) for name in [*robot.robot_joints, *robot.gripper.joints]
        ]
        self._objects = np.setdiff1d(np.arange(self._env.sim.model.nq), addresses)
        self.proprio_dim = tasks.ROBOT_STATE + (len(self._objects) if config.proprio is Proprio.full else 0)
        self._seen: Mapping[str, Any] = {}

    def reset(self, episode: EpisodeSpec) -> None:
        """Start from the official state of `episode.start_state`; LIBERO draws nothing random afterwards."""
        number = tasks.official_state(episode.start_state, self._config)
        self._make_opengl_current()  # the reset rebuilds the scene and releases the old one
        with _own_random_numbers():  # of numpy's global generator, with which LIBERO places fixtures
            self._env.seed(number)
            self._env.reset()
        self._seen = self._env.set_init_state(self._states[number])
        for _ in range(self._config.settle_steps):
            self._seen, *_ = self._env.step(SETTLING[self._config.settle_gripper].astype(np.float64))

    def step(self, action: NDArray[np.float32]) -> Transition:
        """Execute `action [7]`; the reward is 1 where the task is solved, else 0."""
        self._make_opengl_current()
        self._seen, _, done, _ = self._env.step(action.astype(np.float64))
        solved = bool(done)
        return Transition(float(solved), solved and self._config.end_at_success, solved)

    def observe(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32]]:
        """Return images `[V, H, W, 3]`, or None without cameras, and proprio `[S]`."""
        seen = self._seen
        rotation = self._axis_angle(np.array(seen["robot0_eef_quat"]))
        parts = [seen["robot0_eef_pos"], rotation, seen["robot0_gripper_qpos"]]
        if self._config.proprio is Proprio.full:
            parts.append(self._env.sim.data.qpos[self._objects])
        images = [self._image(camera) for camera in self._config.cameras]
        return np.stack(images) if images else None, np.concatenate(parts).astype(np.float32)

    def restore(self, episode: EpisodeSpec, snapshot: Mapping[str, NDArray[Any]]) -> None:
        """Refuse states saved by the other driver."""
        raise ValueError("it was saved with env.driver = 'fast', and env.driver = 'upstream' cannot restore it")

    def render(self) -> NDArray[np.uint8]:
        """Return the image of the policy's first camera, `[H, W, 3]`."""
        if not self._config.cameras:
            raise RenderError("LIBERO with env.driver = 'upstream' renders what env.cameras names, and it names none")
        return self._image(self._config.cameras[0])

    def close(self) -> None:
        """Release the environment."""
        self._make_opengl_current()
        self._env.close()

    def _make_opengl_current(self) -> None:
        """Make robosuite render into, and release, this environment's own context.

        It does both with whichever context is current, which may be another slot's, whose textures would be lost. Its
        context has no public name.
        """
        if self._config.cameras:
            self._env.sim._render_context_offscreen.gl_ctx.make_current()

    def _image(self, camera: str) -> NDArray[np.uint8]:
        """Return an image turned by 180 degrees, as in public evaluations."""
        return np.ascontiguousarray(self._seen[f"{tasks.CAMERAS[camera]}_image"][::-1, ::-1])


def _make(task: str, config: LiberoConfig, assets: Path) -> Any:
    """Build LIBERO's environment of a task, which renders by itself if there are cameras."""
    load()
    libero: Any = importlib.import_module("libero.libero")
    libero._assets_path_cache = str(assets)  # unless LIBERO finds it set, it downloads its assets
    if config.cameras:
        _load_opengl()
    height, width = config.image_size
    with _own_random_numbers():
        np.random.seed(0)
        return importlib.import_module("libero.libero.envs.env_wrapper").ControlEnv(
            bddl_file_name=str(task_files.files_of(task, config).scene),
            use_camera_obs=bool(config.cameras),
            has_offscreen_renderer=bool(config.cameras),
            camera_names=[tasks.CAMERAS[camera] for camera in config.cameras] or ["agentview"],
            camera_heights=height,
            camera_widths=width,
            ignore_done=True,  # the time limit is the run's
        )


def _load_opengl() -> None:
    """Load robosuite's OpenGL binding, which `load` disabled: robosuite loads it only when it is imported."""
    name = rendering.choose()
    binding = importlib.import_module("robosuite.utils.binding_utils")
    if not hasattr(binding, "GLContext"):
        with importing_robosuite(name):
            importlib.reload(binding)


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Restore the state of numpy's global generator after the block."""
    before = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(before)
