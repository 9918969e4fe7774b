"""Driver of MetaWorld's environments through their own interface, for versions that `driver` does not support.

Observations, rewards and success are those of `driver`, bit for bit: both start episode `n` from the layout that a
generator seeded with `n` draws. There are no snapshots, so states are saved by replay.

MetaWorld freezes the layout of an environment when it is made. `_freeze_rand_vec` is the flag for this; it has no
public name, and is the only private attribute used here.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
from numpy.typing import NDArray


def make(task: str) -> Any:
    """Return MetaWorld's environment of `task` with the goal in its observations, ready for `reset`."""
    # MetaWorld draws a first layout from numpy's global generator, which it restores if a seed is given.
    classes: dict[str, Any] = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
    env = classes[f"{task}-goal-observable"](seed=0)
    env.seeded_rand_vec = True
    return env


def reset(env: Any, start_state: int) -> NDArray[np.float64]:
    """Start an episode of a `make` environment laid out by `start_state`; returns the observation `[39]`.

    `env.reset` resets twice, so the layout is drawn before it and frozen: else the second reset would draw another one.
    """
    mujoco.mj_resetData(env.model, env.data)  # some layouts depend on where the last episode left things
    env.seed(start_state)
    env._freeze_rand_vec = False
    env.reset_model()
    env._freeze_rand_vec = True
    observation: NDArray[np.float64]
    observation, _ = env.reset()
    # MetaWorld moves bodies in the model at the end of a reset; images would show them at their old places.
    mujoco.mj_kinematics(env.model, env.data)
    mujoco.mj_comPos(env.model, env.data)
    mujoco.mj_camlight(env.model, env.data)
    return observation
