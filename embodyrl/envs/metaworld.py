"""MetaWorld 3: 50 tabletop tasks of a Sawyer arm, simulated by MuJoCo on the CPU.

Observations are MetaWorld's 39 numbers: hand and object poses now (18) and one step ago (18), then the goal (3).
Actions are 4 numbers in -1 .. 1: the hand's displacement in x, y, z (1 is 1 cm per step) and the gripper (-1 opens).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.base import Slot, SlotSimulator, Transition, check_task_list, check_tasks
from embodyrl.envs.mujoco_painter import Painter
from embodyrl.envs.options import MetaWorldConfig
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.errors import UserError

STEP_LIMIT = 500
"""MetaWorld refuses to step an episode further than this."""

TASKS = {
    "assembly-v3": "pick up the wrench and put its ring on the peg",
    "basketball-v3": "pick up the basketball and put it through the hoop",
    "bin-picking-v3": "pick up the object from one bin and place it in the other bin",
    "box-close-v3": "pick up the lid and close the box with it",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "press the button from above, past the wall",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "press the button, past the wall",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "take the wrench off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "hand-insert-v3": "insert the gripper into the hole",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-open-v3": "turn on the faucet",
    "faucet-close-v3": "turn off the faucet",
    "hammer-v3": "pick up the hammer and drive the nail in",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "insert the peg into the hole in the side of the box",
    "pick-place-wall-v3": "pick up the puck and place it at the goal behind the wall",
    "pick-out-of-hole-v3": "pick the puck out of the hole",
    "push-back-v3": "pull the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "pick up the puck and place it at the goal",
    "plate-slide-v3": "slide the plate into the net",
    "plate-slide-side-v3": "slide the plate sideways into the net",
    "plate-slide-back-v3": "slide the plate back out of the net",
    "plate-slide-back-side-v3": "slide the plate sideways out of the net",
    "peg-unplug-side-v3": "pull the peg out of the hole",
    "soccer-v3": "push the ball into the goal",
    "stick-push-v3": "pick up the stick and push the thermos with it",
    "stick-pull-v3": "pick up the stick and pull the thermos with it",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-v3": "reach the goal position",
    "reach-wall-v3": "reach the goal position behind the wall",
    "shelf-place-v3": "pick up the puck and place it on the shelf",
    "sweep-into-v3": "sweep the puck into the hole",
    "sweep-v3": "sweep the puck off the table",
    "window-open-v3": "slide the window open",
    "window-close-v3": "slide the window closed",
}
"""Task name -> the sentence that tells a policy what to do. Here, so that names can be checked without MetaWorld."""


def known_tasks() -> list[str]:
    """All task names (imports nothing heavy)."""
    return sorted(TASKS)


class MetaWorld(SlotSimulator):
    """MetaWorld with state observations."""

    def __init__(self, config: MetaWorldConfig, num_slots: int) -> None:
        check_task_list(config.tasks, "metaworld")
        check_tasks(config.tasks, known_tasks(), "metaworld")
        if config.max_episode_steps > STEP_LIMIT:
            raise UserError(
                f"env.max_episode_steps is {config.max_episode_steps}, but MetaWorld ends its episodes at "
                f"{STEP_LIMIT} steps: set at most that"
            )
        self._end_at_success = config.end_at_success
        super().__init__(
            SimulatorSpec(
                tasks={task: TASKS[task] for task in config.tasks},
                actions=(
                    ActionField(
                        name="arm", meaning="delta_position", unit="m", low=(-1.0,) * 3, high=(1.0,) * 3, scale=0.01
                    ),
                    ActionField(name="gripper", meaning="gripper", unit="1", low=(-1.0,), high=(1.0,)),
                ),
                proprio_dim=39,
                max_episode_steps=config.max_episode_steps,
                control_frequency=80.0,
            ),
            num_slots,
        )

    def make_slot(self, task: str) -> Slot:
        """An environment of `task`."""
        return MetaWorldSlot(task, end_at_success=self._end_at_success)


class MetaWorldSlot(Slot):
    """One MetaWorld environment."""

    def __init__(self, task: str, *, end_at_success: bool) -> None:
        from embodyrl.envs import metaworld_driver

        self._driver = metaworld_driver
        self._env = metaworld_driver.make(task)
        self._end_at_success = end_at_success
        self._observation: NDArray[np.float64] = np.zeros(39)
        self._painter: Painter | None = None

    def reset(self, episode: EpisodeSpec) -> None:
        """Place goal and objects as `episode.start_state` says; MetaWorld draws nothing random after that."""
        self._observation = self._driver.reset(self._env, episode.start_state)
        self._env.np_random = np.random.default_rng(episode.seed)

    def step(self, action: NDArray[np.float32]) -> Transition:
        """Execute `action [4]`."""
        self._observation, reward, info = self._env.step(action)
        success = bool(info["success"])
        return Transition(float(reward), success and self._end_at_success, success)

    def observe(self) -> tuple[None, NDArray[np.float32]]:
        """No images; proprio `[39]`."""
        return None, self._observation.astype(np.float32)

    def render(self) -> NDArray[np.uint8]:
        """The scene as MetaWorld's camera `corner2` sees it, `[480, 480, 3]`."""
        if self._painter is None:
            self._painter = Painter(self._env.model, size=480)
        upside_down = self._painter.paint(self._env.data, camera="corner2")
        return np.ascontiguousarray(upside_down[::-1, ::-1])

    def close(self) -> None:
        """Release the environment."""
        if self._painter is not None:
            self._painter.close()
