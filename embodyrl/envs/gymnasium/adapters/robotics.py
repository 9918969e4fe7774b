"""Import of gymnasium-robotics."""

from __future__ import annotations

import importlib

from embodyrl.envs.mujoco import rendering


def load() -> None:
    """Import gymnasium-robotics, which registers its ids, without OpenGL and without its news on stderr."""
    rendering.import_mujoco()
    news = importlib.import_module("farama_notifications").notifications
    news.pop("gymnasium_robotics", None)
    importlib.import_module("gymnasium_robotics")
