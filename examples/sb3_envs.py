"""Simulators of embodyrl for Stable-Baselines3: its PPO learns in them, with observations normalised by VecNormalize.

python examples/sb3_envs.py [STEPS]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, VecNormalize

import embodyrl


class Sb3Envs(VecEnv):
    """`embodyrl.Envs` as Stable-Baselines3 steps them. Both begin the next episode in the step that ends one."""

    def __init__(self, envs: embodyrl.Envs) -> None:
        if envs.chunk_size != 1 or envs.spec.cameras:
            raise embodyrl.UserError("Sb3Envs takes single actions and states: chunk_size=1, env.cameras=[]")
        self.envs = envs
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> np.ndarray:
        seeds, self._seeds = self._seeds, [None] * self.num_envs
        return self.envs.reset(seed=seeds[0]).proprio

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        result = self.envs.step(self._actions)
        infos: list[dict[str, Any]] = [{"is_success": bool(held)} for held in result.success[:, 0]]
        for env in np.flatnonzero(result.ended):
            infos[env]["terminal_observation"] = result.final_observation.proprio[env]
            infos[env]["TimeLimit.truncated"] = bool(result.truncated[env])
        return result.observation.proprio, result.rewards[:, 0], result.ended, infos

    def get_images(self) -> list[np.ndarray]:
        return list(self.envs.render())

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        values = {"render_mode": "rgb_array", "spec": None}
        if attr_name not in values:
            raise AttributeError(f"the simulators are in processes of their own, and offer no {attr_name}")
        return [values[attr_name] for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(f"the simulators are in processes of their own: set {attr_name} in the config")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise AttributeError(f"the simulators are in processes of their own: {method_name} cannot be called")

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    envs = VecNormalize(VecMonitor(Sb3Envs(embodyrl.make_envs("gym/pendulum", num_envs=4))))
    model = PPO("MlpPolicy", envs, gamma=0.9, n_steps=256, seed=1, device="cpu")
    model.learn(steps)
    envs.training = envs.norm_reward = False
    mean, deviation = evaluate_policy(model, envs, n_eval_episodes=20)
    print(f"return {mean:.1f} +- {deviation:.1f}")
    envs.close()
