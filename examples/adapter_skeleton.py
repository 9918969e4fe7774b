"""Skeleton of an adapter: a simulator that is not a Gymnasium environment becomes one that embodyrl can use.

    embodyrl run examples/adapter_skeleton.yaml

`Upstream` stands for the simulator of another package, with what such packages have in common: layouts from numpy's
global generator, steps that return four values, images with the channels first, a task description in the
observation. Put the real one in its place, and adapt `Adapter`. docs/simulators.md has a table of what to look for.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Upstream:
    """Stands for another package: a cart on a line is pushed to the mark at 0 [m]."""

    def reset(self) -> dict[str, Any]:
        self.place, self.speed = np.random.uniform(-1.0, 1.0), 0.0
        return self.observe()

    def step(self, force: float) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        self.speed += 0.1 * (force - 0.5 * self.speed)
        self.place = float(np.clip(self.place + 0.1 * self.speed, -2.0, 2.0))
        return self.observe(), -abs(self.place), False, {"task_success": abs(self.place) < 0.05}

    def observe(self) -> dict[str, Any]:
        image = np.full((3, 32, 64), 255, np.uint8)
        image[:, :, 31:33] = np.array([0, 160, 0], np.uint8)[:, None, None]
        column = int(np.clip(32 + 15 * self.place, 2, 61))
        image[:, 12:20, column - 2 : column + 2] = np.array([200, 0, 0], np.uint8)[:, None, None]
        return {"rgb": image, "state": [self.place, self.speed], "instruction": "push the cart to the mark"}


class Adapter(gymnasium.Env[Any, Any]):
    """What a policy needs of it."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    dt = 0.1  # simulated time of an action [s]

    def __init__(self, render_mode: str = "rgb_array") -> None:
        self.render_mode = render_mode
        self._inner = Upstream()
        # Images are entries of uint8 [H, W, 3], row 0 at the top: cameras by their names. All else is the state.
        self.observation_space = spaces.Dict(
            {
                "front": spaces.Box(0, 255, (32, 64, 3), np.uint8),
                "state": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)  # finite bounds, in the simulator's units

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        before = np.random.get_state()
        if seed is not None:
            np.random.seed(seed % 2**32)  # the seed decides the layout, whatever was played before
        try:
            self._seen = self._inner.reset()
        finally:
            np.random.set_state(before)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._seen, reward, done, info = self._inner.step(float(action[0]))
        return self._observation(), float(reward), done, False, {"success": bool(info["task_success"])}

    def render(self) -> Any:
        return self._observation()["front"]

    def _observation(self) -> dict[str, Any]:
        return {
            "front": np.ascontiguousarray(self._seen["rgb"].transpose(1, 2, 0)),
            "state": np.array(self._seen["state"]),
        }


gymnasium.register("adapter/Push-v0", entry_point=Adapter)
