"""A robot of any sizes; and small networks: more threads than one only make them wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces


class Arm(gymnasium.Env[Any, Any]):
    """A robot with as many numbers as one likes, for checks of configs: they ask it for its sizes."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, states: int, actions: int, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-1, 1, (states,), np.float32)
        self.action_space = spaces.Box(-1, 1, (actions,), np.float32)
        self.render_mode = render_mode


gymnasium.register("EmbodyrlArm-v0", entry_point=Arm)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
