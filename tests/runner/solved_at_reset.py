"""A plug-in: an environment whose task is solved before anything was done, and one that names success only when it
comes, in every second episode."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Solved(gymnasium.Env):
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {"is_success": True}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {"is_success": True}


class Quiet(Solved):
    def reset(self, *, seed=None, options=None):
        self.solves = seed % 2 == 0
        return super().reset(seed=seed)[0], {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {"is_success": True} if self.solves else {}


gymnasium.register("EmbodyrlQuiet-v0", entry_point=Quiet, max_episode_steps=5)
gymnasium.register("EmbodyrlSolved-v0", entry_point=Solved, max_episode_steps=5)
