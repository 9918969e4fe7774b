"""A simulator of your own in one file: a point mass in a plane that must be pushed to a goal, or opposite of it.

Run it with the configuration beside it, which names this module under `plugins:`:

    embodyrl run examples/custom_simulator.yaml

It learns in about ten seconds. To write your own, copy this file: describe your simulator (`SimulatorSpec`), implement
reset, step and observation of one environment (`Slot`), and register it. Time limits, chunks of actions, checks, worker
processes, and saving and restoring states come from the base class. `docs/simulators.md` has the details.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.infos import SimulatorInfo
from embodyrl.config.schema import EnvConfig, setting
from embodyrl.envs import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.envs.base import Slot, SlotSimulator, Transition, check_cameras, check_tasks
from embodyrl.registry import SIMULATORS

TASKS = {"reach": "push the point to the goal", "oppose": "push the point to the place opposite of the goal"}
"""Task name -> task description. Both tasks look alike: only the task description says which one it is."""
CAMERAS = ["top"]
TIME_STEP = 0.1
"""Simulated time per action [s]."""


@dataclass(frozen=True, kw_only=True)
class PointMassConfig(EnvConfig):
    """A point mass in a plane. These options are part of the schema: misspelt keys and bad values are reported before
    the start."""

    goal_radius: float = setting(0.1, above=0.0, high=1.0)
    """The target is reached within this distance [m]."""
    wind: float = setting(0.05, low=0.0)
    """Standard deviation of a random force on each axis, drawn anew for every step [N]."""


class PointMass(SlotSimulator):
    """`num_slots` planes with a point mass of 1 kg each."""

    def __init__(self, config: PointMassConfig, num_slots: int) -> None:
        check_tasks(config.tasks, TASKS, "point_mass")
        check_cameras(config.cameras, CAMERAS, "point_mass")
        self._config = config
        super().__init__(
            SimulatorSpec(
                tasks={task: TASKS[task] for task in config.tasks},
                actions=(ActionField(name="push", meaning="force", unit="N", low=(-1.0, -1.0), high=(1.0, 1.0)),),
                proprio_dim=4 if config.cameras else 6,
                max_episode_steps=config.time_limit,
                control_frequency=1.0 / TIME_STEP,
                cameras=tuple(config.cameras),
                image_size=tuple(config.image_size) if config.cameras else (0, 0),
            ),
            num_slots,
        )

    def make_slot(self, task: str) -> Slot:
        """Build a plane for one of the tasks."""
        return Plane(self._config, task)


class Plane(Slot):
    """One point mass: position [m], velocity [m/s], goal [m] and target [m], each `[2]`. The target is the goal, or the
    place opposite of it."""

    def __init__(self, config: PointMassConfig, task: str) -> None:
        self._radius, self._wind = config.goal_radius, config.wind
        self._side = 1.0 if task == "reach" else -1.0
        self._image_size = config.image_size if config.cameras else None
        self._position = self._velocity = self._goal = self._target = np.zeros(2)
        self._random = np.random.default_rng(0)

    def reset(self, episode: EpisodeSpec) -> None:
        """Place point and goal by the start state, and seed the wind."""
        layout = np.random.default_rng(episode.start_state)
        self._position, self._goal = layout.uniform(-1.0, 1.0, (2, 2))
        self._target = self._side * self._goal
        self._velocity = np.zeros(2)
        self._random = np.random.default_rng(episode.seed)

    def step(self, action: NDArray[np.float32]) -> Transition:
        """Push with `action [2]`; the reward is the progress towards the target [m], plus 1 for reaching it."""
        before = np.linalg.norm(self._target - self._position)
        force = action + self._random.normal(0.0, self._wind, 2) - self._velocity  # the last term is friction
        self._velocity = self._velocity + force * TIME_STEP
        self._position = self._position + self._velocity * TIME_STEP
        distance = np.linalg.norm(self._target - self._position)
        success = bool(distance < self._radius)
        return Transition(float(before - distance) + float(success), success, success)

    def observe(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32]]:
        """Return position, velocity and vector to the goal `[6]`; with a camera, an image `[1, H, W, 3]` shows the goal
        and the state is `[4]`."""
        state = [self._position, self._velocity]
        if self._image_size is None:
            return None, np.concatenate([*state, self._goal - self._position]).astype(np.float32)
        return self._draw(*self._image_size)[None], np.concatenate(state).astype(np.float32)

    def render(self) -> NDArray[np.uint8]:
        """Draw an image `[64, 64, 3]` for videos."""
        return self._draw(64, 64)

    def _draw(self, height: int, width: int) -> NDArray[np.uint8]:
        """The plane from above, 2 m wide: the goal green, the point red."""
        image = np.full((height, width, 3), 255, np.uint8)
        for place, colour in ((self._goal, (0, 160, 0)), (self._position, (200, 0, 0))):
            column, row = np.clip((place * [1, -1] + 1.0) / 2.0 * [width, height], 2, [width - 3, height - 3]).astype(
                int
            )
            image[row - 2 : row + 3, column - 2 : column + 3] = colour
        return image


class PointMassInfo(SimulatorInfo[PointMassConfig]):
    """What `embodyrl validate` asks before the simulator is imported."""

    def tasks(self) -> list[str]:
        """Return the names that `env.tasks` may hold."""
        return list(TASKS)

    def cameras(self) -> list[str]:
        """Return the names that `env.cameras` may hold."""
        return CAMERAS


SIMULATORS.register(
    "point_mass",
    target=PointMass,
    options=PointMassConfig,
    info=PointMassInfo,
    summary="a point mass that is pushed to a goal (examples/custom_simulator.py)",
)
