"""A scripted expert for robosuite's Lift with one Panda arm."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.options import GymnasiumConfig

CUBE, TURN, HAND, FINGER, OBJECTS = slice(0, 3), 5, slice(10, 13), 17, 10
"""Numbers of the state: place of the cube [m], the last two of its quaternion (z, w), place of the hand [m], one
finger's distance from the middle [m]; and how many are those of objects, before the robot's."""
NEAR, ABOVE, LIFTED = 0.01, 0.06, 0.15
"""How near the hand comes, how high above the cube it approaches, and how far it lifts [m]."""
HALF, SLACK = 0.022, 0.001
"""Half of the largest cube's edge, and how much farther from the middle a finger may be that holds it [m]."""
GAIN = 10.0
"""Action per metre; 1 is a step of 5 cm."""
OPEN, CLOSE = -1.0, 1.0


class LiftExpert:
    """Goes above the cube, down, closes the fingers and lifts. Its actions depend on the present observation alone; it
    reads the place of the cube, so the simulator runs with `proprio: full`."""

    def __init__(self, env: GymnasiumConfig) -> None:
        self.env = dataclasses.replace(env, kwargs={**env.kwargs, "proprio": "full"})
        self._first = OBJECTS if env.kwargs.get("proprio") == "robot" else 0

    def begin(self, slot: int, episode: EpisodeSpec) -> None:
        """See `Demonstrator`; it remembers nothing."""

    def act(self, slots: NDArray[np.int64], observation: Observation) -> NDArray[np.float32]:
        """See `Demonstrator`."""
        assert observation.proprio is not None, "robosuite always has a state"
        return np.stack([_action(state) for state in observation.proprio.astype(np.float64)]).astype(np.float32)

    def recorded(self, observation: Observation) -> Observation:
        """See `Demonstrator`."""
        assert observation.proprio is not None, "robosuite always has a state"
        return dataclasses.replace(observation, proprio=observation.proprio[:, self._first :])


def _half_width(state: NDArray[np.float64]) -> float:
    """Return how far the cube reaches from its middle towards a finger, which depends on how it is turned [m]."""
    turned = 2.0 * np.arctan2(state[TURN], state[TURN + 1])
    return HALF * float(abs(np.cos(turned)) + abs(np.sin(turned)))


def _action(state: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the action for a state: displacement of the hand, no rotation, fingers."""
    away = state[CUBE] - state[HAND]
    beside, goal, fingers = float(np.hypot(*away[:2])), away.copy(), OPEN
    if beside < 2.0 * NEAR and abs(away[2]) < 2.0 * NEAR:
        fingers = CLOSE
        if state[FINGER] < _half_width(state) + SLACK:  # it holds the cube, which comes along
            goal[2] = LIFTED
    elif beside > NEAR:
        goal[2] += ABOVE
    return np.concatenate([np.clip(GAIN * goal, -1.0, 1.0), np.zeros(3), [fingers]])
