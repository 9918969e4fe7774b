"""LIBERO: 130 tabletop tasks of a Panda arm in four suites of 10 and one of 90, simulated by robosuite and MuJoCo.

Actions are 7 numbers in -1 .. 1 for robosuite's operational space controller: end-effector displacement (1: 5 cm per
step) and its rotation (axis times angle, 1 is 0.5 rad), both along the axes of the world; and the gripper, of which
only the sign counts (-1 opens, 1 closes).

The conventions are those of LIBERO's public evaluations: start states from LIBERO's files, ten steps without motion
before an episode, images turned by 180 degrees, end-effector position, rotation (axis times angle) and the positions of
the two fingers as proprio, and the task description that LIBERO makes from the task's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.base import Slot, SlotSimulator, Transition, check_cameras, check_task_list, check_tasks
from embodyrl.envs.libero import assets, task_files, tasks
from embodyrl.envs.libero.driver import SETTLING
from embodyrl.envs.libero.tasks import CAMERAS
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import Renderer, Renderers
from embodyrl.envs.mujoco.scene_changes import KINDS as SHOWN
from embodyrl.envs.mujoco.scene_changes import SceneChanges
from embodyrl.envs.options import Driver, LiberoConfig, Proprio
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.errors import UserError

if TYPE_CHECKING:
    from embodyrl.envs.libero.upstream import UpstreamSlot

FOR_PEOPLE = "agentview"
"""Camera of images for people if the policy has none."""

PLACED = frozenset({"robot", "layout"})
"""Kinds of perturbation that decide where an episode begins, see `starts`."""

COLLISION_SHAPES = 0
"""Group of collision shapes, which LIBERO does not render."""

KEPT = 10
"""Renderers, and environments that are not played, that a process keeps: the number of tasks in a suite; more if it has
more slots. An environment takes 80 to 250 MB, and two seconds to build."""

FIELDS = (
    ActionField(name="arm", meaning="delta_position", unit="m", low=(-1.0,) * 3, high=(1.0,) * 3, scale=0.05),
    ActionField(name="wrist", meaning="delta_rotation", unit="rad", low=(-1.0,) * 3, high=(1.0,) * 3, scale=0.5),
    ActionField(name="gripper", meaning="gripper", unit="1", low=(-1.0,), high=(1.0,), opens=-1.0, closes=1.0),
)


class Libero(SlotSimulator):
    """LIBERO with state observations, images, or both."""

    def __init__(self, config: LiberoConfig, num_slots: int) -> None:
        check_task_list(config.tasks, "libero")
        further = task_files.further_tasks(config) or {}
        check_tasks(config.tasks, [*tasks.known_tasks(), *further], "libero")
        check_cameras(config.cameras, CAMERAS, "libero")
        self._config = config
        self._assets = assets.find(config)
        height, width = config.image_size
        if config.cameras:
            rendering.context(height, width).free()  # report a missing OpenGL now, not at the first reset
        kept = max(num_slots, KEPT)
        self._renderers = Renderers(most=kept)
        first = self._make(config.tasks[0])
        super().__init__(
            SimulatorSpec(
                tasks={task: further.get(task) or tasks.task_description(task) for task in config.tasks},
                actions=FIELDS,
                proprio_dim=first.proprio_dim,
                max_episode_steps=config.time_limit,
                control_frequency=tasks.CONTROL_FREQUENCY,
                cameras=tuple(config.cameras),
                image_size=(height, width) if config.cameras else (0, 0),
            ),
            num_slots,
            spare=[(config.tasks[0], first)],
            most_spare=kept,
        )

    def make_slot(self, task: str) -> Slot:
        """Build an environment of `task`."""
        slot = self._make(task)
        if slot.proprio_dim != self.spec.proprio_dim:
            raise UserError(
                f"env.tasks mixes tasks of different shapes: {task!r} has {slot.proprio_dim} state numbers, "
                f"{self._config.tasks[0]!r} has {self.spec.proprio_dim}: name tasks of one suite, or "
                f"set env.proprio to robot"
            )
        return slot

    def close(self) -> None:
        """Release all resources; may be called twice."""
        super().close()
        self._renderers.close()

    def _make(self, task: str) -> LiberoSlot | UpstreamSlot:
        if self._config.driver is Driver.upstream:
            from embodyrl.envs.libero.upstream import UpstreamSlot

            return UpstreamSlot(task, self._config, self._assets)
        return LiberoSlot(task, self._config, self._assets, self._renderers)


class LiberoSlot(Slot):
    """One environment of LIBERO.

    Args:
        task: its name.
        config: LIBERO's options.
        assets: folder of meshes and textures.
        renderers: renderers that the environments of the process share, one for each set of meshes and textures: the
            tasks of LIBERO Spatial share one, and so do those of LIBERO Goal.
    """

    def __init__(self, task: str, config: LiberoConfig, assets: Path, renderers: Renderers) -> None:
        from embodyrl.envs.libero import driver

        self._config, self._renderers = config, renderers
        files = task_files.files_of(task, config)
        self._states = tasks.read_states(files.start_states)
        self._driver = driver.Driver(files.scene, assets)
        self._size = config.image_size[0], config.image_size[1]
        self._appearance = self._driver.appearance()
        self._changes: SceneChanges | None = None
        self.perturbs = PLACED | (SHOWN if config.cameras else frozenset())
        self.proprio_dim = len(self._proprio())

    def reset(self, episode: EpisodeSpec) -> None:
        """Start from the official state of `episode.start_state`; LIBERO draws nothing random afterwards."""
        self._begin(episode)
        for _ in range(self._config.settle_steps):
            self._driver.step(SETTLING[self._config.settle_gripper])

    def step(self, action: NDArray[np.float32]) -> Transition:
        """Execute `action [7]`; the reward is 1 where the task is solved, else 0."""
        solved = self._driver.step(action)
        return Transition(float(solved), solved and self._config.end_at_success, solved)

    def observe(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32]]:
        """Return images `[V, H, W, 3]`, or None without cameras, and proprio `[S]`."""
        images = [self._render_camera(camera) for camera in self._config.cameras]
        return np.stack(images) if images else None, self._proprio()

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return the whole state of physics and controller, a few kilobytes: steps are too expensive to replay."""
        return self._driver.snapshot()

    def restore(self, episode: EpisodeSpec, snapshot: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a snapshot of `episode`."""
        self._begin(episode)
        self._driver.restore(snapshot)

    def _begin(self, episode: EpisodeSpec) -> None:
        """Start, before objects come to rest."""
        number = tasks.official_state(episode.start_state, self._config)
        if any(kind in PLACED for kind, _ in episode.perturb):
            self._driver.reset_perturbed(number, self._states[number], episode.seed, episode.perturb)
        else:
            self._driver.reset(number, self._states[number])
        self._changes = None
        if episode.perturb:
            cameras = [CAMERAS[camera] for camera in self._config.cameras]
            with self._driver.scene() as scene:
                self._changes = SceneChanges.begin(episode, self._driver.model, scene, cameras)

    def render(self) -> NDArray[np.uint8]:
        """Render the policy's first camera `[H, W, 3]`, else LIBERO's camera `agentview`."""
        return self._render_camera(self._config.cameras[0] if self._config.cameras else FOR_PEOPLE)

    def _proprio(self) -> NDArray[np.float32]:
        """Return end effector and fingers `[8]`, and with `proprio: full` the poses of everything that moves."""
        with self._driver.scene() as scene:
            robot = self._driver.robot(scene)
            full = self._config.proprio is Proprio.full
            return np.concatenate([robot, self._driver.objects(scene)] if full else [robot]).astype(np.float32)

    def _render_camera(self, camera: str) -> NDArray[np.uint8]:
        """Render one camera, turned as in public evaluations: the right way up, left and right swapped."""
        renderer = self._renderers.get(self._appearance, self._make_renderer)
        with self._driver.scene() as scene:
            return np.ascontiguousarray(renderer.render(scene, CAMERAS[camera], self._changes)[:, ::-1])

    def _make_renderer(self) -> Renderer:
        renderer = Renderer(self._driver.model, *self._size, self._config.render_quality)
        renderer.options.geomgroup[COLLISION_SHAPES] = 0
        return renderer
