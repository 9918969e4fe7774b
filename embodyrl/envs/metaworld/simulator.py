"""MetaWorld 3: 50 tabletop tasks of a Sawyer arm, simulated by MuJoCo on the CPU.

Observations are MetaWorld's 39 numbers: poses of end effector and objects now (18), a step ago (18), the goal (3). With
`proprio: robot` they are the first 4, end-effector position [m] and gripper opening (0 .. 1). Images are those of
MetaWorld's own cameras, turned the right way up.

Actions are 4 numbers in -1 .. 1: end-effector displacement in x, y, z (1 is 1 cm per step) and the gripper (-1 opens).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.base import Slot, SlotSimulator, Transition, check_cameras, check_task_list, check_tasks
from embodyrl.envs.metaworld.info import MetaWorldInfo
from embodyrl.envs.metaworld.tasks import (
    CAMERAS,
    PROPRIO_DIM,
    STEP_LIMIT,
    TASKS,
)
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import Renderer, Renderers
from embodyrl.envs.mujoco.scene_changes import KINDS as SHOWN
from embodyrl.envs.mujoco.scene_changes import PREFIX as CHANGES
from embodyrl.envs.mujoco.scene_changes import SceneChanges
from embodyrl.envs.options import Driver, MetaWorldConfig
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.errors import UserError

SHOWN_SITES = (1, 1, 1, 0, 0, 0)
"""Groups of sites that MuJoCo renders by default, MetaWorld's goals among them."""

FOR_PEOPLE = "corner2", (480, 480)
"""Camera and size [pixels] of images for people if the policy has none, those of MetaWorld."""

KEPT_RENDERERS = 10
"""Renderers that a process keeps, the number of tasks in MT10; more if it has more slots."""

REST = np.zeros(4, np.float32)
"""The action without motion."""

PLACED = frozenset({"robot", "layout"})
"""Kinds of perturbation that decide where an episode begins."""

OBSERVATION = "observation"
"""Name of the last observation in a snapshot."""


class MetaWorld(SlotSimulator):
    """MetaWorld with state observations, images, or both."""

    def __init__(self, config: MetaWorldConfig, num_slots: int) -> None:
        check_task_list(config.tasks, "metaworld")
        info = MetaWorldInfo(config.name)
        check_tasks(config.tasks, info.tasks(), "metaworld")
        check_cameras(config.cameras, info.cameras(), "metaworld")
        if config.time_limit > info.time_limit(config):
            times = f" x env.action_repeat = {config.action_repeat}" if config.action_repeat > 1 else ""
            before = f", after env.settle_steps = {config.settle_steps}" if config.settle_steps else ""
            raise UserError(
                f"env.max_episode_steps is {config.max_episode_steps or 'null'}{times}{before}, but MetaWorld ends its "
                f"episodes at {STEP_LIMIT} steps: set at most {info.time_limit(config)}, or auto"
            )
        height, width = config.image_size
        if config.cameras:
            rendering.context(height, width).free()  # report a missing OpenGL now, not at the first reset
        rendering.import_mujoco()
        self._config = config
        self._renderers = Renderers(most=max(num_slots, KEPT_RENDERERS))
        arm = ActionField(
            name="arm",
            meaning="delta_position",
            unit="m",
            low=(-1.0,) * 3,
            high=(1.0,) * 3,
            scale=0.01 * config.action_repeat,
        )
        gripper = ActionField(
            name="gripper", meaning="gripper", unit="1", low=(-1.0,), high=(1.0,), opens=-1.0, closes=1.0
        )
        super().__init__(
            SimulatorSpec(
                tasks={task: TASKS[task] for task in config.tasks},
                actions=(arm, gripper),
                proprio_dim=PROPRIO_DIM[config.proprio],
                max_episode_steps=config.time_limit,
                control_frequency=info.control_frequency(config),
                cameras=tuple(config.cameras),
                image_size=(height, width) if config.cameras else (0, 0),
            ),
            num_slots,
        )

    def make_slot(self, task: str) -> Slot:
        """Build an environment of `task`."""
        return MetaWorldSlot(task, self._config, self._renderers)

    def close(self) -> None:
        """Release all resources; may be called twice."""
        super().close()
        self._renderers.close()


class MetaWorldSlot(Slot):
    """One MetaWorld environment.

    Args:
        task: its name.
        config: MetaWorld's options.
        renderers: renderers that the environments of the process share, one for each task and size.
    """

    def __init__(self, task: str, config: MetaWorldConfig, renderers: Renderers) -> None:
        self._driver = _driver(config.driver)
        self._env = self._driver.make(task)
        self._task, self._config, self._renderers = task, config, renderers
        self._size = config.image_size[0], config.image_size[1]
        self._proprio_dim = PROPRIO_DIM[config.proprio]
        self._observation: NDArray[np.float64] = np.zeros(39)
        self._changes: SceneChanges | None = None
        self.perturbs = (SHOWN - PLACED if config.cameras else frozenset()) | (
            PLACED if config.driver is Driver.fast else frozenset()
        )

    def reset(self, episode: EpisodeSpec) -> None:
        """Place goal and objects by `episode.start_state`; MetaWorld draws nothing random afterwards."""
        start = [self._driver.Start(episode)] if any(kind in PLACED for kind, _ in episode.perturb) else []
        self._observation = self._driver.reset(self._env, episode.start_state, *start)
        self._changes = SceneChanges.begin(episode, self._env.model, self._env.data, self._config.cameras)
        self._env.np_random = np.random.default_rng(episode.seed)
        for _ in range(self._config.settle_steps):
            self._observation, *_ = self._env.step(REST)

    def step(self, action: NDArray[np.float32]) -> Transition:
        """Execute `action [4]`, repeated `env.action_repeat` times."""
        total, success = 0.0, False
        for _ in range(self._config.action_repeat):
            self._observation, reward, *_, info = self._env.step(action)
            total += float(reward)
            success |= bool(info["success"])
            if success and self._config.end_at_success:
                return Transition(total, True, True)
        return Transition(total, False, success)

    def observe(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32]]:
        """Return images `[V, H, W, 3]`, or None without cameras, and proprio `[39 or 4]`."""
        images = [self._render_camera(camera, self._size) for camera in self._config.cameras]
        return np.stack(images) if images else None, self._observation[: self._proprio_dim].astype(np.float32)

    def snapshot(self) -> dict[str, NDArray[Any]] | None:
        """Return the state of physics, layout and task, a few kilobytes; None with the upstream driver."""
        if self._config.driver is Driver.upstream:
            return None
        shown = {} if self._changes is None else self._changes.arrays()
        return {**self._driver.snapshot(self._env), **shown, OBSERVATION: self._observation.copy()}

    def restore(self, episode: EpisodeSpec, snapshot: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a snapshot of `episode`."""
        if self._config.driver is Driver.upstream:
            raise ValueError("it was saved with env.driver = 'fast', and env.driver = 'upstream' cannot restore it")
        observation = snapshot[OBSERVATION]
        own = {name: array for name, array in snapshot.items() if name != OBSERVATION and not name.startswith(CHANGES)}
        self._driver.restore(self._env, own)
        self._changes = SceneChanges.restored(episode, self._env.model, snapshot)
        self._observation = observation.copy()
        self._env.np_random = np.random.default_rng(episode.seed)

    def render(self) -> NDArray[np.uint8]:
        """Render the policy's first camera `[H, W, 3]`, else MetaWorld's camera `corner2`."""
        camera, size = (self._config.cameras[0], self._size) if self._config.cameras else FOR_PEOPLE
        return self._render_camera(camera, size)

    def _render_camera(self, camera: str, size: tuple[int, int]) -> NDArray[np.uint8]:
        """Render one camera, the right way up."""
        quality = self._config.render_quality
        renderer = self._renderers.get((self._task, size), lambda: Renderer(self._env.model, *size, quality))
        renderer.options.sitegroup[:] = SHOWN_SITES if self._config.show_goals else 0
        image = renderer.render(self._env.data, camera, self._changes)
        return np.ascontiguousarray(image[::-1, ::-1]) if CAMERAS[camera] else image


def _driver(kind: Driver) -> ModuleType:
    """Import the driver module; only the chosen one, since a version of MetaWorld may not support both."""
    if kind is Driver.upstream:
        from embodyrl.envs.metaworld import upstream

        return upstream
    from embodyrl.envs.metaworld import driver

    return driver
